"""What the worker processes run: compiling and ranking in the pool, validating and timing on the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from threading import Thread

from evoattn.backends.context import make_context
from evoattn.backends.warm_up import load_products
from evoattn.evaluation.allocator import keep_freed_memory
from evoattn.evaluation.process import Handler
from evoattn.evaluation.tasks import Compile, Compiled, DeviceAnswer, DeviceTask, Rendered
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Evaluation
from evoattn.model.timeline import mark
from evoattn.timing.protocol import CacheMode

COMPILE_SECONDS = 30.0
"""A compile with its cost estimate takes 0.1 to 2 s; one that takes this long hangs."""
DEVICE_SECONDS = 20.0
"""An evaluation on the device takes 25 to 500 ms; one that takes this long hangs, or is too slow to matter."""
POLITE = 5
"""Compile workers leave the cores to the GPU worker and to the search itself, which all others wait for."""

Work = Callable[[Compile, AttentionProblem, GpuSpec], Compiled | Evaluation]


class CompileHandler(Handler):
    """The compile pool's process: it renders, compiles and packs sources; with `offline` it checks and ranks too."""

    def __init__(self, problem: AttentionProblem, gpu: GpuSpec, offline: bool) -> None:
        os.nice(POLITE)  # first: what it imports is not urgent either
        keep_freed_memory()
        self._problem, self._gpu = problem, gpu
        self._work = _offline() if offline else _compile()
        mark("compile worker: ready")

    def __call__(self, task: Compile) -> Rendered:
        candidate = task.rendered(self._problem, self._gpu)
        answer = self._work(replace(task, candidate=candidate), self._problem, self._gpu)
        return Rendered.of(task, candidate, self._problem, self._gpu, answer)


def _compile() -> Work:
    from evoattn.backends import compiler
    from evoattn.evaluation.compile import compile_and_rank

    compiler.version()  # loads NVRTC
    compiler.include_options()
    return compile_and_rank


def _offline() -> Work:
    import torch

    from evoattn.evaluation.evaluate import evaluate_offline

    torch.set_num_threads(1)  # the pool is as wide as the machine
    return evaluate_offline


class DeviceHandler(Handler):
    """The GPU worker's process."""

    def __init__(self, problem: AttentionProblem, gpu: GpuSpec, cache: CacheMode) -> None:
        mark("GPU worker: begins")
        make_context()  # before what has to be imported, as a process of the reserve is still about that
        products = "cuda", problem.element.torch, "float32" if problem.element.on_tensor_cores else "float64"
        loading = Thread(target=load_products, args=products)
        loading.start()
        from evoattn.evaluation.device import DeviceEvaluator

        self._evaluator = DeviceEvaluator(problem, gpu, cache, report=self.report)
        loading.join()  # while a graph is captured no other thread may ask for memory
        mark("GPU worker: its cases are made")

    def __call__(self, task: DeviceTask) -> DeviceAnswer:
        try:
            return self._evaluator.do(task)
        finally:
            self.broken = self._evaluator.broken
