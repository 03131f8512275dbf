"""One small fault after another, planted in the Python (scripts/python_mutants.py)."""
