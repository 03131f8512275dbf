"""Gangs: blocks of a balanced schedule (`templates/flash_wgmma/key_share.cuh`) that keep step.

Where each block begins its cut tiles of rows at another tile of keys, tiles of rows that share their keys read them at
times far apart. Once these keys no longer fit in L2, every one of the tiles reads them from memory: of 61 such kernels
on an H100 half took 1.2 to 2.7 times as long as their score, as long as memory takes for that many bytes. A gang is as
many blocks as tiles of rows that lie next to one another in the order of tiles; its blocks take the same key tiles at
the same time, each for its own tile of rows."""

from dataclasses import dataclass

from evoattn.model.symbol import as_one, first, least

HELD = 0.8
"""Part of L2 up to which keys are found there again. On an H100 gangs gained nothing where 0.73 of L2 was read between,
and a fifth of the time at 0.94."""
IDLE = 6
"""Gangs leave no more of the places idle than the part that cut tiles are of all, divided by this. Keys that come from
memory for every tile of rows take up to twice as long as their products; the whole tiles gain nothing."""


def held_bytes(l2_bytes: int) -> int:
    """Bytes of keys that an L2 of `l2_bytes` is taken to hold."""
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

    @as_one
    def cut(self, blocks: int) -> int:
        """How many tiles are shared out, key tile by key tile, after each of `blocks` has taken its whole ones."""
        return self.count - max(0, self.count // blocks - 1) * blocks

    @as_one
    def bytes_between(self, blocks: int) -> int:
        """Of K and V, read by so many blocks without gangs between a cut tile of rows and the last that shares its
        keys. Each of these tiles is `cut - blocks` of `cut` parts of a pass over all cut keys behind the one before,
        as each block begins so much further on."""
        cut = self.cut(blocks)
        return self.key_bytes * max(0, least(cut, (self.sharing - 1) * (cut - blocks))) // self.count

    @as_one
    def gang(self, slots: int, l2_bytes: int) -> int:
        """Blocks of a gang, where `slots` blocks run at once: 1 where L2 holds what is read between one tile of rows
        and the last that shares its keys, or where whole gangs would leave too many places empty."""
        if self.count <= slots or self.bytes_between(slots) <= held_bytes(l2_bytes):
            return 1
        cut = self.cut(slots)

        def fits(size: int) -> bool:
            whole = self.sharing % size == 0 and self.count % size == 0
            idle = slots % size
            return whole and self.count > slots - idle and idle * IDLE * self.count <= slots * cut

        return first((least(self.sharing, slots) // self.turn * self.turn, self.turn, -self.turn), fits, 1)
