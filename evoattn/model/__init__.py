"""The plain data that all rooms share; no heavy import."""
