"""What a process on a device needs before its first answer and has not to be imported: it starts beside the imports."""

from __future__ import annotations

from contextlib import suppress

SIDE = 64


def load_products(device: str, *dtypes: str) -> None:
    """Have torch load its kernels for products and softmax of square matrices of `dtypes` (their names in torch) on
    `device`: cuBLAS takes some 0.2 s to start, which the first reference would wait for.

    What fails here fails again where it is needed, and is said there.
    """
    with suppress(ImportError, RuntimeError, AssertionError):  # the last of a torch without CUDA
        import torch

        for name in dtypes:
            matrix = torch.zeros(SIDE, SIDE, dtype=getattr(torch, name), device=device)
            torch.softmax(matrix @ matrix.T, -1).square().sum().sqrt().item()
