"""Compiles the kernels of drawn calls in other processes, which need no GPU."""

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

import evoattn
from benchmarks.calls.no_device import NoDevice
from evoattn.backends.cubins import Cubin, get_cubin
from evoattn.backends.platform import Platform
from evoattn.families.base import Family
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.ops.check import record_check
from evoattn.ops.choice import Choice, Refusal
from evoattn.ops.plan import CallPlan
from evoattn.ops.runtime import Runtime, current
from evoattn.portfolio.pick import next_picks
from tests.fuzz.asked import Draw
from tests.fuzz.calls import Call
from tests.fuzz.faces import Face
from tests.fuzz.judged_faces import ALL, face_of
from tests.fuzz.made import Maker, called

Numbered = tuple[int, Call]


class Compiling(Runtime):
    """Compiles the kernel of a call and refuses to run it."""

    def __init__(self, platform: Platform, folder: Path, build: Callable[..., Cubin]) -> None:
        super().__init__(platform, current.best_known, folder, others=next_picks)
        self._folder, self._build = folder, build

    def prepare(self, choice: Choice, index: int, *others: object) -> CallPlan | Refusal:
        self._build(choice.family, choice.problem.as_searched, choice.config, choice.gpu, self._folder)
        return Refusal("it is compiled")


def compile_one(
    gpu: GpuSpec, folder: Path, estimated: bool, numbered: Numbered, build: Callable[..., Cubin] = get_cubin
) -> Numbered:
    """Compile what the call will need; what fails will fail again where it is told."""
    runtime = Compiling(cast(Platform, NoDevice(gpu.name)), folder, build)
    runtime.estimated = estimated
    with current.use(runtime), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call = numbered[1]
            called(call, (made := Maker(call, "cpu", filled=False).made()), True, made.out)
        except Exception:  # most are NoKernel: compiled, or PyTorch's
            pass
    return numbered


def built(family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, folder: Path) -> Cubin:
    """Machine code, whose check is recorded as passed on no device."""
    cubin = get_cubin(family, problem, config, gpu, folder)
    record_check(cubin, NoDevice(gpu.name).identity(0), folder, config, "")
    return cubin


def compile_face(
    gpu: GpuSpec,
    folder: Path,
    estimated: bool,
    number: int,
    seed: int,
    build: Callable[..., Cubin] = built,
    faces: dict[str, Face] = ALL,
) -> int:
    """As `compile_one`, of a question to another face; its launches compute nothing, so that what comes behind them is
    compiled, too."""
    runtime = Runtime(cast(Platform, NoDevice(gpu.name)), current.best_known, folder, build=build, others=next_picks)
    runtime.estimated = estimated
    with current.use(runtime), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with contextlib.suppress(Exception):  # as above
            asked = faces[face_of(number, faces)](Draw.of(seed, number, "cpu"))
            for _ in range(2):  # the second for kernels that are made ready beside calls
                asked.ask()
                evoattn.settle()
    return number
