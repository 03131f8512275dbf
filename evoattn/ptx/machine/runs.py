"""Straight runs of instructions, made ready to be executed by some threads."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from evoattn.ptx.isa.control import Flow, acts, ends_run
from evoattn.ptx.isa.dispatch import Action, Operation, Prepared
from evoattn.ptx.program.kernel import Mask, parse_type
from evoattn.ptx.program.threads import ActiveThreads
from evoattn.ptx.state.context import Context, Ending


@dataclass
class Run:
    """A straight run of instructions, `start` ≤ pc < `end`."""

    start: int
    end: int
    together: list[Operation] | None
    """For all threads at once; None before they are asked for."""
    apart: dict[int, list[Action]]
    """For a part of the threads, by the registers (bits) that must stay as they are for the others."""
    written: int
    """Registers (bits) that it writes."""
    acts: bool
    """Whether it, or what ends it, does more than compute and read."""


class Runs:
    """Those of one kernel on one machine, each made when it is first entered."""

    def __init__(self, context: Context, flow: Flow) -> None:
        self.context, self.flow = context, flow
        self.instructions = context.kernel.instructions
        self._everyone = ActiveThreads(context.threads, None)
        self._prepared: dict[int, Prepared] = {}
        for pc, ins in enumerate(self.instructions):
            if not flow.understood or ins.opcode.startswith("wgmma."):  # which keeps watch from the start
                self._prepare(pc)
        flow.understood = True
        self._runs: dict[int, Run] = {}
        self._predicates: dict[int, Callable[[], Mask] | None] = {}

    def _prepare(self, pc: int) -> Prepared:
        """What the instruction at `pc` does on this machine. Raises `UnsupportedInstruction`."""
        prepared = self._prepared.get(pc)
        if prepared is None:
            entry, fields = self.flow.entries[pc]
            prepared = self._prepared[pc] = entry.prepare(self.context, self.instructions[pc], fields)
        return prepared

    def run_from(self, pc: int) -> Run:
        """The run that is entered at `pc`."""
        run = self._runs.get(pc)
        if run is None:
            end = self.flow.end_of_run(pc)
            written = 0
            for i in range(pc, end):
                written |= self.flow.writes[i]
            run = self._runs[pc] = Run(
                pc,
                end,
                None,
                {},
                written,
                any(acts(ins) for ins in self.instructions[pc : end + 1] if ins.index < end or ends_run(ins)),
            )
        return run

    def steps_together(self, run: Run) -> list[Operation]:
        """The steps for all threads at once."""
        if run.together is None:
            run.together = [self._for_all(pc) for pc in range(run.start, run.end)]
        return run.together

    def steps_apart(self, run: Run, waiting: Iterable[int]) -> list[Action]:
        """The steps for threads that run while others are to go on at the pcs `waiting`."""
        wanted = 0
        for pc in waiting:
            wanted |= self.flow.live(pc)
        wanted &= run.written
        steps = run.apart.get(wanted)
        if steps is None:
            steps = run.apart[wanted] = [*self._steps(run, wanted)]
        return steps

    def _steps(self, run: Run, wanted: int) -> Iterator[Action]:
        """As `steps_apart`: neighbours that may be run for all threads are one step."""
        together: list[Operation] = []
        for pc in range(run.start, run.end):
            if self._is_plain(pc) and not self.flow.writes[pc] & wanted:
                together.append(cast(Operation, self._prepare(pc)))
                continue
            if together:
                yield partial(_for_everyone, together)
                together = []
            yield self._step(pc)
        if together:
            yield partial(_for_everyone, together)

    def ending(self, pc: int) -> Ending:
        """What the instruction at `pc`, which ends a run, asks the scheduler to do."""
        ending = self._prepare(pc)
        assert isinstance(ending, Ending)
        return ending

    def predicate(self, pc: int) -> Mask | None:
        """For which threads the instruction at `pc` is executed, of those that come there; None for all."""
        if pc not in self._predicates:
            self._predicates[pc] = self._predicate(pc)
        read = self._predicates[pc]
        return None if read is None else read()

    def _predicate(self, pc: int) -> Callable[[], Mask] | None:
        predicate = self.instructions[pc].predicate
        if predicate is None:
            return None
        array: Mask = self.context.source(predicate[0], parse_type("pred"))
        return (lambda: ~array) if predicate[1] else (lambda: array)

    def _is_plain(self, pc: int) -> bool:
        """Whether the instruction at `pc` computes in registers, of all threads that come there."""
        return self.flow.entries[pc][0].pure and self.instructions[pc].predicate is None

    def _for_all(self, pc: int) -> Operation:
        """The instruction at `pc` for all threads together."""
        if self._is_plain(pc):
            return cast(Operation, self._prepare(pc))  # `Entry.pure` says which of the two it is
        return partial(self._step(pc), self._everyone)

    def _step(self, pc: int) -> Action:
        """The instruction at `pc` for a part of the threads; all registers stay as they are for all others."""
        prepared, predicate = self._prepare(pc), self._predicate(pc)
        pure = self.flow.entries[pc][0].pure
        action = self._masked(pc, cast(Operation, prepared)) if pure else cast(Action, prepared)
        return action if predicate is None else partial(_act_where, predicate, action)

    def _masked(self, pc: int, operation: Operation) -> Action:
        """A pure operation that changes the registers of active threads only."""
        targets = [self.context.register(name) for name in self.flow.written[pc]]

        def run(active: ActiveThreads) -> None:
            if active.mask is None:
                operation()
                return
            before = [target.copy() for target in targets]
            operation()
            for target, old in zip(targets, before):
                np.copyto(target, old, where=active.inactive)

        return run


def _for_everyone(operations: list[Operation], active: ActiveThreads) -> None:
    for operation in operations:
        operation()


def _act_where(predicate: Callable[[], Mask], action: Action, active: ActiveThreads) -> None:
    chosen = active.where(predicate())
    if chosen is not None:
        action(chosen)
