"""Kernels of a process that are compiled, loaded and checked, and what is made ready beside calls."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from evoattn.backends.cubins import Cubin, kept_cubin
from evoattn.backends.loaded import (
    LaunchArguments,
    LoadedKernel,
    Place,
    operation_places,
    scratch_places,
    tensor_places,
)
from evoattn.backends.platform import Platform
from evoattn.model import forks
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.ops.arguments import Given
from evoattn.ops.call import Call
from evoattn.ops.check import cases_of, load_checked, recorded_check
from evoattn.ops.choice import Choice, KernelKey, Refusal
from evoattn.ops.plan import CallPlan, OperationPlan, Scratch
from evoattn.ops.torch_answer import is_promised

if TYPE_CHECKING:
    from evoattn.correctness.cases import Case
    from evoattn.families.base import Family
    from evoattn.model.gpu import GpuSpec

COLD = "its kernel is not loaded yet and a CUDA graph is being captured; call evoattn.warmup or the model once before"
BEHIND_SECONDS = 0.3
"""What is done beside a call begins so long behind it: the first one of a process has Python for itself."""
MOST_FOLDED = 4096
READ_SECONDS = 0.05
"""Machine code that is not there by then is being compiled."""


class Kernels:
    """Loaded kernels, and why others could not be made ready: none of these is tried again in this process.

    `folder` keeps compiled kernels and the records of their checks."""

    def __init__(self, platform: Platform, folder: Path, build: Callable[..., Cubin], lost: Callable[[], None]) -> None:
        """`build` makes machine code, as `get_cubin` does. `lost` is called where a kernel turns out to be of no
        use, or another one is ready now: what was decided may not hold."""
        self._platform, self._folder, self._build, self._lost = platform, folder, build, lost
        self._scratch = Scratch(platform)
        self._loaded: dict[tuple[int, KernelKey], LoadedKernel] = {}
        self._chosen: dict[tuple[int, KernelKey], Choice] = {}
        """Of loaded kernels, what they were chosen as."""
        self._beside: threading.Thread | None = None
        """What compiles while others run."""
        self._waits = False
        """Whether something was not begun because of that."""
        self._cases: dict[tuple[int, KernelKey], list[Case]] = {}
        """Of kernels that were made ready so: what they are to be checked with, nothing where they were."""
        self._ahead: dict[tuple[int, KernelKey], Future[Cubin]] = {}
        """Machine code of kernels that are loaded next."""
        self._folded: dict[tuple[object, ...], bool] = {}
        """Whether the kernels of calls that `Call.folds` speaks of are compiled."""
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
        self.say(f"{reason}; the kernel is not used again, SDPA runs")
        return reason

    def prepare(
        self, choice: Choice, index: int, scale: float | None, given: tuple[Given, ...] | None
    ) -> CallPlan | Refusal:
        """The plan of a chosen kernel on a device: compiles, loads and checks it at first use, never in a capture.
        `given`: see `Call.given`, None for a plan that runs no call."""
        places = tensor_places(choice.problem, None if given is None else [which for which, *_ in given])
        ready = self.ready(choice, index, choice.launches(scale), places)
        if isinstance(ready, Refusal):
            return ready
        return CallPlan(choice, *ready, given or (), self._platform)

    def ahead(self, choice: Choice, index: int) -> dict[int, Choice]:
        """The rivals of a chosen kernel for which a call waits hardly longer, by their place behind it: those that are
        compiled, and where it has to wait for a compiler all others, whose compilers begin here."""
        found = dict[int, Choice]()
        with contextlib.suppress(Exception):  # no compiler, no more threads …: the chosen one itself says so
            waits = bool(choice.rivals) and not self._is_compiled(choice, index)
            for place, one in enumerate(choice.rivals, 1):
                key = index, one.key
                if not (key in self._ahead or one.has_code_of(choice) or self._is_compiled(one, index)):
                    if not waits:
                        continue
                    compiler = ThreadPoolExecutor(1, "evoattn compiles")
                    self._ahead[key] = compiler.submit(self._build, *_recipe(one), self._folder)
                    compiler.shutdown(wait=False)
                found[place] = one
        return found

    def compiles_longer(self, choice: Choice, index: int, seconds: float) -> bool:
        """Whether what `ahead` began for a kernel takes more than so many seconds from now. It goes on."""
        begun = self._ahead.get((index, choice.key))
        return begun is not None and bool(wait([begun], max(0.0, seconds)).not_done)

    def _is_compiled(self, choice: Choice, index: int) -> bool:
        known = (index, choice.key) in self._loaded or self.failure(choice, index)
        return bool(known) or kept_cubin(*_recipe(choice), self._folder) is not None

    def meanwhile(self, choice: Choice, index: int, call: Call) -> Choice:
        """What runs in place of a chosen kernel whose compiler or check a call would wait for: a loaded one that says
        the same, which was chosen for other lengths or masks, of FlexAttention's calls and of a caller's expressions;
        else, of an eager call of FlexAttention's, one that is compiled sooner. The chosen one is made ready beside it,
        and runs from then on, but in a capture, which loads none. Where bits must not change, or there is no such
        kernel, the chosen one itself."""
        key, problem, capturing = (index, choice.key), choice.problem, self._platform.capturing()
        may_wait = call.from_functions or problem.own_score is not None or problem.shown is not None
        if not may_wait or choice.estimated or key in self._loaded or self._failure(key):
            return choice
        if problem.batch_invariant or problem.deterministic or torch.are_deterministic_algorithms_enabled():
            return choice
        others = [
            other
            for (at, of), other in list(self._chosen.items())  # another thread may be loading one
            if at == index
            and of[2:] == choice.key[2:]
            and not self._failure((at, of))
            and not other.family.why_impossible(problem, other.config, choice.gpu)
        ]
        if not (others or capturing or call.compiled) and call.from_functions:
            sooner = _sooner(choice)
            others = [sooner] if sooner and not self._failure((index, sooner.key)) else []
        if not others or (not capturing and self._is_ready(choice, key)):
            return choice
        other = others[0]
        if len(others) > 1:
            from evoattn.cost.cost import scores  # here: it imports NumPy and reads a file of weights

            costs = scores(problem.as_searched, [one.config for one in others], choice.gpu)
            other = others[costs.index(min(costs))]
        self.beside(partial(self.make_ready, choice, index))
        return replace(other, problem=problem, words=f"{other.name} runs until {choice.name} is compiled")

    def _is_ready(self, choice: Choice, key: tuple[int, KernelKey]) -> bool:
        """Whether a kernel that is not loaded needs no compiler, and has a check behind it or cases for one."""
        if key in self._cases:
            return True
        cubin = kept_cubin(*_recipe(choice), self._folder)
        return cubin is not None and self._was_checked(cubin, key[0])

    def _was_checked(self, cubin: Cubin, index: int) -> bool:
        return recorded_check(cubin, self._platform.identity(index), self._folder) is not None

    def beside(self, work: Callable[[], None]) -> bool:
        """Do this beside calls; whether it began, as it does not where something is done there: calls are decided anew
        behind that, and ask again."""
        if self._beside is not None and self._beside.is_alive():
            self._waits = True
            return False
        self._waits = False

        def behind() -> None:
            threading.main_thread().join(BEHIND_SECONDS)
            if _process_ends():
                return
            work()
            if self._waits:
                self._lost()

        self._beside = threading.Thread(target=behind, name="evoattn compiles")
        self._beside.start()
        return True

    def make_ready(self, choice: Choice, index: int) -> None:
        """Compile a kernel that is to be loaded by a later call, and make the cases of its check, on the CPU: another
        thread may be capturing a graph."""
        key = index, choice.key
        try:
            cubin = self._build(*_recipe(choice), self._folder)
            if _process_ends():
                return
            self._cases[key] = [] if self._was_checked(cubin, key[0]) else cases_of(choice)
        except Exception as error:  # the others go on
            self._failures[key] = f"{choice.name} failed: {str(error).strip().partition(chr(10))[0].rstrip('.')}"
            return
        self._lost()

    def is_folded(
        self, call: Call, known: tuple[object, ...], choices: Callable[[], Refusal | tuple[Choice | Refusal, ...]]
    ) -> bool:
        """Whether the kernels of a call's constants (`Call.folds`) are compiled, which begins when it is asked again.
        Those of the same bits in every run are its arguments'."""
        if torch.are_deterministic_algorithms_enabled() or is_promised(call.batch_invariant):
            return False

        asked, index = [choices], call.query.get_device()

        def fold() -> None:
            with contextlib.suppress(Exception):  # the next such call chooses itself, and raises it there
                found = asked.pop()()  # and with it the call's tensors go, before a compiler works
                for choice in () if isinstance(found, Refusal) else found:
                    if isinstance(choice, Choice):
                        self.make_ready(choice, index)
            self._folded[known] = True

        if self._platform.capturing():
            return False
        if known not in self._folded:
            if len(self._folded) >= MOST_FOLDED:
                self._folded = {}
            self._folded[known] = False
        elif not self._folded[known]:
            self.beside(fold)
        return self._folded.get(known, False)

    def settle(self) -> None:
        """Wait for what is made ready beside calls: the next eager one loads it."""
        if self._beside is not None:
            self._beside.join()

    def operation(self, choice: Choice, index: int) -> OperationPlan | Refusal:
        """The same of an operation beside attention."""
        ready = self.ready(choice, index, choice.launches(None), operation_places(choice.problem))
        return ready if isinstance(ready, Refusal) else OperationPlan(choice, *ready, self._platform)

    def ready(
        self, choice: Choice, index: int, launches: tuple[KernelLaunch, ...], tensors: dict[str, Place]
    ) -> tuple[LoadedKernel, tuple[LaunchArguments, ...], tuple[int, int, Scratch]] | Refusal:
        """A chosen kernel with its launches bound to the places of `tensors` and of scratch memory, the bytes of that
        memory and of that which is zeroed, and who has it. Compiles, loads and checks as `prepare` does."""
        with self._lock:
            problem, key = choice.problem, (index, choice.key)
            kernel = self._loaded.get(key)
            if (kernel is None or not kernel.holds(launches)) and self._platform.capturing():
                self.say(f"{choice.instead} was captured for {problem.as_searched.describe()}: {COLD}")
                return Refusal(COLD)
            if failure := self._failure(key):
                return Refusal(failure)
            try:
                kernel = kernel or self._load(choice, key)
                if kernel.failure:
                    return Refusal(kernel.failure)
                workspace = choice.family.workspace(problem, choice.config, choice.gpu)
                places, scratch_bytes, zeroed_bytes = scratch_places(workspace)
                bound = kernel.bound(launches, places | tensors)
            except Exception as error:  # no compiler, no memory, a driver that refuses …: a model must go on
                words = str(error).strip().splitlines() or [type(error).__name__]
                reason = f"{choice.family.name} {choice.config.describe()} failed: {words[0].rstrip('.')}"
                if kernel is None:
                    self._failures[key] = reason
                else:
                    kernel.failure = reason
                self._lost()
                self.say(f"{reason}; {choice.instead} runs")
                return Refusal(reason)
            if kernel.failure:  # meanwhile, in a launch of another thread
                return Refusal(kernel.failure)
            return kernel, bound, (scratch_bytes, zeroed_bytes, self._scratch)

    def _load(self, choice: Choice, key: tuple[int, KernelKey]) -> LoadedKernel:
        """The kernel, loaded on the device and checked there. Raises what compiling, loading and checking raise."""
        there, kept, of_check = threading.Event(), self._cases.pop(key, None), partial(cases_of, choice)
        with ThreadPoolExecutor(1) as beside:  # a compiler leaves most of Python alone
            cases = beside.submit(lambda: None if kept or there.wait(READ_SECONDS) else of_check())
            try:
                ahead = self._ahead.pop(key, None)
                cubin = ahead.result() if ahead else self._build(*_recipe(choice), self._folder)
            finally:
                there.set()
            wanted = lambda: kept or cases.result() or of_check()
            kernel = load_checked(choice, cubin, key[0], self._platform, self._folder, wanted)
        self._loaded[key], self._chosen[key] = kernel, choice
        if kernel.failure:
            self._lost()
            self.say(f"{kernel.failure}; it is never used here, {choice.instead} runs")
        return kernel

    def say(self, what: str) -> None:
        """Warn, once for each text."""
        if what not in self._said:
            self._said.add(what)
            warnings.warn(f"evoattn: {what}.", RuntimeWarning, stacklevel=5)


def _process_ends() -> bool:
    """Whether it waits for its threads alone: these begin nothing more. What a compiler has begun it finishes, as it
    crashes where the process ends under it."""
    return not threading.main_thread().is_alive()


def _recipe(choice: Choice) -> tuple[Family, AttentionProblem, KernelConfig, GpuSpec]:
    """What decides the machine code."""
    return choice.family, choice.problem.as_searched, choice.config, choice.gpu


def _sooner(choice: Choice) -> Choice | None:
    """The same with a kernel that is compiled sooner; None where there is none."""
    family, genes = choice.family, choice.config.params
    changed = {name: min(value, genes[name]) for name, value in family.soon_compiled.items()}
    config = KernelConfig(family.name, genes | changed)
    if config == choice.config or family.why_impossible(choice.problem, config, choice.gpu):
        return None
    return replace(choice, config=config)
