"""Runs a candidate on a case and judges what it wrote, where it wrote, and whether it does so every time."""

import math
import time

import torch

from evoattn.backends.base import Backend
from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.arena import BANDS, Arena, Layout
from evoattn.correctness.cases import Case, proof_of
from evoattn.correctness.judge import Outputs, different, dirty_sentence, judge, judge_one, ordered, why_different
from evoattn.correctness.reference import first
from evoattn.families.built import BuiltKernel
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CheckResult

OUTSIDE = "the kernel wrote outside its buffers"


def output_layouts(problem: AttentionProblem) -> dict[str, Layout]:
    """What a kernel writes, by name."""
    return {o.name: Layout(o.shape, o.strides, getattr(torch, o.dtype)) for o in problem.outputs}


def make_arena(case: Case, scratch: dict[str, int], device: torch.device) -> Arena:
    """Guarded buffers for `case` and a family's `scratch` (name: bytes)."""
    return Arena(case.tensors, output_layouts(case.problem), scratch, device, case.changed())


def check(backend: Backend, kernel: BuiltKernel, case: Case, repeat: bool = False) -> CheckResult:
    """Run a candidate once on `case` over poisoned output between guard bands, and judge it. With `repeat` run it
    twice: the bits of both are compared, or both are judged in outputs whose bits may differ (`Family.unordered`).

    The inputs are copies between guard bands too, compared with the originals afterwards; the second run finds other
    bytes in the bands, so that an answer that depends on them shows. Raises `LaunchError` if the launch fails."""
    return run_case(backend, kernel, case, repeat)[0]


def check_small_cases(
    backend: InterpreterBackend, kernel: BuiltKernel, problem: AttentionProblem, seed: int
) -> tuple[CheckResult, ...]:
    """The interpreter's cases for a problem, up to the first that fails. Raises as `check` does."""
    results: list[CheckResult] = []
    for small in proof_of(problem).interpreter_cases(problem, kernel.config):
        results.append(check(small.backend(backend), small.placed(kernel), small.make(seed)))
        if not results[-1].passed:
            break
    return tuple(results)


def run_case(
    backend: Backend, kernel: BuiltKernel, case: Case, repeat: bool = False
) -> tuple[CheckResult, Outputs | None]:
    """`check`, and the outputs that were judged, by name (None where the run itself showed a fault)."""
    started = time.perf_counter()
    arena = make_arena(case, kernel.workspace(case.problem), backend.device)
    launches = kernel.launches(case.problem)
    outputs: list[Outputs] = []
    damage: list[torch.Tensor] = []

    def result(reason: str, largest: float = math.nan) -> CheckResult:
        sentence = f"Case '{case.name}': {reason}" if reason else ""
        return CheckResult(
            case.name, not reason, largest, first(case.answer).allowed_error, sentence, time.perf_counter() - started
        )

    def run(band: int) -> str:
        arena.arm(band)
        faults = backend.run(kernel.compiled, launches, arena.buffers)
        if not faults:
            outputs.append({name: out.clone() for name, out in arena.outputs.items()})
            damage.append(torch.stack([arena.changed_bands(), *arena.changed_inputs(), *arena.dirty_zeros()]))
        return faults[0] if faults else ""

    for band in BANDS[: 2 if repeat else 1]:
        if fault := run(band):
            return result(fault), None
    bands, *counts = torch.stack(damage).sum(0).tolist()
    if bands:
        return result(f"{OUTSIDE}, beside {arena.touched_band()}."), outputs[0]
    for name, changed in zip(case.tensors, counts[: len(case.tensors)], strict=True):
        if changed:
            did = "left wrong" if name in case.changed() else "changed"
            return result(f"the kernel {did} {changed} elements of its input {name}."), outputs[0]
    reason, largest = judge(outputs[0], case.answer)
    unordered = kernel.unordered(case.problem)
    if repeat and different(*(ordered(out, unordered) for out in outputs)):
        run(BANDS[0])
        run(BANDS[0])
        reason = why_different(*(ordered(out, unordered) for out in outputs))
    elif repeat and not reason:
        later = (judge_one(outputs[1][name], case.answer[name])[0] for name in unordered)
        reason = next((f"in a second run, {sentence}" for sentence in later if sentence), "")
    return result(reason or dirty_sentence(arena.zeroed, counts[len(case.tensors) :]), largest), outputs[0]
