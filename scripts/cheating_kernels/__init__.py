"""Kernels that lie, in ways that fooled others: `faults` plants them, `pipeline` runs them through a whole search."""
