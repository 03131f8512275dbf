"""Recorded kernels as files that others can build."""
