"""V of 8 bits with its keys along rows, as Hopper's tensor cores read it: `[batch, kv_heads, head_dim, keys]`.

Keys are rounded up to whole groups of 16, of zeros. In a group place 4t + e has key 2t + e % 2 + e / 2 · 8: those whose
scores a thread holds (`templates/fp8_wgmma/value_tile.cuh`)."""

from typing import Any

from evoattn.model.operation import TensorSpec, contiguous
from evoattn.model.scales import ANSWERED, PER_TOKEN

GROUP = 16
ORDER = tuple(2 * (place // 4) + place % 2 + place % 4 // 2 * 8 for place in range(GROUP))
"""The key of each place."""


def turned_keys(keys: int) -> int:
    """Places of a row."""
    return -(-keys // GROUP) * GROUP


def turned_spec(name: str, shape: tuple[int, int, int, int], dtype: str) -> TensorSpec:
    """Of a tensor whose logical shape is `[batch, heads, keys, head_dim]`."""
    batch, heads, keys, dim = shape
    return contiguous(name, (batch, heads, dim, turned_keys(keys)), dtype)


def why_not_turned(problem: Any) -> str:
    """One sentence if the fields of a problem that say so cannot be, else empty."""
    if not problem.turned:
        return ""
    if problem.op == "forward" and problem.dtype != "e4m3":
        return f"turned: V of 8 bits alone comes so, beside Q of 8 bits; write dtype=e4m3, not {problem.dtype}."
    if problem.op not in ("forward", *ANSWERED, "quantize", "quantize_smooth", "quantize_kv", "turn"):
        return f"op={problem.op} takes no V with its keys along rows; take turned out."
    if problem.scales == PER_TOKEN:
        return "turned: V has one scale, or one of each head; write scales=head, or leave it out."
    if others := [name for name in ("seqused", "page", "varlen", "shared_kv") if getattr(problem, name)]:
        return f"turned and {others[0]} exclude each other; take one of them out."
    return ""
