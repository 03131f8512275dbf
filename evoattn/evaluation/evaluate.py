"""Without a device: a candidate is compiled, its answers are checked on the interpreter, and it is ranked.

Every failure becomes a state with a sentence; nothing is raised for a bad kernel."""

import time
from typing import Any

from evoattn.backends.base import LaunchError
from evoattn.backends.compiler import CompileError, compile_candidate
from evoattn.backends.interpreter import InterpreterBackend, NotInterpreted
from evoattn.correctness.validate import check_small_cases
from evoattn.evaluation.compile import score
from evoattn.evaluation.tasks import Compile
from evoattn.families.built import BuiltKernel
from evoattn.model.gpu import GpuSpec
from evoattn.model.records import Evaluation, TrialState, ValidationReport


def evaluate_offline(task: Compile, gpu: GpuSpec) -> Evaluation:
    """Compile for `gpu`, check the answers on the interpreter, rank by the cost model: the pool's task where no device
    is."""
    started = time.perf_counter()
    config, problem, candidate = task.config, task.problem, task.rendered(gpu)

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
    relative_cost = score(config, kernel.info, problem, gpu)
    if relative_cost is None:
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
        relative_cost=relative_cost,
    )
