"""Parts of `fault_runs.py`: searches in processes of their own, and what is done to them."""
