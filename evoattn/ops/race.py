"""A race: the pick beside what PyTorch would run, once for a problem on a card where such picks were not measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from evoattn.backends.versions import template_digest
from evoattn.ops import torch_answer
from evoattn.ops.call import Call
from evoattn.ops.choice import Choice
from evoattn.portfolio.canonical import size_class
from evoattn.portfolio.wins import Raced, Races

BUDGET_US = 30_000.0
"""Of GPU time for a race."""
CALLS, ROUNDS = 5, 2
"""Calls of each that are timed in a row, and how often they take turns. A race of long calls has fewer."""
LEAST_ROOM = 3
"""Answers that there must be memory for: of both, and what PyTorch writes beside its own."""
TOO_LONG = "a race would take more than 30 ms of the GPU"
NO_MEMORY = "the device has no memory left for a race"
IN_CAPTURE = "no kernel was raced yet and a CUDA graph is being captured; call the model once before"
COMPILED = "no kernel was raced yet and compiled code does not race; call evoattn.attention once before"
DELAY_CYCLES = 1_000_000
"""Half a millisecond in which calls are enqueued: what is timed is the GPU, not the CPU that feeds it."""
DELAYS_US = 2 * (1 + ROUNDS) * 1000.0
"""All delays of a race at a clock of 1 GHz, which cards exceed."""


class Clock(Protocol):
    """How races are timed. Tests put another one in its place."""

    def time_us(self, run: Callable[[], object], count: int) -> float:
        """Device time in µs of each of `count` calls in a row on the current stream; waits for it."""
        ...

    def room(self, index: int) -> int:
        """Bytes of a device that can be allocated."""
        ...


class CudaClock:
    """CUDA events behind a delay."""

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

    def __init__(self, races: Races, clock: Clock) -> None:
        self._races, self._clock = races, clock

    def known(self, choice: Choice, machine: str) -> Raced | None:
        """What the race of this kernel on such a problem came to. `machine`: product and driver."""
        return self._races.find(_key(choice, machine))

    def why_not(self, choice: Choice, call: Call) -> str:
        """Why this call is none to race with; empty if it is one. Whether a graph is being captured is not asked."""
        problem, gpu = choice.problem, choice.gpu
        if call.compiled:
            return COMPILED
        if 4 * gpu.floor_us(problem.flops, problem.bytes, problem.dtype) > BUDGET_US:  # warm and timed, both
            return TOO_LONG
        query, value = call.query, call.value
        answer = query.numel() // query.shape[-1] * value.shape[-1] * query.element_size()
        return NO_MEMORY if self._clock.room(query.get_device()) < LEAST_ROOM * answer else ""

    def hold(self, choice: Choice, machine: str, call: Call, run: Callable[[], str]) -> Raced | str:
        """Both in turns: `run` enqueues the kernel and says why it did not. A reason where there is no result, which
        is not kept then."""
        theirs = replace(call, out=None, strict=False)
        failed = list[str]()

        def kernel() -> None:
            if reason := run():
                failed.append(reason)

        def by_torch() -> object:
            return torch_answer.answer(theirs)

        try:
            with torch.no_grad():
                kernel()
                if failed:
                    return failed[0]
                by_torch()  # what loads and compiles at first use
                us, torch_us = (self._clock.time_us(one, 1) for one in (kernel, by_torch))
                left = BUDGET_US - DELAYS_US - 2 * (us + torch_us)
                calls = min(CALLS, int(left / (ROUNDS * (us + torch_us) + 1e-9)))
                for _ in range(ROUNDS if calls > 0 else 0):
                    us = min(us, self._clock.time_us(kernel, calls))
                    torch_us = min(torch_us, self._clock.time_us(by_torch, calls))
        except Exception as error:  # no memory, an argument that PyTorch refuses …: the call itself says it again
            words = str(error).strip().splitlines() or [type(error).__name__]
            return f"the race failed: {words[0].rstrip('.')}"
        if failed:
            return failed[0]
        raced = Raced(us, torch_us)
        self._races.add(_key(choice, machine), raced)
        return raced


def _key(choice: Choice, machine: str) -> tuple[object, ...]:
    """All that decides who is faster: the size of the problem, the card and its driver, PyTorch, the kernel."""
    gpu, family = choice.gpu, choice.family.name
    about = size_class(choice.problem.as_searched)
    return (
        tuple(sorted((name, str(value)) for name, value in about.to_dict().items())),
        (gpu.name, gpu.sm_count, gpu.arch, machine),
        torch.__version__,
        (family, choice.config.id, template_digest(family)),
    )
