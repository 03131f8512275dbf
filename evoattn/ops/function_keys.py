"""Keys of Python functions, by which what was found out of one holds for the next.

A function that is made anew for each call, as a closure over the step's tensors is, has the key of the last one as long
as its code, the numbers that it sees and the tensors' shapes are the same. Objects with attributes may change in
silence: functions that see such have no key."""

import functools
import math
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from evoattn.model.score import LARGEST_INT
from evoattn.ops import mods

PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
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


def with_tensors(value: Any, device: torch.device, filled: bool = True) -> Any:
    """A function, or what one captures, with a tensor of one number in place of each number that is captured; of any
    number unless `filled`, so that nothing runs on the device. Whole ones whose square is no int stay, as Python
    multiplies them without a limit. Nothing waits for it. Raises `mods.Untraceable`."""
    kind, made_of = type(value), functools.partial(with_tensors, device=device, filled=filled)
    if (kind is int and value * value <= LARGEST_INT) or (kind is float and math.isfinite(value)):  # inf hides
        with torch.inference_mode(False):
            number = torch.empty((), dtype=torch.float32 if kind is float else torch.int32, device=device)
            return number.fill_(value) if filled else number
    if kind in (tuple, list):
        return kind(made_of(one) for one in value)
    if kind is functools.partial:
        keywords = {name: made_of(one) for name, one in value.keywords.items()}
        return functools.partial(made_of(value.func), *made_of(value.args), **keywords)
    if kind is not types.FunctionType or mods.is_library(value):
        return value
    mods.require_no_kinds(value.__code__)
    cells = tuple(types.CellType(made_of(cell.cell_contents)) for cell in value.__closure__ or ())
    seen = {name: made_of(one) for name, one in _globals(value.__code__, value.__globals__).items()}
    given = value.__defaults__ and made_of(value.__defaults__)
    made = types.FunctionType(value.__code__, value.__globals__ | seen, value.__name__, given, cells)
    made.__kwdefaults__ = {name: made_of(one) for name, one in (value.__kwdefaults__ or {}).items()}
    made.__module__ = value.__module__
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
    if kind is types.ModuleType and value.__name__.partition(".")[0] in mods.LIBRARIES:
        return kind, value.__name__
    home = (getattr(value, "__module__", None) or "builtins").partition(".")[0]
    if home in mods.LIBRARIES and (kind in LASTING or isinstance(value, torch._ops.OpOverloadPacket)):
        return kind, id(value)
    raise _Opaque


def _function(function: types.FunctionType, captured: list[Tensor], depth: int) -> Hashable:
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(_key(cell.cell_contents, captured, depth + 1))
        except ValueError:  # not set yet
            raise _Opaque from None
    if mods.is_library(function):
        return function.__code__, *cells
    given = function.__defaults__, tuple(sorted((function.__kwdefaults__ or {}).items()))
    names = _globals(function.__code__, function.__globals__).values()
    seen = [_key(one, captured, depth + 1) for one in (*given, *names)]
    return function.__code__, *cells, *seen


def _globals(code: types.CodeType, names: dict[str, Any]) -> dict[str, Any]:
    """The globals that code, and code within it, may read."""
    found = {name: names[name] for name in code.co_names if name in names}
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found |= _globals(one, names)
    return found
