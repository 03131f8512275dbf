"""What kernels do beside attention in place of several of PyTorch's: new keys and values written into caches, with a
rotary embedding of keys and queries; the merge of partial answers; numbers of 8 bits and their scales of tensors of 16
or 32 bits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from evoattn.model.append import HALVES, PAIRS
from evoattn.model.dtype import DTYPES as ELEMENTS
from evoattn.model.mask import FULL
from evoattn.model.merge import NARROW
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.quantize import PAIR, SMOOTH, TURN, sampled_rows
from evoattn.model.scales import BLOCK_ROWS, GRANULARITIES
from evoattn.ops.arguments import (
    DTYPES,
    EIGHT_BIT_NAMES,
    KV_DTYPES,
    SEQUSED,
    SINKS,
    SLOPES,
    TABLE,
    has_autocast,
    is_ordinary,
)
from evoattn.ops.call import (
    BESIDE,
    E4M3,
    Answer,
    Call,
    StridedProblem,
    out_like,
    plain_strides,
    strided,
    why_wrong_strides,
)
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.torch_answer import PROMISE
from evoattn.portfolio.climb import Costs
from evoattn.portfolio.pick import likely

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
    the position of new key i, else that of the first."""
    runtime = current.runtime()
    given = (q, *new, cache.k, cache.v, *(rotary[:2] if rotary else ()))
    if runtime.platform is None or not _can_append(given, cache, runtime):
        return None
    k, v = (tensor.contiguous() for tensor in new)
    cos, sin = (tensor.contiguous() for tensor in rotary[:2]) if rotary else (None, None)
    table = None if cache.table is None else cache.table.contiguous()
    lying = [(one.shape, one.stride()) for one in (q, k, v, cache.k, cache.v)]
    sizes = [None if one is None else one.shape for one in (cos, sin, table, cache.used)]
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


LATER = 2.4
"""In the cost model's units, some 0.7 µs on an H100: what attention that writes new keys may take longer than attention
alone, as it saves two launches. At 33 of 40 caches it does not; there one launch took less time at 31 (0.876)."""


def appended_to(call: Call, new: tuple[Tensor, Tensor]) -> Answer | None:
    """The answer to a call over a cache or pages after new keys and values `[batch, rows, kv_heads, head_dim]` were
    written behind those in use, its `seqused_k`, all in one launch. There are as many queries. None where no kernel
    does both, or two launches are taken to be faster."""
    runtime, (k, v), query = current.runtime(), (tensor.contiguous() for tensor in new), call.query
    terms = {"sinks": SINKS, "slopes": SLOPES, "seqused": SEQUSED, "table": TABLE}
    tensors = {name: term.contiguous() for name, which in terms.items() if (term := call.term(which)) is not None}
    tensors |= {"q": query, "k": call.key, "v": call.value, "new_k": k, "new_v": v}
    if runtime.platform is None or PROMISE.everywhere or not _can_append_to(call, tensors, runtime):
        return None
    out = tensors["o"] = out_like(query, call.value)
    lying = [(name, one.shape, one.stride(), one.dtype) for name, one in tensors.items()]
    known = ("append to", *lying, call.mask, call.window, call.scale, call.softcap, call.return_lse)
    index = query.get_device()
    plan = runtime.planned((*known, index), index, lambda: _appended_problem(call, out, runtime))
    if plan is None:
        return None
    if call.return_lse:
        tensors["lse"] = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    if not runtime.performs(plan, tensors):
        return None
    return call.given_back((out, tensors["lse"]) if call.return_lse else out)


def _can_append_to(call: Call, tensors: Mapping[str, Tensor], runtime: Runtime) -> bool:
    """As `_can_append`, of a call and the tensors of a kernel that answers it."""
    query, (batch, _, rows, dim) = call.query, call.query.shape
    if torch.compiler.is_compiling() or call.wants_gradients or has_autocast(query.device.type):
        return False
    if not all(is_ordinary(one, one, one) for one in tensors.values()):
        return False
    if call.key.data_ptr() == call.value.data_ptr():  # one cache for both: new keys and values have the same place
        return False
    if query.dtype not in DTYPES or query.device.type != runtime.device_type or "seqused" not in tensors:
        return False
    if any(one.device != query.device for one in tensors.values()):
        return False
    whole = {"seqused": torch.int32, "table": torch.int32, "slopes": torch.float32}
    if any(one.dtype != whole.get(name, query.dtype) for name, one in tensors.items()):
        return False
    new = (batch, rows, call.key.shape[1], dim)
    return len(tensors) == 5 + len(call.given_terms) and all(tensors[f"new_{name}"].shape == new for name in "kv")


