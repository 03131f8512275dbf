"""Accesses to shared memory, as the race detector gathers and checks them."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from evoattn.ptx.program.kernel import Instruction, Kernel, Numbers

READ, WRITE, COPY = "read", "write", "asynchronous copy"
_CHUNK = 1 << 14
"""Accesses of reads that are checked in one go: arrays that stay in the CPU's cache."""


@dataclass(frozen=True)
class Access:
    """One instruction's accesses of `size` bytes, one at each byte of `index` by the actor beside it."""

    kind: str
    index: Numbers
    size: int
    actors: Numbers
    blocks: Numbers
    """Blocks whose memory the actors may access."""
    ins: Instruction


def expand(index: Numbers, size: int, actors: Numbers, shift: int) -> tuple[Numbers, Numbers]:
    """(granule, actor) of each granule of 2^`shift` bytes that accesses of `size` bytes touch: the first granule of
    all accesses, then the second, as rows of so many numbers are made many times as fast as rows of four."""
    granules, count = index >> shift, max(size >> shift, 1)
    if count == 1:
        return granules, actors
    return (np.arange(count)[:, None] + granules).ravel(), np.concatenate([actors] * count)


class Accesses:
    """Accesses that are checked together: `granules` and `actors` of all of them, one after another."""

    def __init__(self, accesses: Sequence[Access], shift: int) -> None:
        self._accesses = accesses
        parts = [expand(a.index, a.size, a.actors, shift) for a in accesses]
        self._starts = np.cumsum([0] + [len(granules) for granules, _ in parts])
        self.granules, self.actors = parts[0]
        if len(parts) > 1:
            self.granules = np.concatenate([granules for granules, _ in parts])
            self.actors = np.concatenate([actors for _, actors in parts])

    def numbers(self, positions: Numbers) -> Numbers:
        """Which access each of these elements of `granules` belongs to."""
        return np.searchsorted(self._starts, positions, side="right") - 1

    def at(self, position: int) -> Access:
        return self._accesses[int(np.searchsorted(self._starts, position, side="right")) - 1]

    def first_of_each(self, positions: Numbers) -> list[int]:
        """The first of these elements in each access."""
        if not len(positions):
            return []
        _, first = np.unique(self.numbers(positions), return_index=True)
        return [int(position) for position in positions[first]]


def those(accesses: Sequence[Access], holds: Callable[[Numbers], bool]) -> list[Access]:
    """Accesses for whose blocks something holds; asked once for each set of blocks."""
    known: dict[int, bool] = {}
    for access in accesses:
        if id(access.blocks) not in known:
            known[id(access.blocks)] = holds(access.blocks)
    return [access for access in accesses if known[id(access.blocks)]]


def chunks(accesses: Sequence[Access]) -> Iterator[Sequence[Access]]:
    """Consecutive parts of about `_CHUNK` accesses."""
    start = total = 0
    for i, access in enumerate(accesses):
        total += len(access.index)
        if total >= _CHUNK:
            yield accesses[start : i + 1]
            start, total = i + 1, 0
    if start < len(accesses):
        yield accesses[start:]


@lru_cache(maxsize=16)
def shared_granule(kernel: Kernel) -> int:
    """The smallest access in bytes that the kernel can make to shared memory: 1, 2, 4, 8 or 16."""
    smallest = 16
    for ins in kernel.instructions:
        parts = ins.opcode.split(".")
        if parts[0] in ("ld", "st", "atom", "red") and not {"global", "param", "local", "const"} & set(parts):
            vector = next((int(p[1:]) for p in parts if p in ("v2", "v4", "v8")), 1)
            digits = "".join(c for c in parts[-1] if c.isdigit()) if "x2" not in parts[-1] else "32"
            smallest = min(smallest, vector * int(digits) // 8)
        elif parts[:2] == ["cp", "async"] and len(ins.operands) > 2 and ins.operands[2].isdigit():
            smallest = min(smallest, int(ins.operands[2]))
    return smallest


@lru_cache(maxsize=16)
def global_granule(kernel: Kernel) -> int:
    """The smallest access in bytes that the kernel can make to global memory: 1, 2, 4, 8 or 16."""
    smallest, elsewhere = 16, {"shared", "shared::cluster", "shared::cta", "param", "local", "const"}
    for ins in kernel.instructions:
        parts = ins.opcode.split(".")
        if parts[0] in ("ld", "st", "atom", "red") and not elsewhere & set(parts):
            vector = next((int(p[1:]) for p in parts if re.fullmatch("v[248]", p)), 1)
            bits = 32 if "x2" in parts[-1] else int("".join(c for c in parts[-1] if c.isdigit()))
            smallest = min(smallest, vector * bits // 8)
        elif parts[:2] == ["cp", "async"]:
            smallest = min(smallest, 2 if "tensor" in parts or len(ins.operands) > 3 else 4)
        elif parts[:2] == ["cp", "reduce"]:
            smallest = min(smallest, 4)
    return smallest
