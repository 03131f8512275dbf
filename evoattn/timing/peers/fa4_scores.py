"""ALiBi slopes and an additive bias as FlashAttention 4's `score_mod`, in CUTLASS's Python language, which compiles
them into its kernels (`apply_score_mod_inner` of flash_attn/cute/softmax.py says what they get).

With `aux_tensors` all arguments are vectors of one element. Annotations are left out: that language reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

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
