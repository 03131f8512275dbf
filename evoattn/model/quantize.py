"""The making of 8 bits as operations: a tensor's numbers and their scales, of its values or of these less their mean.

The tensor is of Q's shape: `[batch, heads, seqlen_q, head_dim]`. A problem's `kv` is the dtype of the numbers, e4m3
unless given; its `scales` says what shares one: all, the heads of a K/V head of a batch (`head`), 128 rows of a head
(`block`) or each row (`token`).
A scale is the largest magnitude over the largest number of the dtype, 1 where that is 0. `turn` takes numbers of 8
bits, and makes them `turned`. `quantize_kv` takes two tensors together, K's shape and V's, of which V may be `turned`;
`quantize_smooth` takes them too, and from the rows of each head of K first their mean, as SageAttention's `smooth_k`.
Attention is the same whatever is taken from all keys, so that the mean of some rows does: each block then reads these,
and none waits for the others."""

import math
from typing import Any

from evoattn.model.dtype import DTYPES, Dtype
from evoattn.model.operation import OPERATIONS, Operation, TensorSpec, contiguous
from evoattn.model.scales import PER_BLOCK, PER_TOKEN, scale_blocks
from evoattn.model.turned import turned_spec

SMOOTH = "quantize_smooth"
TURN, PAIR = "turn", "quantize_kv"
TOGETHER = (PAIR, SMOOTH)
QUANTIZE_OPERATIONS = ("quantize", TURN, *TOGETHER)
SAMPLED = 64
"""Rows of a head that a mean is of. What is left of a channel's mean is an eighth of its standard deviation."""


def sampled_rows(rows: int) -> list[int]:
    """Those in the middle of SAMPLED equal parts: the first token of a text often has a key unlike all others."""
    return [(2 * i + 1) * rows // (2 * SAMPLED) for i in range(SAMPLED)]


def number_of(problem: Any) -> Dtype:
    """The row of what such a problem makes."""
    return DTYPES[problem.kv or "e4m3"]


def _why_not(problem: Any) -> str:
    if problem.op not in TOGETHER and problem.head_dim_v != problem.head_dim:
        return f"op={problem.op} takes one tensor: leave value_dim out."
    if problem.op == TURN:
        fits = problem.dtype == "e4m3" and problem.turned and not problem.scales and not problem.kv
        words = f"op={TURN} takes numbers of 8 bits: write dtype=e4m3 turned=1, and leave scales and kv out."
        return "" if fits else words
    alone = problem.heads == problem.kv_heads and problem.seqlen_q == problem.seqlen_k
    if problem.op in TOGETHER and not alone:
        return f"op={problem.op} takes K and V alone: write as many heads as K/V heads, and as many queries as keys."
    return ""


def _inputs(problem: Any) -> tuple[TensorSpec, ...]:
    lies_as = {"x": "k", "v": "v"} if problem.op in TOGETHER else {"x": "q"}
    dtype = problem.element.torch
    return tuple(TensorSpec(name, problem.shape(one), problem.strides(one), dtype) for name, one in lies_as.items())


def _outputs(problem: Any) -> tuple[TensorSpec, ...]:
    """The numbers, in the tensor's order of dimensions or `turned`; their scales and with `quantize_smooth` the means,
    float32. Of two tensors K's lie as Q does, V's as O."""
    pair, dtype = problem.op in TOGETHER, number_of(problem).torch
    rows = problem.batch, problem.heads, problem.seqlen_q
    shapes = {"": (1, 1), "head": (problem.batch, problem.kv_heads), PER_TOKEN: rows}
    shapes[PER_BLOCK] = (*rows[:2], scale_blocks(problem.seqlen_q))
    last = TensorSpec("v_numbers" if pair else "numbers", problem.shape("o"), problem.strides("o"), dtype)
    if problem.turned:
        last = turned_spec(last.name, problem.shape("o"), dtype)
    if problem.op == TURN:
        return (last,)
    made: tuple[TensorSpec, ...] = last, contiguous("v_scale" if pair else "scale", shapes[problem.scales], "float32")
    if pair:
        first = TensorSpec("numbers", problem.shape("q"), problem.strides("q"), dtype)
        made = (first, made[1]._replace(name="scale"), *made)
    if problem.op != SMOOTH:
        return made
    return *made, contiguous("mean", (problem.batch, problem.heads, 1, problem.head_dim), "float32")


def _flops(problem: Any) -> int:
    """A comparison and a product of each element, and with a mean a difference."""
    flops: int = (3 if problem.op == SMOOTH else 2) * sum(math.prod(one.shape) for one in problem.inputs)
    return flops


def _bytes(problem: Any) -> int:
    """The tensors read once, all outputs written once."""
    moved: int = sum(tensor.bytes for tensor in (*problem.inputs, *problem.outputs))
    return moved


for _name in QUANTIZE_OPERATIONS:
    OPERATIONS[_name] = Operation(_name, _inputs, _outputs, _flops, _bytes, "evoattn.correctness.quantize", _why_not)
