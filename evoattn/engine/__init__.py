"""The loop that every search runs, over one problem or groups of them, and the workers and finals that it needs."""
