"""What a Python function can see beside its arguments: a key that equal functions share, and the tensors.

A function that is made anew for each call, as a closure over the step's tensors is, has the key of the last one as long
as its code, the numbers that it sees and the tensors' shapes are the same. So what was found out of one holds for the
next. Objects with attributes may change in silence: functions that see such have no key.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
LIBRARIES = frozenset(("torch", "math", "operator", "builtins", "functools", "attn_gym"))
"""Their functions and modules stay as they are, but for what their closures hold."""
LASTING = (types.BuiltinFunctionType, types.MethodDescriptorType, type)
"""Kinds of what is never freed there."""
DEEPEST = 12


class _Opaque(Exception):
    """Something that may change in silence."""


def key_of(function: Callable[..., Any], captured: list[Tensor]) -> Hashable | None:
    """The key, and into `captured` the tensors in the order in which they were met; None where there is none."""
    try:
        return _key(function, captured, 0)
    except _Opaque:
        return None


def with_tensors(value: Any, device: torch.device) -> Any:
    """A function, or what one captures, with a tensor of one number in place of each number that is captured. Nothing
    waits for the device."""
    kind = type(value)
    if kind is int or kind is float:
        return torch.full((), value, dtype=torch.int64 if kind is int else torch.float32, device=device)
    if kind in (tuple, list):
        return kind(with_tensors(one, device) for one in value)
    if kind is functools.partial:
        keywords = {name: with_tensors(one, device) for name, one in value.keywords.items()}
        return functools.partial(with_tensors(value.func, device), *with_tensors(value.args, device), **keywords)
    if kind is not types.FunctionType or not value.__closure__:
        return value
    cells = tuple(types.CellType(with_tensors(cell.cell_contents, device)) for cell in value.__closure__)
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    made.__kwdefaults__, made.__module__ = value.__kwdefaults__, value.__module__
    return made


def _key(value: Any, captured: list[Tensor], depth: int) -> Hashable:
    if depth > DEEPEST:
        raise _Opaque
    if isinstance(value, PLAIN):
        return type(value), repr(value) if isinstance(value, float) else value  # 0.0 is -0.0, and NaN not itself
    kind = type(value)
    if kind in (Tensor, torch.nn.Parameter):
        known = [i for i, one in enumerate(captured) if one is value]
        if known:
            return "tensor", known[0]
        memory = value.untyped_storage().data_ptr()
        shared = [i for i, one in enumerate(captured) if one.untyped_storage().data_ptr() == memory]
        captured.append(value)
        within = (shared[0], value.storage_offset() - captured[shared[0]].storage_offset()) if shared else ()
        return value.dtype, value.shape, value.stride(), value.device, within
    if kind in (tuple, list):
        return (kind, *(_key(one, captured, depth + 1) for one in value))
    if kind is types.FunctionType:
        return _function(value, captured, depth)
    if kind is functools.partial:
        given = tuple(value.args), tuple(sorted(value.keywords.items()))
        return kind, _key(value.func, captured, depth + 1), _key(given, captured, depth + 1)
    if kind is types.ModuleType and value.__name__.partition(".")[0] in LIBRARIES:
        return kind, value.__name__
    home = (getattr(value, "__module__", None) or "builtins").partition(".")[0]
    if home in LIBRARIES and (kind in LASTING or isinstance(value, torch._ops.OpOverloadPacket)):
        return kind, id(value)
    raise _Opaque


def _function(function: types.FunctionType, captured: list[Tensor], depth: int) -> Hashable:
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(_key(cell.cell_contents, captured, depth + 1))
        except ValueError:  # not set yet
            raise _Opaque from None
    if function.__module__ and function.__module__.partition(".")[0] in LIBRARIES:
        return function.__code__, *cells
    given = function.__defaults__, tuple(sorted((function.__kwdefaults__ or {}).items()))
    seen = [_key(one, captured, depth + 1) for one in (*given, *_globals(function.__code__, function.__globals__))]
    return function.__code__, *cells, *seen


def _globals(code: types.CodeType, names: dict[str, Any]) -> list[Any]:
    """The globals that code, and code within it, may read."""
    found = [names[name] for name in code.co_names if name in names]
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found += _globals(one, names)
    return found
