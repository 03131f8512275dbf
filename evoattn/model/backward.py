"""The backward pass as an operation: gradients of attention's inputs from those of its output and log-sum-exp.

Its functions take an `AttentionProblem`, whose module imports this one."""

from typing import Any

from evoattn.model.forward import LSE, MAIN
from evoattn.model.operation import OPERATIONS, Operation, TensorSpec, contiguous
from evoattn.model.score import WHOLE, parse_tables

GIVEN = ("do", "dlse")
"""The gradients of its outputs."""
LIES_AS = {"do": "o"}
"""Of a tensor that lies in memory as another one."""
MADE = tuple(f"d{name}" for name in MAIN[:3])
"""The gradients of the inputs of every call."""
TERM_GRADS = ("bias", "sinks")
"""The inputs beside q, k and v that may have gradients, as the field `grads` of a problem names them; behind them come
tables of floats of its expression, by the names of their buffers."""


def parse_grads(text: str) -> tuple[str, ...]:
    """The names in a problem's field `grads`, which a `+` tells apart."""
    return tuple(text.split("+")) if text else ()


def why_no_grads(problem: Any) -> str:
    """One sentence if the fields that are of the backward pass alone cannot be, else empty."""
    if problem.op != BACKWARD.name and (problem.grads or problem.deterministic):
        return f"grads and deterministic are said of op={BACKWARD.name}, not of {problem.op}."
    if problem.op == BACKWARD.name and problem.page:
        return f"page: pages hold a cache that is read; op={BACKWARD.name} takes K and V in one piece."
    if problem.op == BACKWARD.name and problem.batch_invariant:
        return f"batch_invariant is said of op=forward; of op={BACKWARD.name} it is deterministic."
    names = parse_grads(problem.grads)
    tables = tuple(table.buffer for table in parse_tables(problem.tables) if table.dtype not in WHOLE)
    if names != tuple(name for name in (*TERM_GRADS, *tables) if name in names):
        others = f", or of floats of the tables own_NAME, in this order, a + between two, not {problem.grads!r}."
        return f"grads must be of {', '.join(TERM_GRADS)}{others}"
    if missing := [name for name in names if name not in problem.term_shapes]:
        return f"grads names {missing[0]}, which the problem does not have."
    return ""


def _inputs(problem: Any) -> tuple[TensorSpec, ...]:
    """Those of the forward pass, its output O and log-sum-exp, and the gradients of these: `do`, and with the
    problem's `lse` `dlse`. Log-sum-exps and their gradients are float32, contiguous."""
    o = TensorSpec("o", problem.shape("o"), problem.strides("o"), problem.element.torch)
    lse = contiguous(LSE, problem.lse_shape, "float32")
    given = (*OPERATIONS["forward"].inputs(problem), o, o._replace(name="do"), lse)
    return (*given, lse._replace(name="dlse")) if problem.lse else given


def _outputs(problem: Any) -> tuple[TensorSpec, ...]:
    """The gradients of q, k and v, in their layouts and dtype; of the bias, the sinks and tables, float32, where the
    problem's `grads` names them."""
    dtype = problem.element.torch
    names = tuple(f"d{name}" for name in problem.tensors)
    made = tuple(TensorSpec(name, problem.shape(name), problem.strides(name), dtype) for name in names)
    shapes = problem.term_shapes
    return made + tuple(contiguous(f"d{name}", shapes[name], "float32") for name in parse_grads(problem.grads))


def _flops(problem: Any) -> int:
    """Five products for every visible pair: Q Kᵀ, dQ and dK of head_dim, dO Vᵀ and dV of V's; 2.5 times the forward
    pass where the two are the same (flash-attention's count)."""
    flops: int = 2 * (3 * problem.head_dim + 2 * problem.head_dim_v) * problem.visible_pairs
    return flops


def _bytes(problem: Any) -> int:
    """Every input read once, every output written once."""
    return sum(tensor.bytes for tensor in (*problem.inputs, *problem.outputs))


BACKWARD = Operation("backward", _inputs, _outputs, _flops, _bytes, proof="evoattn.correctness.backward")
OPERATIONS[BACKWARD.name] = BACKWARD
