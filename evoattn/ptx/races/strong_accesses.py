"""Strong accesses of global memory, kept until a weak access meets them: of the sums of a kernel there may be
millions."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from evoattn.ptx.program.arrays import Mask, Numbers


@dataclass(frozen=True)
class Accesses:
    """One of each entry."""

    granules: Numbers
    threads: Numbers
    """Of the grid."""
    times: Numbers
    wrote: Mask
    numbers: Numbers
    """In the order in which they were made."""

    def take(self, chosen: Numbers | Mask) -> Accesses:
        """Those chosen by index or mask."""
        return Accesses(*(getattr(self, field.name)[chosen] for field in fields(self)))


class StrongAccesses:
    """Of one launch."""

    def __init__(self, granules: int) -> None:
        """`granules`: how many there are."""
        self._new: list[tuple[Numbers, Numbers, int, bool]] = []
        none = np.zeros(0, np.int64)
        self._sorted = Accesses(none, none, none, np.zeros(0, np.bool_), none)
        self._forgotten = np.zeros(granules, np.int64)
        """By granule: the number of the first access that counts."""
        self._count = 0

    def add(self, granules: Numbers, threads: Numbers, time: int, wrote: bool) -> None:
        """Accesses by one instruction, one of each granule and its thread."""
        self._new.append((granules, threads, time, wrote))

    def forget(self, granules: Numbers) -> None:
        """All that was done to these so far."""
        self._sort()
        self._forgotten[granules] = self._count

    def of(self, granules: Numbers) -> tuple[Numbers, Accesses]:
        """The accesses of these granules, and of each the index of its granule among them."""
        self._sort()
        first = np.searchsorted(self._sorted.granules, granules, "left")
        counts = np.searchsorted(self._sorted.granules, granules, "right") - first
        at = np.repeat(np.arange(len(granules)), counts)
        index = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(len(at))
        found = self._sorted.take(index)
        counting = found.numbers >= self._forgotten[found.granules]
        return at[counting], found.take(counting)

    def _sort(self) -> None:
        if not self._new:
            return
        sizes = [len(granules) for granules, *_ in self._new]
        total = sum(sizes)
        new = Accesses(
            np.concatenate([granules for granules, *_ in self._new]),
            np.concatenate([threads for _, threads, *_ in self._new]),
            np.repeat([time for _, _, time, _ in self._new], sizes),
            np.repeat([wrote for *_, wrote in self._new], sizes),
            np.arange(self._count, self._count + total),
        )
        self._new.clear()
        self._count += total
        both = Accesses(
            *(np.concatenate([getattr(part, f.name) for part in (self._sorted, new)]) for f in fields(Accesses))
        )
        both = both.take(both.numbers >= self._forgotten[both.granules])
        self._sorted = both.take(np.argsort(both.granules, kind="stable"))
