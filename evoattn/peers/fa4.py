"""FlashAttention 4 (`flash_attn.cute`), whose kernels are compiled just in time; one split per row, as it has no more
on Hopper. Slopes and a bias are a function of the scores there, which evoattn brings (`fa4_scores`)."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from evoattn.model.problem import AttentionProblem
from evoattn.peers.fa3 import Load, Prepare
from evoattn.peers.variants import PeerRefused

ScoreMod = Callable[..., Any]


@cache
def find_score_mod(name: str) -> ScoreMod:
    """`add_slopes` or `add_bias`. Raises `ImportError` without that language."""
    import cutlass
    from cutlass import cute

    @cute.jit
    def element(vector):  # type: ignore[no-untyped-def]
        """The one integer of a vector of one."""
        held = cute.make_rmem_tensor(1, cutlass.Int32)
        held.store(vector)
        return held[0]

    @cute.jit
    def add_slopes(scores, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        """`aux_tensors`: slopes, float32 `[heads]`. The diagonal ends in the lower right corner of each sequence."""
        slope = aux_tensors[0][element(head)]
        ahead = element(q_idx) + seqlen_info.seqlen_k - seqlen_info.seqlen_q - element(kv_idx)
        distance = ahead if ahead > 0 else -ahead
        return scores - cute.full_like(scores, slope * cutlass.Float32(distance))

    @cute.jit
    def add_bias(scores, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        """`aux_tensors`: the bias `[batch, heads, seqlen_q, seqlen_k]`, with stride 0 where it is broadcast."""
        bias = aux_tensors[0][element(batch), element(head), element(q_idx), element(kv_idx)]
        return scores + cute.full_like(scores, cutlass.Float32(bias))

    found: ScoreMod = {"add_slopes": add_slopes, "add_bias": add_bias}[name]
    return found


OWN = ("sink", "alibi", "bias")
"""Variants that it takes beside those of FlashAttention 3."""


def prepare(problem: AttentionProblem, load: Load, score_mod: Callable[[str], ScoreMod] = find_score_mod) -> Prepare:
    """Its function for the problem: the one for sequences of several lengths takes a batch too, with keys in use and
    pages.

    Raises `PeerRefused` for a softcap with slopes or a bias: each is the one function of the scores. Raises
    `ImportError` where it is not installed."""
    changed = problem.alibi or bool(problem.bias)
    if changed and problem.softcap:
        raise PeerRefused("FlashAttention 4 has one function of the scores: no softcap beside slopes or a bias.")
    module = load("flash_attn.cute")
    several = problem.seqused or problem.varlen
    function = module.flash_attn_varlen_func if several else module.flash_attn_func
    modified = score_mod("add_slopes" if problem.alibi else "add_bias") if changed else None

    def make(q: Any, k: Any, v: Any, causal: bool, options: Mapping[str, Any]) -> Callable[[], Any]:
        words = dict(options)
        added = words.pop("slopes", None), words.pop("bias", None)
        if modified is not None:
            words |= {"score_mod": modified, "aux_tensors": [tensor for tensor in added if tensor is not None]}
        return partial(function, q, k, v, causal=causal, **words)

    return make
