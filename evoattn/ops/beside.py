"""What kernels do beside attention in place of several of PyTorch's: new keys and values written into caches, with a
rotary embedding of keys and queries; the merge of partial answers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from evoattn.model.append import HALVES, PAIRS
from evoattn.model.mask import FULL
from evoattn.model.merge import NARROW
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.ops.arguments import is_ordinary
from evoattn.ops.call import DTYPES, StridedProblem, plain_strides, strided, why_wrong_strides
from evoattn.ops.runtime import Runtime, current

Rotary = tuple[Tensor, Tensor, bool]
"""Cosines and sines `[positions, turned columns / 2]`, and whether neighbouring columns are a pair."""


class CacheLike(Protocol):
    """Caches `[rows, length, kv_heads, head_dim]`, or pages that `table` `[batch, most pages]` names."""

    @property
    def k(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...
    @property
    def used(self) -> Tensor | None:
        """`[batch]`: keys in use."""

    @property
    def table(self) -> Tensor | None: ...


def appended(
    q: Tensor, new: tuple[Tensor, Tensor], cache: CacheLike, rotary: Rotary | None, moves: bool
) -> Tensor | None:
    """The queries, turned if `rotary` is given, after a kernel has written the new keys, turned alike, and values
    behind those in use of a cache; None where none has.

    q `[batch, rows, heads, head_dim]`, new keys and values `[batch, rows, kv_heads, head_dim]`. `moves`: query i has
    the position of new key i, else that of the first.
    """
    runtime = current.runtime()
    given = (q, *new, cache.k, cache.v, *(rotary[:2] if rotary else ()))
    if runtime.platform is None or not _can_append(given, cache, runtime):
        return None
    k, v = (tensor.contiguous() for tensor in new)
    cos, sin = (tensor.contiguous() for tensor in rotary[:2]) if rotary else (None, None)
    table = None if cache.table is None else cache.table.contiguous()
    lying = [(one.shape, one.stride()) for one in (q, k, v, cache.k, cache.v)]
    sizes = None if cos is None else cos.shape, None if table is None else table.shape
    known = ("append", *lying, *sizes, rotary and rotary[2], moves, q.dtype, q.get_device())
    plan = runtime.planned(known, q.get_device(), lambda: _append_problem(q, (k, v), cache, rotary, moves))
    if plan is None:
        return None
    turned = torch.empty(q.shape, dtype=q.dtype, device=q.device) if rotary else q
    named = {
        "new_k": k, "new_v": v, "k_cache": cache.k, "v_cache": cache.v, "q": q, "o": turned, "cos": cos, "sin": sin,
        "seqused": cache.used, "table": table,
    }  # fmt: skip
    tensors = {name: one for name, one in named.items() if one is not None}
    return turned if runtime.performs(plan, tensors) else None


def _can_append(given: tuple[Tensor, ...], cache: CacheLike, runtime: Runtime) -> bool:
    """Whether tensors are of dtypes and devices that kernels read. Of wrong shapes PyTorch's expressions complain."""
    q, k, v, k_cache, v_cache = given[:5]
    integers = [one for one in (cache.used, cache.table) if one is not None]
    if torch.compiler.is_compiling() or not (is_ordinary(q, k, v) and is_ordinary(q, k_cache, v_cache)):
        return False
    if any(one.dtype != q.dtype or one.device != q.device or not one.numel() for one in given):
        return False
    if any(one.dtype != torch.int32 or one.device != q.device for one in integers) or cache.used is None:
        return False
    if q.dtype not in DTYPES or q.device.type != runtime.device_type or not cache.used.is_contiguous():
        return False
    if torch.is_grad_enabled() and any(one.requires_grad for one in given):
        return False
    if any(one.dim() != 4 for one in given[:5]) or k.shape[:2] != q.shape[:2] or v.shape[:3] != k.shape[:3]:
        return False
    alike = k_cache.shape[2:] == k.shape[2:] and v_cache.shape[2:] == v.shape[2:] and q.shape[3] == k.shape[3]
    return alike and k_cache.shape[:2] == v_cache.shape[:2] and q.shape[2] % k.shape[2] == 0


