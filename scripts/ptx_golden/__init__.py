"""Small launches for the interpreter and for a GPU: what `scripts/golden.py` records and `tests/ptx` runs."""
