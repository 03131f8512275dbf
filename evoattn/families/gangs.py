"""Gangs: blocks of a balanced schedule (`templates/device/schedule/key_share.cuh`) that keep step.

Where each block begins its cut tiles of rows at another tile of keys, tiles of rows that share their keys read them at
times far apart. Once these keys no longer fit in L2, every one of the tiles reads them from memory: of 61 such kernels
on an H100 half took 1.2 to 2.7 times as long as their score, as long as memory takes for that many bytes. A gang is as
many blocks as tiles of rows that lie next to one another in the order of tiles; its blocks take the same key tiles at
the same time, each for its own tile of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

HELD = 0.7
"""Part of L2 up to which keys that are read again are found there: kernels of the campaigns lose nothing up to 0.75 of
L2 on an H100, and half of them a fifth or more from twice its size on."""
LEAST_BLOCKS = 5, 6
"""At least so large a part of the blocks that run at once is in gangs; others would be idle. To read keys from memory
for every tile of rows takes twice as long as to multiply them, or more."""


def held_bytes(l2_bytes: int) -> int:
    return int(HELD * l2_bytes)


@dataclass(frozen=True)
class TilesInOrder:
    """Tiles of rows in the order in which blocks take them."""

    count: int
    key_bytes: int
    """Of all K and V."""
    sharing: int
    """Tiles, one after another, of which some share keys, or lines of memory, with others of the same so many."""
    turn: int = 1
    """Heads that take turns in them: so many neighbours are of different heads."""

    def cut(self, blocks: int) -> int:
        """The tiles that so many blocks share out after their whole ones."""
        return self.count - max(0, self.count // blocks - 1) * blocks

    def gang(self, slots: int, l2_bytes: int) -> int:
        """Blocks of a gang: 1 where L2 holds the keys, or where whole gangs would leave too many places empty."""
        if self.count <= slots or self.key_bytes * self.cut(slots) <= held_bytes(l2_bytes) * self.count:
            return 1
        part, of = LEAST_BLOCKS
        for size in range(min(self.sharing, slots) // self.turn * self.turn, self.turn, -self.turn):
            whole = self.sharing % size == 0 and self.count % size == 0
            gangs = slots // size
            if whole and gangs * size * of >= slots * part and self.count > gangs * size:
                return size
        return 1
