"""What would run and why, and getting it ready before it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from evoattn.model.errors import WrongUse
from evoattn.model.problem import AttentionProblem
from evoattn.ops import asked, current, dropout
from evoattn.ops import attn_mask as attn_masks
from evoattn.ops.asked import PLAIN, SEVERAL_DEVICES, StridedProblem
from evoattn.ops.autocast import autocast, has_autocast
from evoattn.ops.choice import choose
from evoattn.ops.ordinary import WATCHED, is_ordinary
from evoattn.ops.plan import ADDRESS_BITS, UNALIGNED, Refusal
from evoattn.ops.runtime import GRADIENTS, Runtime
from evoattn.ops.shapes import Wanted, problems_of
from evoattn.ops.variant import Variant, closed
from evoattn.ops.variant_call import why_not_tensors
from evoattn.portfolio.canonical import grown


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal: Literal["upper_left", "lower_right"] = "upper_left",
    return_lse: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> str:
    """One sentence: the kernel that `evoattn.attention`, or SDPA under `evoattn.sdpa`, runs for these arguments, or
    why torch's SDPA runs; where a mask tensor parts the two, of both. With `block_table` query, key and value are those
    of `evoattn.attention_paged`, with `cu_seqlens_q` and the other three those of `evoattn.attention_varlen`; their
    causal mask is `lower_right`.

    Nothing is compiled, loaded or launched. Raises `ValueError` for arguments beyond SDPA's that do not fit.
    """
    asked.require_causal(causal)
    if not all(isinstance(tensor, Tensor) for tensor in (query, key, value)):
        return f"SDPA runs: {attn_masks.NO_TENSOR}."
    scale = None if scale is None else asked.number("scale", scale)
    softcap = asked.cap(softcap)
    starts = None if cu_seqlens_q is None or cu_seqlens_k is None else (cu_seqlens_q, cu_seqlens_k)
    longest = max_seqlen_q, max_seqlen_k
    variant = Variant(
        closed(window), softcap, sinks, alibi_slopes, bias, seqused_k, block_table, starts=starts, longest=longest
    )
    if dropout_p:
        dropout.require_alone(not variant.plain or return_lse or causal != "upper_left")
        return f"SDPA runs: {dropout.REASON}."
    if block_table is not None:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        enable_gqa, causal = True, "lower_right"
    of_sdpa = ""
    if attn_mask is not None:
        if only := attn_masks.why_only_torch(attn_mask, query, key, is_causal, enable_gqa):
            return f"SDPA runs: {only}."
        if attn_masks.causal_kind(attn_mask) is None:
            of_sdpa = "; as SDPA under `evoattn.sdpa` PyTorch's own runs, as there is a mask tensor"
        is_causal, causal, bias = attn_masks.said_by(attn_mask, query, key, is_causal, causal, bias)
        variant = replace(variant, bias=bias)
    if starts is not None:
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        enable_gqa, causal = True, "lower_right"
    if not variant.plain:
        variant.require_tensors()
    watched = not is_ordinary(query, key, value)
    if has_autocast(kind := query.device.type):
        query, key, value = autocast(kind, query, key, value)
        variant = variant.on_all(lambda tensor: autocast(kind, tensor)[0])
    if not variant.plain:
        variant.require(query, key)
    runtime = current.runtime()
    reason = None
    if watched:
        reason = WATCHED
    elif torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, *variant.tensors)):
        reason = GRADIENTS
    elif any(t.device != query.device for t in variant.tensors):
        reason = SEVERAL_DEVICES
    else:
        reason = why_not_tensors(query, variant)
    if reason is None:
        fields = PLAIN if variant.plain else variant.fields(is_causal, query, key)
        if fields and scale is not None:
            fields = {**fields, "scale": float(scale)}
        choice = runtime.choice(query, key, value, is_causal, scale, enable_gqa, causal, return_lse, None, fields)
        if isinstance(choice, Refusal):
            reason = choice.reason
        elif failure := runtime.failure(choice, query.get_device()):
            reason = failure
        elif (query.data_ptr() | key.data_ptr() | value.data_ptr()) & ADDRESS_BITS:
            reason = UNALIGNED
        else:
            return f"{choice.words}{of_sdpa}."
    return f"SDPA runs: {reason}."


def strided(problem: AttentionProblem) -> StridedProblem:
    """The problem with the strides of its own memory layout."""
    strides = tuple(problem.strides(tensor) for tensor in "qkvo")
    return StridedProblem(**problem.to_dict(), strides_of=strides)


def warmup(shapes: Wanted, device: torch.device | int | None = None, *, up_to_keys: int = 0) -> list[str]:
    """Compile, load and check the kernels of these problems, so that no call waits for a compiler and a CUDA graph can
    capture them; say of each what will run.

    `shapes` are problems, their names or shapes as on the command line
    (`B=1,H=16,S=1024,D=64,dtype=bf16,mask=causal`), or one of these, or what `evoattn.capture` recorded. `device` is
    torch's current CUDA device unless given. With `up_to_keys` the kernels are made ready, too, that each problem comes
    to while its keys grow to so many, as those of a cache do; each that is new has a sentence of its own. Raises
    `ProblemError` on an unknown shape, or where a problem cannot have so many keys.
    """
    runtime = current.runtime()
    if not isinstance(up_to_keys, int):
        raise WrongUse(f"up_to_keys is a number of keys, not {up_to_keys!r}.")
    problems = problems_of(shapes)
    several = [[one.with_unknown_lengths() for one in grown(problem, up_to_keys)] for problem in problems]
    if runtime.platform is None:
        return ["SDPA runs: there is no CUDA device."] * len(problems)
    index = runtime.platform.current_device() if device is None else torch.device(device).index or 0
    return [sentence for growing in several for sentence in _made_ready(runtime, growing, index)]


def _made_ready(runtime: Runtime, problems: Sequence[AttentionProblem], index: int) -> Iterator[str]:
    """What will run for the first of these problems, and for each later one that another kernel serves."""
    gpu = runtime.platform and runtime.platform.spec(index)
    last: object = None
    for problem in problems:
        choice = choose(strided(problem), gpu, runtime.pick, runtime.estimated) if gpu else Refusal("unknown GPU")
        kernel = choice.reason if isinstance(choice, Refusal) else choice.key
        if kernel == last:
            continue
        last = kernel
        plan = choice if isinstance(choice, Refusal) else runtime.prepare(choice, index)
        since = "" if problem is problems[0] else f"From {problem.seqlen_k} keys on "
        yield f"{since}SDPA runs: {plan.reason}." if isinstance(plan, Refusal) else f"{since}{plan.words}."
