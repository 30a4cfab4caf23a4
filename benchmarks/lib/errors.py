"""The error that ends a run with one sentence."""


class BenchError(Exception):
    """Something the user can mend; the message is one sentence that says how. Exit status 2."""
