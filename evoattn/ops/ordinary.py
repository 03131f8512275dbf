"""Tensors that kernels can read as they are."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from evoattn.ops.runtime import NoKernel

WATCHED = "a tensor subclass, mode, transform, trace or negation is at work"
_ORDINARY = frozenset((Tensor, torch.nn.Parameter))
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state


def is_ordinary(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether these are plain tensors that nothing watches: no subclass, dispatch mode, `torch.func` transform, JIT
    trace or forward-mode differentiation, nor views that are negated when they are read.
    """
    return (
        type(query) in _ORDINARY
        and type(key) in _ORDINARY
        and type(value) in _ORDINARY
        and not _dispatch_modes()
        and _transforms() is None
        and _tracing_state() is None
        and forward_ad._current_level < 0
        and not (query.is_neg() or key.is_neg() or value.is_neg())
    )


def require_ordinary(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise `NoKernel` for tensors that something watches: their addresses may not be those of the data."""
    if not is_ordinary(query, key, value):
        raise NoKernel(f"No kernel serves this call: {WATCHED}.")
