"""What orders the blocks of a launch: releases and acquires at places in global memory (PTX ISA, memory consistency
model).

A release is a store or an atomic that says so, or a strong one (an atomic, `.relaxed`, `.volatile`) after a fence of
the GPU by its own thread; a fence by a whole warp, followed by a barrier of the block, serves for the others too. An
acquire is the mirror image: an atomic or a strong load, and a fence by its thread or by one that has since met it at a
barrier. Atomics on one place continue what earlier ones released; another store ends it. What a block knows of others
is in the last columns of its warps' clocks, one per warp of the grid."""

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from evoattn.ptx.program.kernel import Kernel, Mask, Numbers
from evoattn.ptx.program.threads import WARP, ActiveThreads, Threads
from evoattn.ptx.races.happens_before import HappensBefore

_ORDERS_BLOCKS = re.compile(
    r"membar\.(?:gl|sys)|fence\.(?:sc\.|acq_rel\.)?(?:gpu|sys)"
    r"|(?:ld|st|atom|red)\.(?:acq_rel|acquire|release)\.(?:gpu|sys)"
)


@lru_cache(maxsize=16)
def orders_blocks(kernel: Kernel) -> bool:
    """Whether some instruction of the kernel can order what one block does before what another does."""
    return any(_ORDERS_BLOCKS.match(ins.opcode) for ins in kernel.instructions)


@dataclass(frozen=True)
class _Observed:
    """A strong read that no fence has followed yet."""

    warp: int
    time: int
    known: Numbers


class GlobalOrder:
    """Of one launch; `attach` gives it the clocks of the blocks that run now."""

    def __init__(self) -> None:
        self._released: dict[int, Numbers] = {}
        """By byte of the arena: what releases there hand over, by warp of the grid."""

    def attach(self, threads: Threads, order: HappensBefore) -> None:
        self.threads, self.order = threads, order
        self._first = order.clock.shape[1] - order.foreign
        self._fences: dict[int, list[tuple[Numbers, Numbers]]] = {}  # by warp: (lanes, what they knew), newest first
        self._whole: dict[
            int, tuple[list[int], list[Numbers]]
        ] = {}  # by warp: times of fences by all of it, what they knew
        self._observed: dict[int, list[_Observed]] = {}  # by block

    @property
    def known(self) -> Numbers:
        """`[warp, warp of the grid]`: up to when a warp knows what another has done."""
        return self.order.clock[:, self._first :]

    def _view(self, warp: int) -> Numbers:
        """What a warp knows now, by warp of the grid, itself included."""
        threads, order = self.threads, self.order
        view: Numbers = self.known[warp].copy()
        cluster = warp // threads.cluster_warps * threads.cluster_warps
        at = cluster + threads.first_block * threads.block_warps
        view[at : at + threads.cluster_warps] = np.maximum(
            view[at : at + threads.cluster_warps], order.clock[warp, : threads.cluster_warps]
        )
        block = warp // threads.block_warps
        own = slice(
            (block + threads.first_block) * threads.block_warps, (block + threads.first_block + 1) * threads.block_warps
        )
        view[own] = np.maximum(view[own], order.block_floor[block])
        view[warp + threads.first_block * threads.block_warps] = order.now
        return view

    # ---- what threads do

    def fence(self, active: ActiveThreads, alive: Mask) -> None:
        """A fence of the GPU by these threads; `alive` (bool over threads) are those that are left."""
        for warp in active.warps.tolist():
            block = warp // self.threads.block_warps
            for seen in self._observed.get(block, ()):
                column = seen.warp % self.threads.cluster_warps
                if seen.warp == warp or seen.time <= max(self.order.clock[warp, column], self.order.block_floor[block]):
                    np.maximum(self.known[warp], seen.known, out=self.known[warp])
            view, lanes = self._view(warp), active.by_warp[warp]
            self._fences.setdefault(warp, []).insert(0, (lanes, view))
            if (lanes | ~alive.reshape(-1, WARP)[warp]).all():
                self._fences[warp] = self._fences[warp][:1]
                times, views = self._whole.setdefault(warp, ([], []))
                times.append(self.order.now)
                views.append(view)
        self.order.now += 1

    def observe(self, thread: int, place: int, acquires: bool) -> None:
        """A strong read of a byte of the arena."""
        known = self._released.get(place)
        if known is None:
            return
        warp = thread // WARP
        if acquires:
            np.maximum(self.known[warp], known, out=self.known[warp])
            return
        self._observed.setdefault(warp // self.threads.block_warps, []).append(_Observed(warp, self.order.now, known))
        self.order.now += 1

    def publish(self, thread: int, place: int, releases: bool, continues: bool) -> None:
        """A strong write of a byte of the arena; one that `continues` (an atomic) keeps what was released there
        before."""
        own = self._view(thread // WARP) if releases else self._fenced(thread)
        before = self._released.get(place) if continues else None
        known = [part for part in (own, before) if part is not None]
        if known:
            self._released[place] = np.maximum.reduce(known)
        else:
            self._released.pop(place, None)
        self.order.now += 1

    def overwrite(self, first: int, last: int, places: Numbers) -> None:
        """Weak writes at these bytes, `first` to `last`: what was released there is gone."""
        for place in [p for p in self._released if first <= p <= last]:
            if (places == place).any():
                del self._released[place]

    def _fenced(self, thread: int) -> Numbers | None:
        """What fences before now make visible to whom sees a strong write of this thread; None without any."""
        warp, lane = divmod(thread, WARP)
        block = warp // self.threads.block_warps
        parts = [view for lanes, view in self._fences.get(warp, ()) if lanes[lane]][:1]
        for other in range(block * self.threads.block_warps, (block + 1) * self.threads.block_warps):
            times, views = self._whole.get(other, ((), ()))
            known = max(self.order.clock[warp, other % self.threads.cluster_warps], self.order.block_floor[block])
            newest = bisect_right(times, known) - 1
            if newest >= 0:
                parts.append(views[newest])
        return np.maximum.reduce(parts) if parts else None