def _append_problem(
    q: Tensor, new: tuple[Tensor, Tensor], cache: CacheLike, rotary: Rotary | None, moves: bool
) -> StridedProblem | str:
    """What a kernel is asked for, or one reason, without a full stop, why none is."""
    (batch, rows, heads, dim), (kv_heads, value_dim) = q.shape, new[1].shape[2:]
    pages, length = cache.k.shape[:2]
    page, sequences = (0, pages) if cache.table is None else (length, cache.table.shape[0])
    room = length if cache.table is None else length * cache.table.shape[1]
    if sequences != batch or cache.used is None or cache.used.shape != (batch,):
        return "caches and lengths are of another batch"
    if rotary and (rotary[0].shape != rotary[1].shape or rotary[0].dim() != 2 or rotary[0].shape[0] < room):
        return "rotary tables have fewer positions than the cache has room for"
    half = rotary[0].shape[1] if rotary else 0
    views = [one.transpose(1, 2) for one in (q, cache.k, cache.v)]
    for name, one in zip(("q", "k_cache", "v_cache"), views, strict=True):
        if wrong := why_wrong_strides(name, tuple(one.shape), one.stride(), one.element_size()):
            return wrong
    strides = [plain_strides(tuple(one.shape), one.stride()) for one in views]
    share = None if not half or 2 * half == dim else 2 * half / dim
    try:
        return StridedProblem(
            batch, heads, kv_heads, rows, room, dim, DTYPES[q.dtype], "causal_lower_right" if moves else FULL, "bshd",
            scale=share, value_dim=value_dim, seqused=f"0:{room}", page=page,
            op=(PAIRS if rotary[2] else HALVES) if rotary else "append",
            strides_of=(*strides, strides[0]), pages=pages if page else 0,
        )  # fmt: skip
    except ProblemError as error:
        return str(error).rstrip(".")


def merged(parts: Tensor, sums: Tensor, out: Tensor, lse: Tensor) -> bool:
    """Whether a kernel has written the merge of `parts` `[parts, …, head_dim]` with the log-sum-exps `sums`
    `[parts, …]`, float32, to `out` and `lse`, of the same shapes without the parts. All are contiguous."""
    runtime = current.runtime()
    if runtime.platform is None or not parts.numel() or not _can_merge(parts, sums, out):
        return False
    known = "merge", parts.shape, parts.dtype, out.dtype, parts.get_device()
    plan = runtime.planned(known, parts.get_device(), lambda: _merge_problem(runtime, parts, out))
    if plan is None:
        return False
    return runtime.performs(plan, {"parts": parts, "part_sums": sums, "o": out, "lse": lse})


def _can_merge(parts: Tensor, sums: Tensor, out: Tensor) -> bool:
    """Whether tensors are as kernels read them, and no gradient is wanted."""
    if torch.compiler.is_compiling() or not is_ordinary(parts, sums, out) or sums.dtype != torch.float32:
        return False
    if torch.is_grad_enabled() and (parts.requires_grad or sums.requires_grad or out.requires_grad):
        return False
    if parts.dim() < 2 or sums.shape != parts.shape[:-1] or out.shape != parts.shape[1:]:
        return False  # what torch says of these is right
    return all(one.is_contiguous() and one.device == parts.device for one in (parts, sums, out))


def _merge_problem(runtime: Runtime, parts: Tensor, out: Tensor) -> StridedProblem | str:
    """What a kernel is asked for, or one reason, without a full stop, why none is."""
    wide, (rows, dim) = parts.dtype == torch.float32, (out.numel() // out.shape[-1], out.shape[-1])
    if parts.device.type != runtime.device_type or out.dtype not in DTYPES or not (wide or parts.dtype == out.dtype):
        return "no kernel takes such tensors"
    try:
        made = AttentionProblem(
            1, 1, 1, rows, parts.shape[0], dim, DTYPES[out.dtype], lse=True, op="merge" if wide else NARROW
        )
    except ProblemError as error:
        return str(error).rstrip(".")
    return strided(made)
