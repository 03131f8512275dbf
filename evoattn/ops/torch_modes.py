"""What torch's modes make of a call: tensors that something watches, and autocast."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.autograd import forward_ad

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
        (type(query) is type(key) is type(value) is Tensor or _ORDINARY.issuperset(map(type, (query, key, value))))
        and not _dispatch_modes()
        and _transforms() is None
        and _tracing_state() is None
        and forward_ad._current_level < 0
        and not (query.is_neg() or key.is_neg() or value.is_neg())
    )


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


def autograd_at_work() -> contextlib.AbstractContextManager[object]:
    """A block in which autograd records what is asked of it, within an op of torch's registry too, whose own autograd
    keeps it out."""
    keys, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
        excluded = excluded.remove(key)
    guard: contextlib.AbstractContextManager[object] = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), excluded
    )
    return guard
