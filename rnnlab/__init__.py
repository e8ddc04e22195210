"""rnnlab: recurrent networks with State, Graph and Context kept apart."""

import time

# When this process started, on the monotonic clock. Everything heavy is
# imported after this line, and until here a process computes and hardly waits,
# so its CPU time is the wall time that has passed.
PROCESS_START = time.monotonic() - time.process_time()
