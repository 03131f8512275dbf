"""Kernel families: one file each, one row each in `registry.py`."""
