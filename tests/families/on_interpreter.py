"""What the interpreter says of a compiled kernel on one problem."""

from __future__ import annotations

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.cases import make_case
from evoattn.correctness.validate import check
from evoattn.families.built import BuiltKernel
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CheckResult


def judged(kernel: BuiltKernel, problem: AttentionProblem, kind: str = "plain", repeat: bool = False) -> CheckResult:
    """Of inputs of `kind`; with `repeat` twice on the same scratch buffers, so that counters must end as they began."""
    return check(InterpreterBackend(), kernel, make_case(kind, problem, 1, "cpu", kind, double=True), repeat=repeat)
