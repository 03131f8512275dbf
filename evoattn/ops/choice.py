"""Which kernel a problem gets on a device, or the reason why none: everything short of loading it. And the race of a
pick beside its rivals, and beside what PyTorch would run on a card where such picks were not measured, held once for a
size of problems."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from evoattn.backends.versions import template_digest
from evoattn.families import registry
from evoattn.families.base import Family
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.ops import torch_answer
from evoattn.ops.call import Call, StridedProblem
from evoattn.portfolio.pick import Pick, size_class, whole
from evoattn.portfolio.wins import Raced, Races

Picker = Callable[[AttentionProblem, GpuSpec], Pick | None]
Pickers = Callable[[AttentionProblem, GpuSpec], Iterable[Pick]]

KernelKey = tuple[str, str, int, int, str, str, bool, tuple[str, ...], str, str, str, bool]
"""Family, config without the splits that launches make, head_dim of Q and of V, dtype, mask, log-sum-exp, variants,
architecture, operation, which gradients of terms, and whether these are deterministic: what one compiled kernel serves
(see `Family`)."""


class Refusal:
    """A call that SDPA serves: one sentence why."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


@dataclass(frozen=True)
class Choice:
    """A kernel for a problem. `words` is what `explain` says of it."""

    family: Family
    config: KernelConfig
    problem: StridedProblem
    gpu: GpuSpec
    words: str
    estimated: bool = False
    """Nobody timed it on such a card for such a problem: it has still to race PyTorch's attention."""
    rivals: tuple[Choice, ...] = ()
    """Kernels that it has still to race."""
    is_rival: bool = False
    """Whether it is one of these."""

    @property
    def name(self) -> str:
        return f"{self.family.name} {self.config.describe()}"

    @property
    def instead(self) -> str:
        """What runs where this kernel cannot."""
        if self.is_rival:
            return "what it was to race"
        return "SDPA" if self.problem.op in ("forward", "backward") else "PyTorch's expression"

    @property
    def key(self) -> KernelKey:
        p = self.problem
        dims = p.head_dim, p.head_dim_v
        what = p.op, p.grads, p.deterministic
        return (
            self.family.name,
            whole(self.config).id,
            *dims,
            p.dtype,
            p.mask,
            p.lse,
            p.compiled_variants,
            self.gpu.arch,
            *what,
        )

    def has_code_of(self, other: Choice) -> bool:
        """Whether it is the same machine code on the same problem."""
        return whole(self.config) == whole(other.config)

    def launches(self, scale: float | None) -> tuple[KernelLaunch, ...]:
        """The launches of the problem, with the caller's softmax scale where it is given."""
        problem = self.problem if scale is None else replace(self.problem, scale=scale)
        return self.family.launches(problem, self.config, self.gpu)


def choose(
    problem: StridedProblem,
    gpu: GpuSpec,
    pick: Picker,
    estimated: bool,
    others: Pickers | None = None,
    lookup: Callable[[str], Family] = registry.lookup,
    races: bool = False,
) -> Choice | Refusal:
    """The picked kernel if it may run; where it cannot serve these strides, the first of the `others` that can.
    `estimated` allows kernels that were measured on no GPU of this kind. `lookup` finds a family by its name.
    `races`: with the rivals that can serve the problem.

    A picker that fails (a damaged file) is passed over with a warning."""
    searched = problem.as_searched
    try:
        picked = pick(searched, gpu)
        if picked is None:
            return Refusal(f"no portfolio has a kernel for {searched.describe()} on the {gpu.name}")
        if unmeasured := _why_unmeasured(picked, gpu, estimated):
            return Refusal(unmeasured)
        family, name = lookup(picked.family), _name(picked)
        if not (invalid := family.why_impossible(problem, picked.config, gpu)):
            choice = Choice(family, picked.config, problem, gpu, f"{name} runs: {picked.why}", picked.estimated)
            if not races:
                return choice
            rivals = (replace(choice, family=lookup(one.family), config=one, is_rival=True) for one in picked.rivals)
            able = (one for one in rivals if not one.family.why_impossible(problem, one.config, gpu))
            return replace(choice, rivals=tuple(able))
        invalid = f"{name} cannot serve this call: {invalid.rstrip('.')}"
        for other in others(searched, gpu) if others else ():
            family = lookup(other.family)
            if not _why_unmeasured(other, gpu, estimated) and not family.why_impossible(problem, other.config, gpu):
                words = f"{_name(other)} runs: {other.why}; {invalid}"
                return Choice(family, other.config, problem, gpu, words, other.estimated)
    except Exception as error:  # whatever the user's own data does to it, a model must go on
        warnings.warn(f"evoattn: no kernel could be picked ({error}); SDPA runs.", RuntimeWarning, stacklevel=2)
        return Refusal(f"the choice of a kernel failed: {error}")
    return Refusal(invalid)


