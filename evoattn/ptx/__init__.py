"""A PTX interpreter: runs the PTX of our kernels on the CPU."""
