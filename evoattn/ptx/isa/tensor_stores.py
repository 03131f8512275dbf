"""Tensor stores that may still read shared memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.state.context import Context


@dataclass
class _StoreGroups:
    """Tensor stores of one thread whose shared memory it has not yet waited for: the times of its groups, and whether
    one is open.
    """

    committed: list[int] = field(default_factory=list)
    open: bool = False


class TensorStores:
    """Tensor stores of one machine that may still read shared memory, by thread."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.groups: dict[int, _StoreGroups] = {}
        self._last: Instruction | None = None
        if context.races is not None:
            context.at_exit.append(self._leave)

    def issue(self, thread: int, ins: Instruction) -> None:
        self.groups.setdefault(thread, _StoreGroups()).open = True
        self._last = ins

    def commit(self, active: ActiveThreads) -> None:
        order = None if self.context.races is None else self.context.races.synchronize()
        for thread in active.index.tolist():
            groups = self.groups.setdefault(thread, _StoreGroups())
            groups.committed.append(0 if order is None else order.now)
            groups.open = False
        if order is not None:
            order.now += 1

    def wait(self, active: ActiveThreads, pending: int) -> None:
        for thread in active.index.tolist():
            groups = self.groups.get(thread)
            if groups is None or len(groups.committed) <= pending:
                continue
            last = groups.committed[len(groups.committed) - pending - 1]
            del groups.committed[: len(groups.committed) - pending]
            if self.context.races is not None:
                races, warp = self.context.races, thread // WARP
                left = self.context.alive.reshape(-1, WARP)[warp]
                races.synchronize().learn_alone(thread, left, races.proxy.stores(warp), last)

    def _leave(self, active: ActiveThreads) -> None:
        """Shared memory may be another block's as soon as a block has exited."""
        races = self.context.races
        if races is None or self._last is None:
            return
        for thread, groups in self.groups.items():
            if (groups.open or groups.committed) and active.full_mask[thread]:
                who = self.context.threads.describe(thread)
                races.shared.report(self._last, f"{who} exits before its tensor store has read its memory")


def tensor_stores(context: Context) -> TensorStores:
    return context.cached("tensor stores", lambda: TensorStores(context))
