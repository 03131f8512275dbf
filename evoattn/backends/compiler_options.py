"""The options that every source is compiled with.

A file of their own: the op reads them, and needs no compiler where it finds its kernels on disk.
"""

OPTIONS = ("--std=c++17", "-default-device", "--ptxas-options=-v", "--no-cache")
"""NVRTC's own cache would answer a repeated compile without the log that says registers and spills."""
