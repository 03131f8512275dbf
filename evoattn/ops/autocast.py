"""What autocast makes of the tensors of a call."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def has_autocast(kind: str) -> bool:
    """Whether autocast is on for devices of that kind; torch raises where it knows none for it."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def autocast(kind: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors as autocast hands them to SDPA: floating ones on devices of that kind in its dtype, float64 as it is."""
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 and t.device.type == kind else t
        for t in tensors
    )


def without_autocast(kind: str) -> contextlib.AbstractContextManager[object]:
    """A block in which products of float32 tensors on devices of that kind stay float32: autocast would round scores
    to 16 bits."""
    return torch.autocast(kind, enabled=False) if has_autocast(kind) else contextlib.nullcontext()
