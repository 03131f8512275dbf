"""The forward pass as an operation: O, and the log-sum-exp, of Q, K, V and what a problem's variants add.

Its functions take an `AttentionProblem`, whose module imports this one."""

import math
from typing import Any

from evoattn.model import block_list
from evoattn.model.append import new_rows
from evoattn.model.dtype import DTYPES
from evoattn.model.operation import OPERATIONS, Operation, TensorSpec, contiguous
from evoattn.model.scales import ANSWERED, SCALES
from evoattn.model.score import WHOLE
from evoattn.model.turned import turned_spec

MAIN = ("q", "k", "v", "o")
"""The tensors of every call, which may lie in memory as callers like."""
TERMS = ("sinks", "slopes", "bias", "seqused", "table", "cu_seqlens_q", "cu_seqlens_k")
"""The inputs of variants (`AttentionProblem.term_shapes`), tables, lists and scales aside."""
LSE = "lse"


def _inputs(problem: Any) -> tuple[TensorSpec, ...]:
    """Q, K and V (unless it lies within K), and the inputs of variants."""
    main = tuple(
        turned_spec(name, problem.shape(name), problem.element.torch)
        if problem.turned and name == "v"
        else TensorSpec(name, problem.shape(name), problem.strides(name), problem.element_of(name).torch)
        for name in problem.tensors
    )
    if not problem.term_shapes:
        return main
    dtype = problem.answer.torch
    kinds = {"sinks": dtype, "slopes": "float32"} | dict.fromkeys(SCALES, "float32")
    for table in problem.own_tables:
        kinds[table.buffer] = table.dtype if table.dtype in WHOLE else DTYPES[table.dtype].torch
    return main + tuple(
        TensorSpec(name, shape, problem.strides(name), dtype)
        if name == "bias"
        else TensorSpec(name, *new_rows(problem, name[-1]), problem.element.torch)
        if name.startswith("new_")
        else TensorSpec(name, shape, (*problem.scale_strides(name), 1)[: len(shape)], "float32")
        if name in SCALES and len(shape) > 2
        else contiguous(name, shape, kinds.get(name, "int32"))
        for name, shape in problem.term_shapes.items()
    )


def _outputs(problem: Any) -> tuple[TensorSpec, ...]:
    """O and, where the problem asks for it, the log-sum-exp."""
    o = TensorSpec("o", problem.shape("o"), problem.strides("o"), problem.answer.torch)
    return (o, contiguous(LSE, problem.lse_shape, "float32")) if problem.lse else (o,)


def _flops(problem: Any) -> int:
    """2·head_dim for a score and as many for its part of O, of V's head_dim, for every visible pair
    (flash-attention's count)."""
    flops: int = 2 * (problem.head_dim + problem.head_dim_v) * problem.visible_pairs
    return flops


def _bytes(problem: Any) -> int:
    """Q, the keys and values that some query sees with scales of their own, and the bias read once, O and the
    log-sum-exp, if any, written once."""
    keys = sum(keys for rows, keys in problem.sequences if rows)
    if problem.window:
        keys = sum(len(problem.masking.band(rows, count).keys(0, rows)) for rows, count in problem.sequences)
    kept = problem.kv_heads * keys
    if problem.blocks:
        mask, batch, heads, band, diagonal = problem.block_mask
        kept = block_list.keys_read(mask, batch, heads, problem.kv_heads, band, diagonal)
    row = problem.shape("k")[3] * problem.element_of("k").bytes
    if not problem.shared_kv:
        row += problem.head_dim_v * problem.element_of("v").bytes
    of_rows = (shape for name, shape in problem.scale_shapes.items() if name != "q_scale" and len(shape) > 2)
    row += 4 * sum(math.prod(shape[3:]) for shape in of_rows)
    moved: int = kept * row + problem.element_of("q").bytes * math.prod(problem.shape("q"))
    moved += problem.answer.bytes * (math.prod(problem.shape("o")) + math.prod(problem.term_shapes.get("bias", (0,))))
    moved += 4 * problem.lse * math.prod(problem.lse_shape)
    return moved


FORWARD = Operation("forward", _inputs, _outputs, _flops, _bytes, proof="evoattn.correctness.forward")
OPERATIONS[FORWARD.name] = FORWARD

for _name in ANSWERED:
    OPERATIONS[_name] = Operation(_name, _inputs, _outputs, _flops, _bytes, proof=FORWARD.proof)