def _name(picked: Pick) -> str:
    return f"{picked.family} {picked.config.describe()}"


def _why_unmeasured(picked: Pick, gpu: GpuSpec, estimated: bool) -> str:
    """Why an estimated kernel does not run; empty if it may."""
    if estimated or not picked.estimated:
        return ""
    enable = "evoattn.enable(estimated=True) runs it all the same"
    return f"{_name(picked)} was measured on no {gpu.name}; {enable} ({picked.why})"


BUDGET_US = 30_000.0
"""Of GPU time for a race, with the first calls and the delays."""
CALLS, ROUNDS = 10, 3
"""Calls of each that are timed in a row, and how often they take turns. A race of long calls has fewer."""
CLEAR = 1.5
"""Who is so many times as fast as the next in one turn needs no other."""
TORCH_MOST = 2.0
"""PyTorch's time over the kernel's that there is room for: its first call is the one whose length nobody knows."""
LEAST_ROOM = 3
"""Answers that there must be memory for: of kernels, of PyTorch's, and what it writes beside its own."""
TOO_LONG = "a race would take more than 30 ms of the GPU"
NO_MEMORY = "the device has no memory left for a race"
IN_CAPTURE = "no kernel was raced yet and a CUDA graph is being captured; call the model once before"
COMPILED = "no kernel was raced yet and compiled code does not race; call evoattn.attention once before"
DELAY_CYCLES = 1_000_000
"""Half a millisecond in which calls are enqueued: what is timed is the GPU, not the CPU that feeds it."""
DELAY_US = 1000.0
"""The same at a clock of 1 GHz, which cards exceed."""


class Clock(Protocol):
    """How races are timed. Tests put another one in its place."""

    def first_us(self, run: Callable[[], object]) -> float:
        """Device time in µs of a call that may load and compile first, about, and 1 at least; waits for it."""
        ...

    def time_us(self, run: Callable[[], object], count: int) -> float:
        """Device time in µs of each of `count` calls in a row on the current stream; waits for it."""
        ...

    def room(self, index: int) -> int:
        """Bytes of a device that can be allocated."""
        ...


