"""The merge of partial answers as an operation: one answer of attention out of those over parts of its keys.

Of N parts O_i, L_i (a log-sum-exp each) it makes L = log Σ_i exp(L_i) and O = Σ_i exp(L_i - L) O_i. A problem's
`seqlen_k` is the number of parts; its mask and K/V heads change nothing. `merge` takes parts in float32 and rounds O to
the problem's dtype; `merge_narrow` takes parts of that dtype, which has 16 bits. A part whose L_i is -inf counts for
nothing, whatever its O_i holds; where all are -inf, O is 0 and L -inf.

Its functions take an `AttentionProblem`, whose module imports this one."""

import math
from typing import Any

from evoattn.model.operation import OPERATIONS, Operation, TensorSpec, contiguous

NARROW = "merge_narrow"
MERGE_OPERATIONS = ("merge", NARROW)


def _why_not(problem: Any) -> str:
    if problem.variants:
        return f"op={problem.op} has nothing of attention's variants; take {min(problem.variants)} out of the shape."
    if problem.op == NARROW and problem.element_bytes != 2:
        return f"op={NARROW} takes parts of 16 bits; write dtype=fp16, dtype=bf16 or op=merge."
    return ""


def rows_of(problem: Any) -> int:
    """Rows of O: queries of all heads and batches."""
    rows: int = problem.batch * problem.heads * problem.seqlen_q
    return rows


def part_strides(problem: Any) -> tuple[int, int, int, int]:
    """Of a part, a batch, a head and a row of the parts, in elements: parts lie one behind the other, each as O does
    without gaps."""
    batch, head, row = problem.strides("o")[:3]
    return math.prod(problem.shape("o")), batch, head, row


def _inputs(problem: Any) -> tuple[TensorSpec, ...]:
    """`parts` `[seqlen_k, batch, heads, seqlen_q, head_dim]`; `part_sums` `[seqlen_k, batch, heads, seqlen_q]`,
    float32, contiguous."""
    shape = problem.seqlen_k, *problem.shape("o")
    dtype = problem.element.torch if problem.op == NARROW else "float32"
    return TensorSpec("parts", shape, (*part_strides(problem), 1), dtype), contiguous("part_sums", shape[:4], "float32")


def _outputs(problem: Any) -> tuple[TensorSpec, ...]:
    """O and L."""
    o = TensorSpec("o", problem.shape("o"), problem.strides("o"), problem.element.torch)
    return o, contiguous("lse", problem.shape("o")[:3], "float32")


def _flops(problem: Any) -> int:
    """A product and a sum for each element of each part."""
    flops: int = 2 * rows_of(problem) * problem.seqlen_k * problem.head_dim
    return flops


def _bytes(problem: Any) -> int:
    """Every input read once, every output written once."""
    return sum(tensor.bytes for tensor in (*problem.inputs, *problem.outputs))


for _name in MERGE_OPERATIONS:
    OPERATIONS[_name] = Operation(_name, _inputs, _outputs, _flops, _bytes, "evoattn.correctness.merge", _why_not)
