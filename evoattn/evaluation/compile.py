"""For a device: a candidate is rendered, compiled and priced. Imports no torch, so that a process that does only this
starts fast."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from evoattn.backends.compiler import CompileError, compile_candidate
from evoattn.cost.cost import cost
from evoattn.evaluation.tasks import Compile, Compiled
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompileInfo, Evaluation, TrialState
from evoattn.model.space import KernelConfig

_writing = ThreadPoolExecutor(1)
"""Writes to the cache of kernels while the next kernel is compiled: on some machines a new file takes milliseconds."""


def compile_and_rank(task: Compile, gpu: GpuSpec) -> Compiled:
    """Render and compile a candidate and price it: the pool's task when a device will time it. The PTX, which is longer
    than the machine code, stays here: no device needs it."""
    started = time.perf_counter()
    try:
        kernel = compile_candidate(task.rendered(gpu), writing=_writing)
    except CompileError as error:
        return Compiled(None, Evaluation(TrialState.COMPILE_ERROR, str(error), seconds=time.perf_counter() - started))
    return Compiled(replace(kernel, ptx=""), None, score(task.config, kernel.info, task.problem, gpu))


def score(config: KernelConfig, info: CompileInfo, problem: AttentionProblem, gpu: GpuSpec) -> float | None:
    """The cost model's score of a compiled candidate; None if no block of it fits on an SM."""
    found = cost(problem, config, gpu, info.registers, info.spill_bytes)
    return found.score if found else None
