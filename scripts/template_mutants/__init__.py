"""One small fault after another, planted in the CUDA of the templates (scripts/mutants.py)."""
