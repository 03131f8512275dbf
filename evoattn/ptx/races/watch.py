"""All race detectors of one machine; and who accesses the shared memory of other blocks of its cluster: those blocks
must live until all that is done."""

from dataclasses import dataclass

import numpy as np

from evoattn.ptx.errors import MemoryFault
from evoattn.ptx.program.kernel import Instruction, Mask, Numbers
from evoattn.ptx.program.threads import ActiveThreads, Threads
from evoattn.ptx.races.async_proxy import AsyncRaces
from evoattn.ptx.races.global_accesses import GlobalRaces
from evoattn.ptx.races.happens_before import HappensBefore
from evoattn.ptx.races.shared_accesses import SharedRaces


@dataclass(frozen=True)
class Races:
    """They share the clocks of `shared`. `grid` goes on from one batch of blocks to the next, the others do not."""

    shared: SharedRaces
    proxy: AsyncRaces
    grid: GlobalRaces

    @property
    def order(self) -> HappensBefore:
        return self.shared.order

    def synchronize(self) -> HappensBefore:
        """The clocks, for a synchronization that happens now."""
        return self.shared.synchronize()

    def faults(self) -> list[str]:
        """A sentence for each racing instruction: those of shared memory first, in the order of the program."""
        self.shared.check()
        return [text for found in (self.shared.found, self.grid.found) for _, text in sorted(found.items())]


class RemoteAccesses:
    """Accesses from block to block of one machine."""

    def __init__(self, threads: Threads, stride: int, alive: Mask, races: SharedRaces | None) -> None:
        """`stride` is the bytes of shared memory per block; `alive` (bool over threads) is kept up to date by
        others."""
        self.threads, self.stride, self.alive, self.races = threads, stride, alive, races
        self._last: dict[tuple[int, int], tuple[int, Instruction]] = {}  # by target block and column of the clock

    def note(self, index: Numbers, kind: str | None, active: ActiveThreads, ins: Instruction) -> None:
        """Accesses at bytes `index` of shared memory; of no `kind`: others see that they are complete. Raises
        `MemoryFault`."""
        target = index // self.stride
        foreign = target != self.threads.block_of[active.index]
        if not foreign.any():
            return
        living: Mask = np.logical_or.reduce(self.alive.reshape(self.threads.block_count, -1), axis=1)
        if not living[target].all():
            bad = int(np.flatnonzero(~living[target])[0])
            raise MemoryFault(
                f"{self.threads.describe(active.index[bad])} accesses the shared memory of block "
                f"{target[bad] + self.threads.first_block} of its cluster, which has ended, in {ins}."
            )
        if self.races is not None and kind is not None:
            columns = self.threads.warp_of[active.index] % self.threads.cluster_warps
            for block, column in set(zip(target[foreign].tolist(), columns[foreign].tolist())):
                self._last[block, column] = self.races.order.now, ins

    def retire(self, blocks: Numbers) -> None:
        """All threads of these blocks have exited: they must have known of every access to their memory."""
        if self.races is None:
            return
        for (block, column), (time, ins) in list(self._last.items()):
            if block in blocks:
                warps = np.arange(block * self.threads.block_warps, (block + 1) * self.threads.block_warps)
                if time > self.races.order.known_by_any(warps, column):
                    who = self.races.actors.name_of_column(column)
                    self.races.report(
                        ins, f"block {block + self.threads.first_block} may end before {who} accesses its memory"
                    )
                del self._last[block, column]
