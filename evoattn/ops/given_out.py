"""The tensor that a caller gives for the answer."""

from __future__ import annotations

import torch
from torch import Tensor

from evoattn.ops.autocast import autocast_dtype, has_autocast


def require_out(out: Tensor, query: Tensor, value: Tensor) -> None:
    """Raise `ValueError` unless `out` has the answer's shape, query's dtype, or that of autocast, and its device, and
    nothing wants gradients, `TypeError` where it is no tensor."""
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a tensor, not {type(out).__name__}.")
    shape, dtype = (*query.shape[:-1], value.shape[-1]), query.dtype
    if has_autocast(query.device.type):
        dtype = autocast_dtype(query.device.type, query)
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != query.device:
        raise ValueError(
            f"out must be a {dtype} tensor of shape {list(shape)} on {query.device}, "
            f"not {out.dtype} {list(out.shape)} on {out.device}."
        )
    if torch.is_grad_enabled() and (out.requires_grad or query.requires_grad or value.requires_grad):
        raise ValueError("out cannot be given where gradients are wanted, as with torch's own out arguments.")


def needs_copy(out: Tensor, *inputs: Tensor) -> bool:
    """Whether a kernel may not write the answer into `out` itself: it lies in the memory of an input, which may be read
    after that, or is negated when it is read, or is of a subclass."""
    if type(out) is not Tensor or out.is_neg():
        return True
    memory = out.untyped_storage()
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
    others = (tensor.untyped_storage() for tensor in inputs)  # not the same ones: DLPack makes another of a part
    return any(start < other.data_ptr() + other.nbytes() and other.data_ptr() < end for other in others)
