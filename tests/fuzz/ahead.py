"""Compiles the kernels of drawn calls in other processes, which need no GPU."""

import warnings
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import cast

from benchmarks.calls.no_device import NoDevice
from evoattn.backends.cubins import Cubin, get_cubin
from evoattn.backends.platform import Platform
from evoattn.model.gpu import GpuSpec
from evoattn.ops.choice import Choice, Refusal
from evoattn.ops.plan import CallPlan
from evoattn.ops.runtime import Runtime, current
from evoattn.portfolio.pick import next_picks
from tests.fuzz.calls import Call
from tests.fuzz.made import Maker, called
from tests.support.in_processes import in_processes

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


def compiled_ahead(
    calls: list[Numbered], jobs: int, gpu: GpuSpec, folder: Path, estimated: bool
) -> Generator[Numbered, None, None]:
    """The calls as their kernels are ready."""
    return in_processes(jobs, partial(compile_one, gpu, folder, estimated), calls)
