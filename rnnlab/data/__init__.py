"""Data as numpy arrays of fixed shape: files, vocabularies, batches. No jax."""