def _appended_problem(call: Call, out: Tensor, runtime: Runtime) -> StridedProblem | str:
    """What a kernel is asked for, or one reason, without a full stop, why none is. Raises as `Call.require`."""
    assert runtime.platform is not None
    call.require()
    gpu, problem = runtime.platform.spec(call.query.get_device()), call.problem(out.stride())
    if isinstance(problem, str) or gpu is None:
        return problem if isinstance(problem, str) else "evoattn does not know this GPU"
    try:
        both = replace(problem, appended=True)
    except ProblemError as error:
        return str(error).rstrip(".")
    scores = []
    for one in (both.as_searched, problem.as_searched):
        if (found := runtime.pick(one, gpu)) is None:
            return "no kernel writes new keys and reads them"
        scores.append(Costs(likely(one), gpu).of([found.config])[0].score)
    return both if scores[0] - scores[1] <= LATER else "two launches are faster"


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


WIDE = {torch.float16: "fp16", torch.bfloat16: "bf16"}
"""What kernels read."""
LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Whose inverse is a number, too."""
Granularity = Literal["tensor", "head", "block", "token"]


@dataclass(frozen=True)
class Numbers:
    """`numbers` stand for themselves times `scale`, and where keys were taken less their mean, plus `mean`.

    Scales are float32: of a tensor `[1, 1]`, of each K/V head of each batch `[batch, kv_heads]`, of each 128 rows
    `[batch, heads, blocks]`, of each row `[batch, heads, rows]`. The mean is `[batch, heads, 1, head_dim]`, float32."""

    numbers: Tensor
    scale: Tensor
    mean: Tensor | None = None


@dataclass(frozen=True)
class Wanted:
    """What is made of a tensor `[batch, heads, rows, head_dim]`: of which dtype, what shares a scale, how many K/V
    heads there are, and whether a mean of a head's rows is taken from them, of two tensors from the first's."""

    dtype: torch.dtype
    granularity: Granularity
    kv_heads: int
    smooth: bool = False
    turned: bool = False
    """Numbers are made as `evoattn.model.turned` has them."""

    def problem(self, tensors: tuple[Tensor, ...]) -> StridedProblem | str:
        """What a kernel is asked for, or one reason, without a full stop, why none is. Of two tensors, K and V, the
        second is `turned`."""
        for one in tensors:
            if wrong := why_wrong_strides("x", tuple(one.shape), one.stride(), one.element_size()):
                return wrong
        made = [torch.empty_like(one, dtype=self.dtype, device="meta") for one in tensors]
        lies = [plain_strides(tuple(one.shape), one.stride()) for one in (*tensors, *made)]
        batch, heads, rows, dim = tensors[0].shape
        pair, op = len(tensors) > 1, "quantize"
        if pair:
            op = SMOOTH if self.smooth else PAIR
        strides = (lies[2], lies[0], lies[1], lies[3]) if pair else (*lies[:1] * 3, lies[1])
        try:
            return StridedProblem(
                batch, heads, self.kv_heads, rows, rows, dim, WIDE[tensors[0].dtype],
                kv=KV_DTYPES[self.dtype], scales="" if self.granularity == "tensor" else self.granularity,
                value_dim=tensors[-1].shape[3], op=op,
                turned=self.turned, strides_of=strides,
            )  # fmt: skip
        except ProblemError as error:
            return str(error).rstrip(".")


def quantize_both(key: Tensor, value: Tensor, wanted: Wanted) -> tuple[Numbers, Numbers]:
    """`quantize` of key and value `[batch, kv_heads, keys, head_dim]`, by one kernel where one takes both; `turned` is
    of value, `smooth` of key."""
    alike = key.shape[:3] == value.shape[:3] and key.dtype == value.dtype and key.device == value.device
    if alike and (made := _by_kernel((key, value), wanted, current.runtime())):
        return Numbers(*made[:2], *made[4:]), Numbers(*made[2:4])
    of_key, of_value = replace(wanted, turned=False), replace(wanted, smooth=False, kv_heads=value.shape[1])
    return quantize(key, of_key), quantize(value, of_value)


def quantize(tensor: Tensor, wanted: Wanted) -> Numbers:
    """The numbers of a tensor, in its order of memory or `turned`, and their scales.

    A scale is the largest magnitude of what shares it over the largest number of the dtype, 1 where all are 0, and
    2^-126 at least. A number is value · (1 / scale), rounded to the nearest, to the last bit the same by a kernel and
    by PyTorch, but for what the order of a mean's sum makes. NaN and infinities are NaN (0 in int8), and count for no
    scale and no mean."""
    made = () if wanted.smooth else _by_kernel((tensor,), wanted, current.runtime())
    return Numbers(*made) if made else quantize_by_torch(tensor, wanted)


def quantize_kv(
    key: Tensor,
    value: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: Granularity = "tensor",
    turned: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(key, value, k_scale, v_scale): numbers of 8 bits in the order of memory of the tensors that they stand for, and
    the scales that `evoattn.attention` takes beside them.

    Shapes: key and value `[batch, kv_heads, seqlen_k, head_dim]`, of float16, bfloat16 or float32. A scale is the
    largest magnitude over the largest number of `dtype` (448 of float8_e4m3fn, 57344 of float8_e5m2, 127 of int8), 1
    where all are 0: of each tensor `[1]`, of each head of each batch `[batch, kv_heads]`, of each 128 rows of each head
    `[batch, kv_heads, blocks]`, which `attention_fp8` alone takes, of each row of each head `[batch, kv_heads,
    seqlen_k]`, float32. Numbers are rounded to the nearest; NaN and infinities are NaN (0 in int8),
    and count for no scale. One kernel makes 8 bits of both tensors of 16 on a GPU. `turned` gives value its keys along
    rows, as `attention_fp8(…, turned=True)` takes it: `[batch, kv_heads, head_dim, keys]`, the keys of each 16 in the
    order of `evoattn.model.turned`, zeros behind the last. Raises `ValueError` for another dtype or granularity, and
    for tensors of other dimensions or without numbers for a scale, `TypeError` for what is no tensor of floating-point
    numbers."""
    if dtype not in KV_DTYPES:
        raise ValueError(f"dtype must be one of {EIGHT_BIT_NAMES}, not {dtype}.")
    if granularity not in ("tensor", *GRANULARITIES[1:]):
        raise ValueError(f"granularity must be 'tensor', 'head', 'block' or 'token', not {granularity!r}.")
    for name, tensor in (("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            found = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a tensor of floating-point numbers, not {found}.")
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have four dimensions, not {list(tensor.shape)}.")
        asked = {"tensor": tensor.shape, "head": tensor.shape[1:]}  # dimensions over which scales are taken, or heads
        if 0 in asked.get(granularity, (tensor.shape[1], tensor.shape[3])):
            raise ValueError(f"{name} {list(tensor.shape)} has no numbers for a scale.")
    if turned and granularity == "token":
        raise ValueError("turned goes with granularity 'tensor' or 'head': a product sums over the scales of tokens.")
    made = quantize_both(key, value, Wanted(dtype, granularity, key.shape[1], turned=turned))
    k_scale, v_scale = (one.scale.flatten() if granularity == "tensor" else one.scale for one in made)
    return made[0].numbers, made[1].numbers, k_scale, v_scale


def turn(value: Tensor) -> Tensor | None:
    """Numbers of e4m3 or e5m2 `[batch, kv_heads, keys, head_dim]` as `evoattn.model.turned` has them; None where no
    kernel serves them."""
    runtime = current.runtime()
    if not _is_readable(value, runtime) or value.dtype not in BESIDE[E4M3]:
        return None
    dtype, value = value.dtype, value.view(E4M3)  # bytes move alike
    known = (TURN, value.shape, value.stride(), value.get_device())
    plan = runtime.planned(known, value.get_device(), lambda: _turn_problem(value))
    try:
        outputs = None if plan is None else plan.outputs(value.device)
    except torch.OutOfMemoryError:
        return None
    if plan is None or outputs is None or not runtime.performs(plan, {"x": value, **outputs}):
        return None
    return outputs["numbers"].view(dtype)


def _turn_problem(value: Tensor) -> StridedProblem | str:
    shape = tuple(value.shape)
    if wrong := why_wrong_strides("value", shape, value.stride(), 1):
        return wrong
    batch, heads, keys, dim = shape
    try:
        lies = plain_strides(shape, value.stride())
        return StridedProblem(
            batch, heads, heads, keys, keys, dim, "e4m3", op=TURN, turned=True, strides_of=(lies,) * 4
        )
    except ProblemError as error:
        return str(error).rstrip(".")


def _is_readable(tensor: Tensor, runtime: Runtime) -> bool:
    """Whether a kernel may read it, whatever its dtype."""
    return (
        runtime.platform is not None
        and tensor.device.type == runtime.device_type
        and not torch.compiler.is_compiling()
        and is_ordinary(tensor, tensor, tensor)
        and not (torch.is_grad_enabled() and tensor.requires_grad)
        and tensor.numel() > 0
    )


def quantize_by_torch(tensor: Tensor, wanted: Wanted) -> Numbers:
    """`quantize` by PyTorch's expressions."""
    largest, wide = ELEMENTS[KV_DTYPES[wanted.dtype]].largest, tensor.float()
    finite = wide.isfinite()
    sizes, mean = wide.where(finite, 0), None
    if wanted.smooth:
        mean = sizes[:, :, sampled_rows(tensor.shape[2])].mean(2, keepdim=True)
        wide = wide - mean
        sizes = wide.where(finite, 0)
    over = {"tensor": (0, 1, 2, 3), "head": (2, 3), "block": (3,), "token": (3,)}[wanted.granularity]
    most = sizes.abs().amax(over, keepdim=True)
    by_block = wanted.granularity == "block"
    if by_block:
        from evoattn.correctness import eight_bits  # a kernel has done that where there is one

        most = eight_bits.of_blocks(most)
    group = tensor.shape[1] // wanted.kv_heads
    shared = wanted.granularity == "head" and group > 1
    if shared:
        most = most.unflatten(1, (wanted.kv_heads, group)).amax(2)
    scale = torch.where(most > 0, (most / torch.full_like(most, largest)).clamp(min=LEAST_SCALE), 1.0)
    spread = scale.repeat_interleave(group, 1) if shared else scale
    numbers = (wide * spread.reciprocal()).where(finite, torch.nan).clamp(-largest, largest)
    if not wanted.dtype.is_floating_point:
        numbers = numbers.round().nan_to_num(0.0)
    kept = scale.flatten()[None] if wanted.granularity == "tensor" else scale.squeeze(over)
    if by_block:
        kept = kept[:, :, ::BLOCK_ROWS].contiguous()
    stored = numbers.to(wanted.dtype)
    if wanted.turned:
        from evoattn.correctness import eight_bits

        stored = eight_bits.turn(stored)
    return Numbers(stored, kept, mean)


def _by_kernel(tensors: tuple[Tensor, ...], wanted: Wanted, runtime: Runtime) -> tuple[Tensor, ...]:
    """What a kernel makes, in order of the operation's outputs; empty where none serves the tensors."""
    if not all(_is_readable(one, runtime) and one.dtype in WIDE for one in tensors):
        return ()
    index, lies = tensors[0].get_device(), [(one.shape, one.stride(), one.dtype) for one in tensors]
    plan = runtime.planned(("quantize", wanted, *lies, index), index, lambda: wanted.problem(tensors))
    if plan is None:
        return ()
    try:
        outputs = plan.outputs(tensors[0].device)
    except torch.OutOfMemoryError:
        return ()
    named = dict(zip("xv", tensors, strict=False))
    return tuple(outputs.values()) if runtime.performs(plan, {**named, **outputs}) else ()
