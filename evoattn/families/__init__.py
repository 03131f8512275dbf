"""Kernel families: one package each, one row each in `registry.py`."""
