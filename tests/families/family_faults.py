"""What the interpreter says of a family's source with a fault in it.

A table of faults has rows: what is wrong, the genes that have the place, and edits (old text, new text) of the rendered
source. The same configs pass untouched.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.cases import make_case
from evoattn.correctness.validate import check
from evoattn.families.built import BuiltKernel
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CheckResult
from tests.families import test_flash_mma, test_flash_scalar, test_flash_wgmma
from tests.families.kept_compiles import compile_kept
from tests.support.source_edits import replaced

FAMILIES = {
    "flash_scalar": (test_flash_scalar, AttentionProblem(1, 1, 1, 35, 131, 64), "l4"),
    "flash_mma": (test_flash_mma, AttentionProblem(1, 2, 1, 113, 203, 64), "l4"),
    "flash_wgmma": (test_flash_wgmma, AttentionProblem(1, 2, 1, 100, 700, 64), "h100"),
    "flash_wgmma, shared rows": (test_flash_wgmma, AttentionProblem(1, 2, 1, 100, 250, 64), "h100"),
    "flash_wgmma, causal": (
        test_flash_wgmma,
        AttentionProblem(1, 2, 1, 400, 400, 64, mask="causal_upper_left"),
        "h100",
    ),
    "flash_wgmma, three chunks of columns": (test_flash_wgmma, AttentionProblem(1, 2, 1, 200, 100, 136), "h100"),
}
Edit = tuple[str, str] | tuple[str, str, int]
"""Old text, new text, and in how many places if not in one."""
Row = tuple[str, dict[str, object], list[Edit]]


@cache
def outcome(
    family: str, genes: tuple[tuple[str, object], ...], edits: tuple[Edit, ...], kind: str, sms: int | None
) -> CheckResult:
    """What the interpreter says of the config's source with these edits, on inputs of `kind`; each old text must occur
    in it. `sms` are those of the GPU, the table's if None."""
    module, problem, name = FAMILIES[family]
    gpu = replace(GPUS[name], sm_count=sms or GPUS[name].sm_count)
    config = module.config(**dict(genes))
    candidate = render(module.FAMILY, problem, config, gpu)
    source = candidate.source
    for old, new, *places in edits:
        source = replaced(source, old, new, *places)
    case = make_case(kind, problem, 1, "cpu", kind, double=True)
    kernel = BuiltKernel(module.FAMILY, config, gpu, compile_kept(source, candidate.arch))
    return check(InterpreterBackend(), kernel, case)


def assert_found(family: str, row: Row, kind: str = "plain", sms: int | None = None) -> None:
    _, genes, edits = row
    untouched = outcome(family, tuple(genes.items()), (), kind, sms)
    assert untouched.passed, untouched.reason
    result = outcome(family, tuple(genes.items()), tuple(edits), kind, sms)
    assert not result.passed and math.isnan(result.max_error), result  # stopped by a fault, not by a wrong answer