class CudaClock:
    """CUDA events, behind a delay but for first calls."""

    def first_us(self, run: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        begin.synchronize()  # the stream is idle now: what the CPU takes to load and enqueue, the device waits
        started = time.perf_counter()
        run()
        host_us = (time.perf_counter() - started) * 1e6
        end.record()
        end.synchronize()
        return max(1.0, float(begin.elapsed_time(end)) * 1e3 - host_us)

    def time_us(self, run: Callable[[], object], count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        torch.cuda._sleep(DELAY_CYCLES)
        begin.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / count

    def room(self, index: int) -> int:
        free, _ = torch.cuda.mem_get_info(index)
        return int(free + torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index))


class Race:
    """Holds races and knows those that were held."""

    def __init__(self, races: Races, clock: Clock, cores: int | None = None) -> None:
        """`cores`: that compile kernels at once, unless given this process's share; a kernel has fewer rivals."""
        cores = own_cores() if cores is None else cores
        self._races, self._clock, self.most_rivals = races, clock, cores - 1

    def able(self, choice: Choice) -> tuple[Choice, ...]:
        """Its rivals that race it: those for which there is a core each, and those that need no compiler."""
        alike = [one.has_code_of(choice) for one in choice.rivals]
        others = [i for i, same in enumerate(alike) if not same][: self.most_rivals]
        return tuple(one for i, one in enumerate(choice.rivals) if alike[i] or i in others)

    def known(self, choice: Choice, machine: str) -> Raced | None:
        """What the race of these kernels on such a problem came to. `machine`: product and driver."""
        return self._races.find(_key(choice, machine))

    def leave(self, choice: Choice, machine: str) -> None:
        """Hold none in this process: the pick of such problems has run, and bits are not to change."""
        self._races.add(_key(choice, machine), Raced(()), lasts=False)

    def why_not(self, choice: Choice, call: Call) -> str:
        """Why this call is none to race with; empty if it is one. Whether a graph is being captured is not asked."""
        problem, gpu = choice.problem, choice.gpu
        if call.compiled:
            return COMPILED
        if (1 + TORCH_MOST * choice.estimated) * gpu.floor_us(problem.flops, problem.bytes, problem.dtype) > BUDGET_US:
            return TOO_LONG
        query, value = call.query, call.value
        answer = query.numel() // query.shape[-1] * value.shape[-1] * query.element_size()
        return NO_MEMORY if self._clock.room(query.get_device()) < LEAST_ROOM * answer else ""

    def hold(self, choice: Choice, machine: str, call: Call, runs: Mapping[int, Callable[[], str]]) -> Raced | str:
        """All in turns: each of `runs` enqueues a kernel, 0 the pick and the others rivals by their place behind it,
        and says why it did not. A reason where there is no result, which is not kept then. One in which a rival takes
        no part is kept in this process alone. What another process found meanwhile is taken."""
        with self._races.turn():
            return self.known(choice, machine) or self._hold(choice, machine, call, runs)

    def _hold(self, choice: Choice, machine: str, call: Call, runs: Mapping[int, Callable[[], str]]) -> Raced | str:
        theirs, lasts = replace(call, out=None, strict=False), len(runs) > len(choice.rivals)
        places = list(runs)
        failed = list[str]()

        def contender(run: Callable[[], str]) -> Callable[[], None]:
            def kernel() -> None:
                if reason := run():
                    failed.append(reason)

            return kernel

        us = list[float]()
        try:
            with torch.no_grad():
                us.append(self._clock.first_us(contender(runs[0])))
                if (1 + TORCH_MOST * choice.estimated) * us[0] > BUDGET_US:
                    return TOO_LONG
                places = places[: max(1, int(BUDGET_US / 2 / us[0]))]  # a turn at least: first calls say too little
                every: list[Callable[[], object]] = [contender(runs[place]) for place in places]
                every += [lambda: torch_answer.answer(theirs)] * choice.estimated
                if not every[1:]:
                    return TOO_LONG
                us += [self._clock.first_us(one) for one in every[1:] if not failed]
                if failed:
                    return failed[0]
                us = self._in_turns(every, us)
        except Exception as error:  # no memory, an argument that PyTorch refuses …: the call itself says it again
            words = str(error).strip().splitlines() or [type(error).__name__]
            return f"the race failed: {words[0].rstrip('.')}"
        if failed:
            return failed[0]
        took = dict(zip(places, us))
        raced = Raced(
            tuple(took.get(place, math.inf) for place in range(places[-1] + 1)), us[-1] if choice.estimated else None
        )
        self._races.add(_key(choice, machine), raced, lasts)
        return raced

    def _in_turns(self, every: Sequence[Callable[[], object]], us: list[float]) -> list[float]:
        """Their times in µs: the least of their turns, or those of their first calls where there is time for no more.

        The first has as many calls as an equal part of what is left of the budget has room for, the last as the whole
        has."""
        delays_us, first_us = len(every) * DELAY_US, us
        left, least = BUDGET_US - sum(us), [math.inf] * len(every)
        for turn in range(ROUNDS):
            rounds = int((left - delays_us) / sum(us))
            if rounds < 1:
                break
            calls = min(CALLS, math.ceil(rounds / (ROUNDS - turn)))
            us = [self._clock.time_us(one, calls) for one in every]
            left -= calls * sum(us) + delays_us
            least = list(map(min, least, us))
            fastest, second, *_ = sorted(least)
            if second > CLEAR * fastest:
                break
        return first_us if math.inf in least else least


def own_cores() -> int:
    """Cores for each of the processes that torchrun has started here, 1 at least."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdecimal() else 1))


def keeps_bits(problem: StridedProblem) -> bool:
    """Whether the kernel of a problem is not to depend on times, or not yet its own."""
    own = problem.own_score is not None or problem.shown is not None
    promised = problem.batch_invariant or problem.deterministic
    return own or promised or torch.are_deterministic_algorithms_enabled()


def foretold(choice: Choice) -> Choice:
    """With words of the race that it has still to hold."""
    if choice.estimated:
        words = f"{choice.name} races PyTorch's attention at the next eager call, and the faster runs from then on"
    else:
        others = f"{len(choice.rivals)} other kernel{'s' * (len(choice.rivals) > 1)}"
        words = f"{choice.words}; it races {others} at the next eager call, and the fastest runs from then on"
    return replace(choice, words=words)


def decided(choice: Choice, raced: Raced) -> Choice | Refusal:
    """Who runs after a race."""
    every = choice, *choice.rivals
    best = every[raced.best]
    if not raced.us:
        return replace(choice, rivals=())
    words = f"took {raced.words([one.name for one in every])} in a race on this card"
    if raced.won:
        words = f"{best.name} runs: it {words}"
        return replace(best, words=words, estimated=False, rivals=(), is_rival=False)
    return Refusal(f"{best.name} {words}")


def _key(choice: Choice, machine: str) -> tuple[object, ...]:
    """All that decides who is fastest: the size of the problem, the card and its driver, PyTorch, the kernels."""
    gpu, about = choice.gpu, size_class(choice.problem.as_searched)
    kernels = ((one.family.name, one.config.id, template_digest(one.family.name)) for one in (choice, *choice.rivals))
    return (
        tuple(sorted((name, str(value)) for name, value in about.to_dict().items())),
        (gpu.name, gpu.sm_count, gpu.arch, machine),
        torch.__version__,
        choice.estimated,
        *kernels,
    )
