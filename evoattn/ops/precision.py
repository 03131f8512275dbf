"""Calls of the process in 8 bits: what `evoattn.enable(precision="fp8")` said, which calls it is for, and their
answers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from evoattn.model.mask import CAUSAL_LOWER_RIGHT, CAUSAL_UPPER_LEFT, FULL
from evoattn.model.turned import GROUP
from evoattn.ops.arguments import SINKS, TERMS, Causal
from evoattn.ops.attention_fp8 import WIDEST, attention_fp8
from evoattn.ops.call import ANSWERS, Answer, Call, out_like
from evoattn.ops.choice import Choice, Refusal
from evoattn.ops.runtime import Runtime
from evoattn.ops.torch_answer import NoKernel, is_promised

LEAST_ROWS = 256
"""Queries of a K/V head. To quantise reads all keys and values, which is what attention of few queries takes its time
for."""
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
    if (rows := query.shape[2] * heads // kv_heads) < LEAST_ROWS:
        return f"to quantise takes longer than attention of {rows} queries of a K/V head; from {LEAST_ROWS} on it pays"
    return ""


def choice(runtime: Runtime, call: Call) -> Choice | Refusal:
    """The kernel of 8 bits for a call that `why_sixteen_bits` says nothing of, or why none; loads nothing."""
    problem = call.problem(out_like(call.query, call.value, "meta").stride())
    if isinstance(problem, str):
        return Refusal(problem)
    gpu = runtime.platform.spec(call.query.get_device()) if runtime.platform else None
    if gpu is None:
        return Refusal("there is no GPU that evoattn knows")
    eight = replace(problem, dtype="e4m3", scales="head", turned=problem.head_dim_v % GROUP == 0)
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
        serves = isinstance(choice(runtime, call), Choice)
        runtime.keep(plans, known, serves)
    if not serves:
        return None
    try:
        answer = attention_fp8(
            query, key, value, causal=CAUSAL[call.mask], scale=call.scale, window=call.window, softcap=call.softcap,
            sinks=None if sinks is None else sinks.to(ANSWERS), smooth_k=not call.softcap,
            return_lse=call.return_lse, strict=True,
        )  # fmt: skip
    except NoKernel:
        runtime.keep(plans, known, False)
        return None
    out, lse = (answer, None) if isinstance(answer, Tensor) else answer
    out = out.to(query.dtype) if call.out is None else call.out.copy_(out)
    return out if lse is None else (out, lse)


def words(runtime: Runtime, call: Call) -> tuple[str, str]:
    """What `explain` says of a call: the kernel of 8 bits and nothing, or nothing and why its own bits stay."""
    reason = why_sixteen_bits(call)
    if not reason:
        found = choice(runtime, call)
        if isinstance(found, Choice):
            return f"{found.words}, {FP8}", ""
        reason = found.reason
    return "", f"; not {FP8}: {reason}"
