"""Where kernels run: `cuda` on a device, `interpreter` on the CPU."""
