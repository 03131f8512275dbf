"""Tensor stores and bulk sums that may still read shared memory, and sums that are not yet added up.

A device adds up between the asking and the end of its thread's wait for it. Here that is at once, or, with
`late_blocks`, as late as may be: a block that tells others too early has its sums behind theirs then, and bits differ.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.state.context import Context

LATE = 3
"""Every third block adds up late: of sums of two, bits are the same in either order."""


@dataclass
class _StoreGroups:
    """Of one thread: the times of its groups whose shared memory it has not yet waited for, whether one is open, how
    many it has ended, and sums that are not yet added up, each with its group."""

    committed: list[int] = field(default_factory=list)
    open: bool = False
    ended: int = 0
    sums: list[tuple[int, Callable[[], None]]] = field(default_factory=list)

    def add_up(self, groups: int | None = None) -> None:
        """The sums of the first so many groups, or all."""
        while self.sums and (groups is None or self.sums[0][0] < groups):
            self.sums.pop(0)[1]()


class TensorStores:
    """Tensor stores of one machine that may still read shared memory, by thread."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.groups: dict[int, _StoreGroups] = {}
        self._last: Instruction | None = None
        context.at_exit.append(self._leave)

    def issue(self, thread: int, ins: Instruction, add: Callable[[], None] | None = None) -> None:
        """A thread asks for a store, or for a sum, which `add` carries out."""
        groups = self.groups.setdefault(thread, _StoreGroups())
        groups.open = True
        if add is not None and self._is_late(thread):
            groups.sums.append((groups.ended, add))
        elif add is not None:
            add()
        self._last = ins

    def _is_late(self, thread: int) -> bool:
        return self.context.late_blocks and int(self.context.threads.block_of[thread]) % LATE == 0

    def commit(self, active: ActiveThreads) -> None:
        order = None if self.context.races is None else self.context.races.synchronize()
        for thread in active.index.tolist():
            groups = self.groups.setdefault(thread, _StoreGroups())
            groups.committed.append(0 if order is None else order.now)
            groups.open = False
            groups.ended += 1
        if order is not None:
            order.now += 1

    def wait(self, active: ActiveThreads, pending: int, whole: bool) -> None:
        """For all groups but the newest `pending`: until they are done, `whole`, or have read."""
        for thread in active.index.tolist():
            groups = self.groups.get(thread)
            if groups is not None and whole:
                groups.add_up(groups.ended - pending)
            if groups is None or len(groups.committed) <= pending:
                continue
            last = groups.committed[len(groups.committed) - pending - 1]
            del groups.committed[: len(groups.committed) - pending]
            if self.context.races is not None:
                races, warp = self.context.races, thread // WARP
                left = self.context.alive.reshape(-1, WARP)[warp]
                races.synchronize().learn_alone(thread, left, races.proxy.stores(warp), last)

    def _leave(self, active: ActiveThreads) -> None:
        """Sums are added up; shared memory may be another block's as soon as a block has exited."""
        races = self.context.races
        for thread, groups in self.groups.items():
            if not active.full_mask[thread]:
                continue
            groups.add_up()
            if races is not None and self._last is not None and (groups.open or groups.committed):
                who = self.context.threads.describe(thread)
                races.shared.report(self._last, f"{who} exits before its tensor store has read its memory")


def tensor_stores(context: Context) -> TensorStores:
    return context.cached("tensor stores", lambda: TensorStores(context))
