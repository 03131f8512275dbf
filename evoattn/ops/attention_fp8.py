"""Attention in 8 bits: of query, key and value of e4m3 by a kernel that multiplies them as they are, or by 16-bit
attention of what they stand for; and which calls `evoattn.enable(precision="fp8")` has run so."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evoattn.model.forward import MAIN
from evoattn.model.mask import CAUSAL_LOWER_RIGHT, CAUSAL_UPPER_LEFT, FULL
from evoattn.model.scales import IN_FP16, rounded_op, scale_blocks
from evoattn.model.turned import GROUP, turned_keys
from evoattn.model.variant import TURNED
from evoattn.ops import shapes
from evoattn.ops.arguments import SINKS, TERMS, Causal, cap_of, is_ordinary, mask_of, require_flags, scale_of, window_of
from evoattn.ops.attention import attend
from evoattn.ops.beside import WIDE, Granularity, Wanted, quantize, quantize_both, turn
from evoattn.ops.call import ANSWERS, BESIDE, E4M3, Answer, Call, behind, out_like, terms_of
from evoattn.ops.choice import Choice, Refusal
from evoattn.ops.given import tensor_of_number
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.torch_answer import NoKernel, is_promised

WIDEST, WIDEST_IN_ROWS = 256, 128
"""head_dim of V up to which a kernel of 8 bits is the faster one, and where V is not turned: there is no room then for
both forms of it beside sums in fp32."""
TURNED_FROM = 1 << 17
"""Keys that a query sees, in the mean, times head_dim, from which an e4m3 V is turned by a kernel of its own, which
reads and writes V once. From here on that took 0.91 of the time in the mean (0.61 to 1.09, 34 problems), below 1.16
(0.87 to 1.67, 46 problems; an H200 and an H100, 2026-11-27, reports/performance.md)."""
BLOCKS_BELOW, BLOCKS_BELOW_WIDE, WIDE_DIM = 900, 8500, 128
"""`_seen`, below which tensors are quantised with a scale for each 128 rows, from WIDE_DIM on the second: one launch
reads them once, in 0.6 of the time of two, and kernels then take 1.00 to 1.05 of that with scales of heads. Narrow
heads have faster kernels for those. Whole calls took 0.85 to 1.01 of the time below, 0.97 to 1.11 from there on (34
calls, an H200, 2026-11-28, reports/performance.md)."""
WITH_WGMMA = "sm_90a"
ROUNDS = "rounds"
"""Before what is known of calls whose query no kernel rounds."""
Scale = Tensor | float | None
"""One for all, `[batch, kv_heads]`, or of each 128 rows `[batch, heads, blocks]`; None is 1."""


def attention_fp8(  # noqa: PLR0913 — as `evoattn.attention` has them
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: Causal = None,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    smooth_k: bool = False,
    turned: bool = False,
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
    strict: bool = False,
) -> Answer:
    """`evoattn.attention` in 8 bits, with `causal`, `scale`, `window`, `softcap`, `sinks` and `return_lse` as there.
    The answer is `[batch, heads, seqlen_q, head_dim]` of `dtype`, float16 or bfloat16; unless given query's where it is
    one of these, else bfloat16. The log-sum-exp is float32.

    Tensors of float8_e4m3fn are taken as they are, key and value of float8_e5m2 beside such a query too, and so are
    three of int8: the sums of Q Kᵀ are exact then, and weights and value are multiplied in 16 bits. A number
    stands for itself times its scale: `q_descale`, `k_descale` and `v_descale` are float32 `[batch, kv_heads]` as
    FlashAttention 3's, those of query too, or one for all, a tensor of one element or a number, or of each 128 rows of
    a head: of query `[batch, heads, query blocks]`, of key and value `[batch, kv_heads, key blocks]`. They are not
    negative; left out, 1. Those of 128 rows go with e4m3; kernels take 0.95 to 1.05 of the time of those of heads.
    Tensors of 16 or 32 bits are quantised first, with a scale for each K/V head of each batch, or each 128 rows of a
    head (`BLOCKS_BELOW`), that takes its largest value to the end of the range, and no descale may be given. A kernel
    of Hopper rounds query itself, with a scale for each 16 rows of a head. That is faster than `evoattn.attention` from
    some 2,000 keys on (0.78 of its time up to 4,096, 8 problems, and 0.69 from there on, 27 problems); below it mostly
    takes longer (1.04 times in the mean, 1.43 at worst, 19 problems; an H200, 2026-11-29).
    `smooth_k` takes a mean of the keys of a head, of 64 evenly spaced ones, from all of them first, as SageAttention
    does that of all: outlier channels then cost less of the range. The answer is the same, since all scores of a query
    change alike, and the log-sum-exp is corrected. It goes with no `softcap` and no sinks. With `turned` value is as
    `quantize_kv(…, turned=True)` makes it, which is what kernels read fastest; tensors of 16 bits are quantised so
    wherever a kernel reads it.

    Weights are rounded to e4m3 too (3 bits of mantissa). Kernels compute them with so many bits from the start, by
    straight lines between powers of two, unless the log-sum-exp is wanted. That makes the error up to 1.05 times as
    large (0.0538 to 0.0562, head_dim 128, normal inputs, an H200, 2026-11-29).

    Where no kernel serves the call, 16-bit attention of the values runs, by our kernels or by torch. `strict` raises
    `NoKernel` instead. There are no gradients: raises `ValueError` where one is wanted, and for what does not fit,
    `TypeError` for an argument of the wrong type."""
    require_flags(smooth_k=smooth_k, turned=turned)
    if turned:
        value = _as_rows(key, value)
    _require(query, key, value)
    if dtype is None:
        dtype = query.dtype if query.dtype in WIDE else ANSWERS
    elif dtype not in WIDE:
        raise ValueError(f"dtype must be float16 or bfloat16, not {str(dtype).removeprefix('torch.')}.")
    descales = (q_descale, k_descale, v_descale)
    mask, limit = mask_of(causal, False), cap_of(softcap)
    dtypes, shapes_of = (query.dtype, key.dtype, dtype), (query.shape, key.shape, value.shape)
    blocks_given = any(isinstance(one, Tensor) and one.dim() == 3 for one in descales)
    asked = mask, window_of(window), limit > 0, sinks is None, return_lse, smooth_k, blocks_given
    kind = query.device, dtypes, shapes_of, asked
    correction = None
    if query.dtype in BESIDE:
        if smooth_k:
            raise ValueError("smooth_k is for keys that are quantised on the way; these have 8 bits already.")
        given = _turned(Quantised(query, key, value, *_scales(descales, query, key), turned), mask != FULL, kind)
    else:
        if turned:
            raise ValueError("turned is for a value of float8_e4m3fn; others are quantised so on the way.")
        if any(descale is not None for descale in descales):
            raise ValueError(f"descales belong to tensors of float8_e4m3fn or int8; these are {query.dtype}.")
        if smooth_k and limit:
            raise ValueError("smooth_k goes with no softcap: a cap does not change all scores of a query alike.")
        if smooth_k and sinks is not None:
            raise ValueError("smooth_k goes with no sinks: they stay as they are where the scores of all keys change.")
        turns = _turns(query, key, value, kind)
        rounds = turns and query.dtype in WIDE and (ROUNDS, *kind) not in current.runtime().served
        below = BLOCKS_BELOW if query.shape[3] < WIDE_DIM else BLOCKS_BELOW_WIDE
        blocks = turns and _seen(query, key, mask != FULL, rounds) < below
        given, mean = quantised(query, key, value, smooth_k, turns, "block" if blocks else "head", rounds)
        if mean is not None and return_lse:
            correction = _lse_correction(query, mean, scale_of(scale))
    call = Call(
        given.query,
        given.key,
        given.value,
        mask,
        scale_of(scale),
        True,
        window_of(window),
        limit,
        terms_of(sinks=sinks, k_scale=given.k_scale, v_scale=given.v_scale),
        return_lse,
        strict=strict,
        turned=given.turned,
    )
    if query.dtype == E4M3 and dtype != ANSWERS:
        call.op, call.out = IN_FP16, out_like(given.query, given.value, dtype=dtype)
    platform = current.runtime().platform
    captured = platform is not None and platform.capturing()  # whose kernels are not loaded: they may be later
    answer = _answer(call, given, sinks, kind, may_change=not (turned or captured))
    if answer is None:  # what the call has found out has others like it quantised in another way, and so this one
        return attention_fp8(
            query, key, value, causal=causal, scale=scale, window=window, softcap=softcap, sinks=sinks,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, smooth_k=smooth_k, dtype=dtype,
            return_lse=return_lse, strict=strict,
        )  # fmt: skip
    out, lse = (answer, None) if isinstance(answer, Tensor) else answer
    out = out.to(dtype)
    return out if lse is None else (out, lse if correction is None else lse + correction)


@dataclass(frozen=True)
class Quantised:
    """Query, key and value in e4m3 or int8; their scales, float32, all `[1, 1]`, all `[batch, kv_heads]`, or all of
    each 128 rows of a head, `[batch, heads, blocks]`; query's are contiguous, or None where a kernel rounds it. With
    `turned` value is a view of that shape of a turned tensor."""

    query: Tensor
    key: Tensor
    value: Tensor
    q_scale: Tensor | None
    k_scale: Tensor
    v_scale: Tensor
    turned: bool = False


def quantised(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    smooth: bool = False,
    turned: bool = False,
    granularity: Granularity = "head",
    rounds: bool = False,
) -> tuple[Quantised, Tensor | None]:
    """Tensors of 16 or 32 bits in e4m3, with a scale for each K/V head of each batch, or each 128 rows; with `smooth`
    of keys less the mean of those of their head, which is the second. With `rounds` query stays as it is."""
    k, v = quantize_both(key, value, Wanted(E4M3, granularity, key.shape[1], smooth, turned))
    numbers = _as_rows(key, v.numbers) if turned else v.numbers
    made = Quantised(query, k.numbers, numbers, None, k.scale, v.scale, turned)
    return made if rounds else _with_query(made), k.mean


def _with_query(given: Quantised) -> Quantised:
    """With query quantised as key and value are."""
    granularity: Granularity = "block" if given.k_scale.dim() == 3 else "head"
    made = quantize(given.query, Wanted(E4M3, granularity, given.key.shape[1]))
    return replace(given, query=made.numbers, q_scale=made.scale)


def _as_rows(key: Tensor, turned: Tensor) -> Tensor:
    """The view `[batch, kv_heads, seqlen_k, head_dim]` of a turned value; keys lie in an order of their own."""
    fits = isinstance(turned, Tensor) and turned.dim() == 4 and isinstance(key, Tensor) and key.dim() == 4
    if not fits or turned.shape[3] != turned_keys(key.shape[2]) or not turned.is_contiguous():
        raise ValueError("A turned value is contiguous, [batch, kv_heads, head_dim, keys rounded up to whole 16].")
    return turned.transpose(2, 3)[:, :, : key.shape[2]]


def _turned(given: Quantised, causal: bool, kind: tuple[object, ...]) -> Quantised:
    """With value turned by a kernel, where that pays. `kind`: as of `_turns`."""
    query, key, value = given.query, given.key, given.value
    seen = key.shape[2] // 2 if causal else key.shape[2]
    if (
        given.turned
        or query.dtype != E4M3
        or seen * query.shape[3] < TURNED_FROM
        or not _turns(query, key, value, kind)
        or (made := turn(value)) is None
    ):
        return given
    return replace(given, value=_as_rows(key, made), turned=True)


def _seen(query: Tensor, key: Tensor, causal: bool, rounds: bool) -> float:
    """Keys that queries see, about half of all under a causal mask, for each row that is quantised: of key, value, and
    query unless its kernel `rounds` it."""
    rows, keys = query.shape[1] * query.shape[2], key.shape[1] * key.shape[2]
    return rows * key.shape[2] / (2 if causal else 1) / (2 * keys if rounds else rows + 2 * keys)


def _turns(query: Tensor, key: Tensor, value: Tensor, kind: tuple[object, ...]) -> bool:
    """Whether value is turned as it is quantised: where a kernel of `fp8_wgmma` may take it. `kind`: what is known of
    calls that one kernel serves, or none."""
    runtime, dim = current.runtime(), value.shape[3]
    if runtime.platform is None or query.device.type != runtime.device_type or not _may_launch(query, key, value):
        return False
    gpu = runtime.platform.spec(query.get_device())
    if gpu is not None and gpu.arch != WITH_WGMMA:
        return False
    return dim <= WIDEST and dim % GROUP == 0 and (TURNED, *kind) not in runtime.served


def _may_launch(query: Tensor, key: Tensor, value: Tensor) -> bool:
    ordinary = not torch.compiler.is_compiling() and is_ordinary(query, key, value)
    return ordinary and not shapes.is_recording()


def _require(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}.")
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be [batch, heads, seqlen, head_dim], not {list(tensor.shape)}.")
    eight = key.dtype in BESIDE.get(query.dtype, ())
    wide = query.dtype == key.dtype and query.itemsize > 1 and query.is_floating_point()
    if key.dtype != value.dtype or not (eight or wide):
        found = ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in (query, key, value)}))
        raise ValueError(
            "query, key and value must all be float8_e4m3fn, key and value perhaps float8_e5m2, or all int8, or all of "
            f"16 or 32 bits, not {found}."
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    fits = key.shape[:3] == value.shape[:3] and key.shape[3] == query.shape[3] and key.shape[0] == query.shape[0]
    if not fits or not kv_heads or heads % kv_heads or 0 in (*query.shape, *key.shape, *value.shape):
        raise ValueError(
            f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit: key and value "
            "have as many heads and rows, batch and key's head_dim are query's, heads are a multiple of kv_heads, and "
            "nothing is empty."
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
        raise ValueError("attention_fp8 has no gradients; call it under torch.no_grad(), or evoattn.attention.")


def _scales(descales: tuple[Scale, Scale, Scale], query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Those of `Quantised`. Raises `ValueError` and `TypeError` for what is none."""
    made = []
    per_head = key.shape[0], key.shape[1]
    per_block = {
        name: (*one.shape[:2], scale_blocks(one.shape[2]))
        for name, one in zip(MAIN[:3], (query, key, key), strict=True)
    }
    for name, descale in zip(MAIN[:3], descales, strict=True):
        if descale is None or isinstance(descale, (int, float)):
            if descale is not None and not descale >= 0:
                raise ValueError(f"{name}_descale must not be negative, as {descale} is.")
            made.append(tensor_of_number(1.0 if descale is None else float(descale), key))
            continue
        if not isinstance(descale, Tensor):
            raise TypeError(f"{name}_descale must be a tensor or a number, not {type(descale).__name__}.")
        if descale.numel() != 1 and tuple(descale.shape) not in (per_head, per_block[name]):
            raise ValueError(
                f"{name}_descale must be one number, [batch, kv_heads] or of each 128 rows, here {list(per_head)} or "
                f"{list(per_block[name])}, not {list(descale.shape)}."
            )
        if descale.device != key.device:
            raise ValueError(f"{name}_descale is on {descale.device}, and key on {key.device}.")
        one = descale.detach().float()
        made.append(one.reshape(1, 1) if descale.numel() == 1 else one.contiguous())
    if any(one.dim() == 3 for one in made):
        made = [_of_blocks(one, per_block[name]) for name, one in zip(MAIN[:3], made, strict=True)]
    elif any(tuple(one.shape) != (1, 1) for one in made):
        made = [one.expand(per_head).contiguous() for one in made]
    return made[0].contiguous(), made[1], made[2]


