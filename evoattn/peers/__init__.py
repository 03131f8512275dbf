"""What a kernel is compared with: PyTorch's SDPA backends and FlashAttention 3 and 4."""
