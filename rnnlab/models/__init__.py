"""Models as functions of their parameters, one a file."""
