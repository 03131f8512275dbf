"""Samplers: one file each, one row each in `registry.py`; the only importers of optuna."""
