"""The found kernels, called from PyTorch: `evoattn.attention` and what stands around it."""
