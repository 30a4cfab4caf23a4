"""Parts of the harness, one idea a file."""
