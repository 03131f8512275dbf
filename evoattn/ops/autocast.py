"""What autocast makes of the tensors of a call."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def has_autocast(kind: str) -> bool:
    """Whether autocast is on for devices of that kind; torch raises where it knows none for it."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def autocast_dtype(kind: str, tensor: Tensor) -> torch.dtype:
    """What autocast hands to SDPA has this dtype: of floating tensors on devices of that kind its own, but for float64,
    which stays as it is."""
    changes = tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == kind
    return torch.get_autocast_dtype(kind) if changes else tensor.dtype


def autocast(kind: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors as autocast hands them to SDPA."""
    return tuple(tensor.to(autocast_dtype(kind, tensor)) for tensor in tensors)


def without_autocast(kind: str) -> contextlib.AbstractContextManager[object]:
    """A block in which products of float32 tensors on devices of that kind stay float32: autocast would round scores
    to 16 bits."""
    return torch.autocast(kind, enabled=False) if has_autocast(kind) else contextlib.nullcontext()
