"""Without a device: a candidate is compiled and ranked; an offline search also checks its answers on the interpreter.

Every failure becomes a state with a sentence; nothing is raised for a bad kernel.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from evoattn.backends.base import LaunchError
from evoattn.backends.compiler import CompileError, compile_candidate
from evoattn.backends.interpreter import InterpreterBackend, NotInterpreted
from evoattn.correctness.validate import check_small_cases
from evoattn.cost.cost import cost
from evoattn.evaluation.tasks import Compile, Compiled
from evoattn.families.built import BuiltKernel
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompileInfo, Evaluation, TrialState, ValidationReport
from evoattn.model.space import KernelConfig


def compile_and_rank(task: Compile, problem: AttentionProblem, gpu: GpuSpec) -> Compiled:
    """Compile a candidate and price it: the pool's task when a device will time it. The PTX, which is longer than the
    machine code, stays here: no device needs it."""
    started = time.perf_counter()
    try:
        kernel = compile_candidate(task.candidate)
    except CompileError as error:
        return Compiled(None, Evaluation(TrialState.COMPILE_ERROR, str(error), seconds=time.perf_counter() - started))
    return Compiled(replace(kernel, ptx=""), None, _score(task.config, kernel.info, problem, gpu))


def evaluate_offline(task: Compile, problem: AttentionProblem, gpu: GpuSpec) -> Evaluation:
    """Compile for `gpu`, check the answers on the interpreter, rank by the cost model: the pool's task where no device
    is."""
    started = time.perf_counter()
    config, candidate = task.config, task.candidate

    def done(state: TrialState, reason: str = "", **evidence: Any) -> Evaluation:
        return Evaluation(state, reason, seconds=time.perf_counter() - started, **evidence)

    try:
        kernel = compile_candidate(candidate)
    except CompileError as error:
        return done(TrialState.COMPILE_ERROR, str(error))
    backend, built = InterpreterBackend(), BuiltKernel(task.family, config, gpu, kernel)
    # Seeded by the source's hash: reproducible, and no source can contain it.
    seed = int(candidate.source_hash[:8], 16)
    try:
        report = ValidationReport("interpreter", check_small_cases(backend, built, problem, seed), seed)
        if not report.passed:
            return done(TrialState.WRONG_RESULT, report.first_failure, compile_info=kernel.info, validation=report)
    except NotInterpreted as error:
        return done(TrialState.COMPILE_ERROR, f"Not interpreted: {error}", compile_info=kernel.info)
    except LaunchError as error:
        return done(TrialState.LAUNCH_ERROR, str(error), compile_info=kernel.info)
    score = _score(config, kernel.info, problem, gpu)
    if score is None:
        return done(
            TrialState.LAUNCH_ERROR,
            f"No block of {kernel.info.registers} registers per thread fits on an SM of the {gpu.product}.",
            compile_info=kernel.info,
            validation=report,
        )
    return done(
        TrialState.ESTIMATED,
        "Right on the interpreter; never timed.",
        compile_info=kernel.info,
        validation=report,
        relative_cost=score,
    )


def _score(config: KernelConfig, info: CompileInfo, problem: AttentionProblem, gpu: GpuSpec) -> float | None:
    """The cost model's score of a compiled candidate; None if no block of it fits on an SM."""
    found = cost(problem, config, gpu, info.registers, info.spill_bytes)
    return found.score if found else None
