"""What the worker processes run: compiling and ranking in the pool, validating and timing on the device."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

from evoattn.backends.warm_up import load_products, make_context, read_peers_ahead
from evoattn.evaluation.process import Handler
from evoattn.evaluation.tasks import Compile, Compiled, DeviceAnswer, DeviceTask, OnProblem, Rendered, Survey, Surveyed
from evoattn.model.dtype import DTYPES
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Evaluation
from evoattn.model.timeline import mark
from evoattn.timing.protocol import CacheMode

if TYPE_CHECKING:  # where nothing is timed torch is not imported
    from evoattn.evaluation.device import DeviceEvaluator, Surveyor

COMPILE_SECONDS = 30.0
"""A compile with its cost estimate takes 0.1 to 2 s; one that takes this long hangs."""
DEVICE_SECONDS = 20.0
"""An evaluation on the device takes 25 to 500 ms; one that takes this long hangs, or is too slow to matter."""
POLITE = 5
"""Compile workers leave the cores to the GPU worker and to the search itself, which all others wait for."""

# malloc.h of glibc: parameters of mallopt.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
KEPT_BYTES = 1 << 30
"""Freed memory at the end of the heap that is not given back."""
LEAST_MAPPED_BYTES = 1 << 25
"""A larger allocation is mapped on its own: 32 MiB, the most that mallopt(3) allows on 64-bit machines."""
GROWTH_BYTES = 1 << 26
"""By which the heap grows at least."""

Work = Callable[[Compile, GpuSpec], Compiled | Evaluation]


class CompileHandler(Handler):
    """The compile pool's process: it renders, compiles and packs sources; with `offline` it checks and ranks too."""

    def __init__(self, gpu: GpuSpec, offline: bool) -> None:
        os.nice(POLITE)  # first: what it imports is not urgent either
        keep_freed_memory()
        self._gpu = gpu
        self._work = _offline() if offline else _compile()
        mark("compile worker: ready")

    def __call__(self, task: Compile) -> Rendered:
        candidate = task.rendered(self._gpu)
        return Rendered.of(task, candidate, self._gpu, self._work(replace(task, candidate=candidate), self._gpu))


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

    def __init__(self, problem: AttentionProblem | None, gpu: GpuSpec, cache: CacheMode) -> None:
        """`problem`: what tasks are for that name none; its cases are made at once."""
        mark("GPU worker: begins")
        make_context()  # before what has to be imported, as a process that was begun ahead is still about that
        element = problem.element if problem else DTYPES["fp16"]
        products = "cuda", element.torch, "float32" if element.on_tensor_cores else "float64"
        loading = Thread(target=load_products, args=products)
        loading.start()
        from evoattn.evaluation.device import DeviceEvaluator

        self._gpu, self._make = gpu, partial(DeviceEvaluator, gpu=gpu, cache=cache, report=self.report)
        self._evaluator = self._make(problem) if problem else None
        if self._evaluator:
            self._evaluator.prepare()
        self._surveyor: Surveyor | None = None
        loading.join()  # while a graph is captured no other thread may ask for memory
        Thread(target=read_peers_ahead, daemon=True).start()  # beside the search, whose final is the first to need them
        mark("GPU worker: its cases are made")

    def __call__(self, task: DeviceTask) -> DeviceAnswer:
        if isinstance(task, Survey):
            return self._survey(task)
        if isinstance(task, OnProblem):
            evaluator, task = self._evaluator_of(task.problem), task.task
        else:
            assert self._evaluator is not None, "tasks name their problem where the worker was made for none"
            evaluator = self._evaluator
        try:
            return evaluator.do(task)
        finally:
            self.broken = evaluator.broken

    def _survey(self, task: Survey) -> Surveyed:
        from evoattn.evaluation.device import Surveyor

        self._surveyor = self._surveyor or Surveyor()
        self.report(task.kernel.config.describe())
        try:
            return self._surveyor.times(task)
        finally:
            self.broken = self._surveyor.broken

    def _evaluator_of(self, problem: AttentionProblem) -> DeviceEvaluator:
        import torch

        if self._evaluator is None or self._evaluator.problem != problem:
            self._evaluator = None  # its inputs and answers leave the device before the next ones come
            torch.cuda.empty_cache()
            self._evaluator = self._make(problem)
        return self._evaluator


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed; whether the C library can do so (glibc can).

    A compile of a flash_wgmma kernel takes 2,250 page faults without it, and none with it: 6 to 10 % of its time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {TRIM_THRESHOLD: KEPT_BYTES, TOP_PAD: GROWTH_BYTES, MMAP_THRESHOLD: LEAST_MAPPED_BYTES}
    taken = [mallopt(parameter, ctypes.c_int(value)) for parameter, value in wanted.items()]
    return all(taken)
