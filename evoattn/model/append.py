"""New keys and values written into caches as operations, and with a rotary embedding of them and of queries.

Of each sequence `seqlen_q` rows come behind the keys in use (`seqused`, none unless given), into a cache with room for
`seqlen_k`, plain or in pages. `append` copies. `append_halves` and `append_pairs` first turn keys, and queries of the
shape of Q beside them, by the angles of their positions: pairs of columns lie half of the turned columns apart
(GPT-NeoX), or are neighbours (GPT-J). A problem's `scale` is the share of a head's columns that turn, all unless given.
Key i has the position seqused + i; a query has the same under a causal mask, else that of the first new key. What has
no place is not written: rows behind the room, pages that the table does not name. A position behind the room turns as
the last.

The method: Su et al., RoFormer, https://arxiv.org/abs/2104.09864. The functions take an `AttentionProblem`."""

import math
from typing import Any

from evoattn.model.operation import OPERATIONS, Operation, TensorSpec, contiguous

HALVES, PAIRS = "append_halves", "append_pairs"
APPEND_OPERATIONS = ("append", HALVES, PAIRS)


def turned_columns(problem: Any) -> int:
    """Columns of a head of Q and K that are turned."""
    if problem.op == "append":
        return 0
    share: float = 1.0 if problem.scale is None else problem.scale
    return round(share * int(problem.head_dim))


def _why_not(problem: Any) -> str:
    turned = turned_columns(problem)
    if turned % 2 or turned > problem.head_dim or (problem.op != "append" and not turned):
        return f"op={problem.op}: scale is the share of columns that turn, an even number up to {problem.head_dim}."
    return ""


def new_rows(problem: Any, tensor: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides, in elements, of the turned queries `q`, or of the new rows of `k` or `v`: `[batch, heads,
    rows, columns]`, without gaps in the problem's layout."""
    heads = problem.heads if tensor == "q" else problem.kv_heads
    dim, rows = problem.head_dim_v if tensor == "v" else problem.head_dim, problem.seqlen_q
    row, head = (heads * dim, dim) if problem.layout == "bshd" else (dim, rows * dim)
    return (problem.batch, heads, rows, dim), (heads * rows * dim, head, row, 1)


def room_of(problem: Any) -> int:
    """Keys that a sequence has room for: of whole pages."""
    return int(problem.table_pages * problem.page if problem.page else problem.seqlen_k)


def _inputs(problem: Any) -> tuple[TensorSpec, ...]:
    """`new_k` and `new_v`; with rotary `q`, and `cos` and `sin` `[room, turned columns / 2]`; `seqused` and with pages
    `table`."""
    dtype = problem.element.torch
    made = [TensorSpec(f"new_{name}", *new_rows(problem, name), dtype) for name in "kv"]
    if turned := turned_columns(problem):
        made.append(TensorSpec("q", problem.shape("q"), problem.strides("q"), dtype))
        made += [contiguous(name, (room_of(problem), turned // 2), dtype) for name in ("cos", "sin")]
    return (*made, *(contiguous(name, shape, "int32") for name, shape in problem.term_shapes.items()))


def _outputs(problem: Any) -> tuple[TensorSpec, ...]:
    """The caches, of which only the places of new keys are written, and with rotary the turned queries."""
    dtype = problem.element.torch
    caches = tuple(TensorSpec(f"{name}_cache", problem.shape(name), problem.strides(name), dtype) for name in "kv")
    return (*caches, TensorSpec("o", *new_rows(problem, "q"), dtype)) if turned_columns(problem) else caches


def _flops(problem: Any) -> int:
    """Three of each column that turns; a copy counts as one."""
    rows = problem.batch * problem.seqlen_q
    copied = rows * problem.kv_heads * (problem.head_dim + problem.head_dim_v)
    return int(copied + 3 * rows * (problem.heads + problem.kv_heads) * turned_columns(problem))


def _bytes(problem: Any) -> int:
    """New rows, and queries that turn, read and written once."""
    numbers = sum(math.prod(new_rows(problem, name)[0]) for name in ("qkv" if turned_columns(problem) else "kv"))
    return 2 * numbers * int(problem.element_bytes)


for _name in APPEND_OPERATIONS:
    OPERATIONS[_name] = Operation(_name, _inputs, _outputs, _flops, _bytes, "evoattn.correctness.append", _why_not)