def _of_blocks(scale: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """A scale of all, of K/V heads or of blocks as one of each block."""
    if scale.dim() == 3:
        return scale
    of_heads = scale if scale.shape[1] == 1 else scale.repeat_interleave(shape[1] // scale.shape[1], 1)
    return of_heads[:, :, None].expand(shape)


def _lse_correction(query: Tensor, means: Tensor, scale: float | None) -> Tensor:
    """What the scores of each query lost with the mean of the keys, `[batch, heads, seqlen_q]`."""
    means = means.repeat_interleave(query.shape[1] // means.shape[1], 1)
    factor = query.shape[3] ** -0.5 if scale is None else scale
    return (query.float() @ means.transpose(2, 3))[..., 0] * factor


def _answer(
    call: Call, given: Quantised, sinks: Tensor | None, kind: tuple[object, ...], may_change: bool
) -> Answer | None:
    """By a kernel of 8 bits, else in 16. `kind`: as of `_turns`. None where no kernel takes what was turned, or rounds
    query, which is remembered, if `may_change` says that tensors may be quantised anew."""
    if given.q_scale is None:
        runtime = current.runtime()
        try:
            return runtime.attend(replace(call, strict=True, op=rounded_op(WIDE[call.query.dtype])))
        except NoKernel:
            if may_change:
                runtime.keep(runtime.served, (ROUNDS, *kind), False)
                return None
            given = _with_query(given)
    assert given.q_scale is not None
    call = replace(call, query=given.query, terms=behind(call.terms, (given.q_scale,)), q_scaled=True)
    widest = WIDEST if call.turned or call.query.dtype != E4M3 else WIDEST_IN_ROWS
    if _may_launch(call.query, call.key, call.value) and call.value.shape[3] <= widest:
        runtime = current.runtime()
        try:
            return runtime.attend(replace(call, strict=True))
        except NoKernel:
            if call.turned and may_change:
                runtime.keep(runtime.served, (TURNED, *kind), False)
                return None
            if call.strict:
                raise
    elif call.strict:
        raise NoKernel(
            f"No kernel serves this call: those of 8 bits take a head_dim of V up to {widest}, outside of compiled "
            "code."
        )
    return dequantised(call, given, sinks)


def dequantised(call: Call, given: Quantised, sinks: Tensor | None) -> Answer:
    """The answer in 16 bits: query takes its scales and those of key, the answer takes value's; each tensor its own
    where these are of blocks of rows."""
    assert given.q_scale is not None
    group, query, value = call.query.shape[1] // call.key.shape[1], call.query, call.value
    if call.turned:
        from evoattn.correctness.eight_bits import turned_back  # which a kernel does without

        batch, heads, keys, dim = value.shape
        strides = (*value.stride()[:2], value.stride(3), 1)
        value = turned_back(value.as_strided((batch, heads, dim, turned_keys(keys)), strides), keys)
    key, of_values = call.key, None
    if given.v_scale.dim() == 3:
        from evoattn.correctness.eight_bits import spread

        rows, keys = query.shape[2], key.shape[2]
        query = (query.float() * spread(given.q_scale, rows)).to(ANSWERS)
        key = (key.float() * spread(given.k_scale, keys)).to(ANSWERS)
        value = (value.float() * spread(given.v_scale, keys)).to(ANSWERS)
    else:
        of_scores, of_values = given.q_scale * given.k_scale, given.v_scale
        if of_scores.shape[1] > 1:
            of_scores, of_values = (one.repeat_interleave(group, 1) for one in (of_scores, of_values))
        query = (query.float() * of_scores[:, :, None, None]).to(ANSWERS)
    answer = attend(
        Call(
            query,
            key.to(ANSWERS),
            value.to(ANSWERS),
            call.mask,
            call.scale,
            True,
            call.window,
            call.softcap,
            terms_of(sinks=sinks),
            call.return_lse,
        )
    )
    out, lse = (answer, None) if isinstance(answer, Tensor) else answer
    if of_values is not None:
        out = (out.float() * of_values[:, :, None, None]).to(ANSWERS)
    return out if lse is None else (out, lse)


LEAST_GAIN = 1 << 18
"""Multiply-adds of both products for each number of query, key and value, times head_dim. From here on 8 bits, with
quantising counted, have 0.96 to 1.68 of the speed of 16 (33 problems, 1.39 in the mean), below 0.70 to 1.41 (21): an
H200, 2026-11-29, reports/performance.md."""
LEAST_DIM = 64
"""The narrowest head_dim that was tried."""
CAUSAL: dict[str, Causal] = {FULL: False, CAUSAL_UPPER_LEFT: "upper_left", CAUSAL_LOWER_RIGHT: "lower_right"}
FP8 = "in 8 bits, as evoattn.enable(precision='fp8') says"


def why_sixteen_bits(call: Call) -> str:
    """One reason, without a full stop, why a call runs in its own bits under `enable(precision="fp8")`; else empty. No
    kernel is looked for."""
    query, key, value = call.query, call.key, call.value
    if call.wants_gradients:
        return "gradients are wanted"
    if query.dtype not in (torch.float16, torch.bfloat16) or not query.dtype == key.dtype == value.dtype:
        return "only tensors of 16 bits are quantised on the way"
    terms = {name for name, term in zip(TERMS, call.terms, strict=False) if term is not None}
    if call.score or call.blocks or terms - {"sinks"} or len(call.terms) > len(TERMS):
        return "kernels of 8 bits take masks, windows, soft caps and sinks alone"
    if is_promised(call.batch_invariant):
        return "a scale depends on other rows, and batch_invariant is promised"
    if not query.dim() == key.dim() == value.dim() == 4 or 0 in (*query.shape, *key.shape, *value.shape):
        return "tensors do not have four dimensions with something in each"
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
    fits = key.shape[:3] == value.shape[:3] and key.shape[3] == dim and key.shape[0] == query.shape[0]
    if not fits or heads % kv_heads or (heads != kv_heads and not call.enable_gqa):
        return "shapes do not fit"
    if value.shape[3] > WIDEST:
        return f"kernels of 8 bits take a head_dim of V up to {WIDEST}"
    if dim < LEAST_DIM:
        return f"nobody tried whether 8 bits gain at head_dim {dim}; from {LEAST_DIM} on they may"
    return ""


def choice_in_eight_bits(runtime: Runtime, call: Call) -> Choice | Refusal:
    """The kernel of 8 bits for a call that `why_sixteen_bits` says nothing of, or why none; loads nothing."""
    problem = call.problem(out_like(call.query, call.value, "meta").stride())
    if isinstance(problem, str):
        return Refusal(problem)
    gpu = runtime.platform.spec(call.query.get_device()) if runtime.platform else None
    if gpu is None:
        return Refusal("there is no GPU that evoattn knows")
    products = problem.flops // 2 // (call.query.numel() + call.key.numel() + call.value.numel())
    if products * problem.head_dim < LEAST_GAIN:
        least = LEAST_GAIN // problem.head_dim
        return Refusal(f"to quantise takes longer than it saves: {products} multiply-adds a number, and {least} pay")
    op = rounded_op(problem.dtype)
    eight = replace(problem, dtype="e4m3", op=op, scales="head", turned=problem.head_dim_v % GROUP == 0)
    return runtime.choose(eight, gpu, index=call.query.get_device())


def in_eight_bits(runtime: Runtime, call: Call) -> Answer | None:
    """The answer by a kernel of 8 bits, in query's dtype; None where the call runs in its own bits."""
    if runtime.platform is None or why_sixteen_bits(call):
        return None
    query, key, value = call.query, call.key, call.value
    lies = [(one.shape, one.stride()) for one in (query, key, value)]
    sinks = call.term(SINKS)
    words = call.mask, call.window, call.softcap, call.return_lse, sinks is None
    known = FP8, *lies, query.dtype, query.get_device(), *words
    plans = runtime.served
    serves = plans.get(known)
    if serves is None:
        serves = isinstance(choice_in_eight_bits(runtime, call), Choice)
        runtime.keep(plans, known, serves)
    if not serves:
        return None
    try:
        answer = attention_fp8(
            query, key, value, causal=CAUSAL[call.mask], scale=call.scale, window=call.window, softcap=call.softcap,
            sinks=sinks, smooth_k=not call.softcap and sinks is None,
            return_lse=call.return_lse, strict=True,
        )  # fmt: skip
    except NoKernel:
        runtime.keep(plans, known, False)
        return None
    out, lse = (answer, None) if isinstance(answer, Tensor) else answer
    out = out if call.out is None else call.out.copy_(out)
    return out if lse is None else (out, lse)


def words_in_eight_bits(runtime: Runtime, call: Call) -> tuple[str, str]:
    """What `explain` says of a call: the kernel of 8 bits and nothing, or nothing and why its own bits stay."""
    reason = why_sixteen_bits(call)
    if not reason:
        found = choice_in_eight_bits(runtime, call)
        if isinstance(found, Choice):
            return f"{found.words}, {FP8}", ""
        reason = found.reason
    return "", f"; not {FP8}: {reason}"
