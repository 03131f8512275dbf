"""The tensor that a caller gives for the answer."""

from __future__ import annotations

import torch
from torch import Tensor


def require_out(out: Tensor, query: Tensor, value: Tensor) -> None:
    """Raise `ValueError` unless `out` has the answer's shape, query's dtype and device, and nothing wants gradients."""
    shape = (*query.shape[:-1], value.shape[-1])
    if tuple(out.shape) != shape or out.dtype != query.dtype or out.device != query.device:
        raise ValueError(
            f"out must be a {query.dtype} tensor of shape {list(shape)} on {query.device}, "
            f"not {out.dtype} {list(out.shape)} on {out.device}."
        )
    if torch.is_grad_enabled() and (out.requires_grad or query.requires_grad or value.requires_grad):
        raise ValueError("out cannot be given where gradients are wanted, as with torch's own out arguments.")


def is_shared(out: Tensor, *inputs: Tensor) -> bool:
    """Whether `out` lies in the memory of an input, which a kernel may read after it has written."""
    start = out.untyped_storage().data_ptr()
    return any(tensor.untyped_storage().data_ptr() == start for tensor in inputs)
