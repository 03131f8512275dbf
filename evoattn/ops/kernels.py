"""The kernels of a process by device: made ready at first use, and out of use for good where they fail."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

from evoattn.model import forks
from evoattn.ops import checked
from evoattn.ops.choice import Choice, KernelKey
from evoattn.ops.cubins import Cubin
from evoattn.ops.kernel import LoadedKernel, scratch_places, tensor_places
from evoattn.ops.plan import CallPlan, Refusal, Scratch
from evoattn.ops.platform import Platform

COLD = "its kernel is not loaded yet and a CUDA graph is being captured; call evoattn.warmup or the model once before"


class Kernels:
    """Loaded kernels, and why others could not be made ready: none of these is tried again in this process.

    `folder` keeps compiled kernels and the records of their checks.
    """

    def __init__(self, platform: Platform, folder: Path, build: Callable[..., Cubin], lost: Callable[[], None]) -> None:
        """`build` makes machine code, as `cubins.get` does. `lost` is called where a kernel turns out to be of no
        use."""
        self._platform, self._folder, self._build, self._lost = platform, folder, build, lost
        self._scratch = Scratch(platform)
        self._loaded: dict[tuple[int, KernelKey], LoadedKernel] = {}
        self._failures: dict[tuple[int, KernelKey], str] = {}
        self._said: set[str] = set()
        self._lock = forks.Lock()

    def failure(self, choice: Choice, index: int) -> str:
        """Why the chosen kernel, if it was loaded, is not used any more; empty if nothing is known against it."""
        return self._failure((index, choice.key))

    def _failure(self, key: tuple[int, KernelKey]) -> str:
        kernel = self._loaded.get(key)
        return kernel.failure if kernel else self._failures.get(key, "")

    def fail(self, kernel: LoadedKernel, reason: str) -> str:
        """Take a kernel out of use for the rest of the process; the reason."""
        kernel.failure = reason
        self._scratch.forget()
        self._lost()
        self._say(f"{reason}; the kernel is not used again, SDPA runs")
        return reason

    def prepare(self, choice: Choice, index: int, scale: float | None = None) -> CallPlan | Refusal:
        """The plan of a chosen kernel on a device: compiles, loads and checks it at first use, never in a capture."""
        with self._lock:
            problem, launches, key = choice.problem, choice.launches(scale), (index, choice.key)
            kernel = self._loaded.get(key)
            if (kernel is None or not kernel.holds(launches)) and self._platform.capturing():
                self._say(f"SDPA was captured for {problem.packed.describe()}: {COLD}")
                return Refusal(COLD)
            if failure := self._failure(key):
                return Refusal(failure)
            try:
                kernel = kernel or self._load(choice, key)
                if kernel.failure:
                    return Refusal(kernel.failure)
                workspace = choice.family.workspace(problem, choice.config, choice.gpu)
                places, scratch_bytes, zeroed_bytes = scratch_places(workspace)
                places |= tensor_places()
                packed = kernel.pack(launches, places)
            except Exception as error:  # no compiler, no memory, a driver that refuses …: a model must go on
                words = str(error).strip().splitlines() or [type(error).__name__]
                reason = f"{choice.family.name} {choice.config.describe()} failed: {words[0].rstrip('.')}"
                if kernel is None:
                    self._failures[key] = reason
                else:
                    kernel.failure = reason
                self._lost()
                self._say(f"{reason}; SDPA runs")
                return Refusal(reason)
            if kernel.failure:  # meanwhile, in a launch of another thread
                return Refusal(kernel.failure)
            memory = scratch_bytes, zeroed_bytes, self._scratch
            return CallPlan(choice.words, kernel, packed, problem, *memory, self._platform)

    def _load(self, choice: Choice, key: tuple[int, KernelKey]) -> LoadedKernel:
        """The kernel, loaded on the device and checked there. Raises what compiling, loading and checking raise."""
        cubin = self._build(choice.family, choice.problem.packed, choice.config, choice.gpu, self._folder)
        kernel = checked.load(choice, cubin, key[0], self._platform, self._folder)
        self._loaded[key] = kernel
        if kernel.failure:
            self._lost()
            self._say(f"{kernel.failure}; it is never used here, SDPA runs")
        return kernel

    def _say(self, what: str) -> None:
        """Warn, once for each text."""
        if what not in self._said:
            self._said.add(what)
            warnings.warn(f"evoattn: {what}.", RuntimeWarning, stacklevel=5)
