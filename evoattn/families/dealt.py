"""Tiles of rows that a fixed schedule deals to its blocks in turn (`templates/flash_wgmma/block_tile.cuh`), where
sequences have lengths of their own, or rows lists of keys: some tiles have no rows, or few keys, and no block takes
another's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from evoattn.families.block_list import listed_row_steps
from evoattn.model.problem import AttentionProblem
from evoattn.model.sequences import starts


def row_blocks(problem: AttentionProblem, rows: int, rows_per_query: int = 1) -> int:
    """Tiles of `rows` rows of one head of one of `batches`; a query may have several rows.

    Of packed sequences, slots for all of them: as many as `templates/device/schedule/sequences.cuh` counts, of which
    each sequence leaves at most one empty."""
    if problem.varlen:
        return problem.shape("q")[2] * rows_per_query // rows + problem.batch
    return math.ceil(problem.seqlen_q * rows_per_query / rows)


def batches(problem: AttentionProblem) -> int:
    """Batches of the grid: packed sequences are one."""
    return 1 if problem.varlen else problem.batch


if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_ROUNDS = 64
"""Tiles of a block, on average, from which on what blocks get is nearly the same."""


@dataclass(frozen=True)
class DealtTo:
    """What the places of a card get."""

    steps: float
    """Tiles of keys of the block that has most."""
    tiles: int
    """Tiles of rows of that block."""
    steps_of_sm: float
    """Tiles of keys of all blocks of the SM that has most."""


UNEVEN_PACE, EVEN = 1.1, 1.25
"""By what a fixed schedule takes longer over lists whose longest rows see more than so many times the mean, beside what
its most busy block has: on an H100 1.07 to 1.33 times as long as claimed tiles over documents of 8,192 to 32,768 keys,
and 0.97 to 1.02 where rows see more and more."""


@dataclass(frozen=True)
class DealtTiles:
    """The tiles of all heads, in the order of `templates/device/schedule/tile_order.cuh`."""

    problem: AttentionProblem
    rows: int
    keys: int
    rows_per_query: int
    heads: int
    """Of all batches; packed sequences are one."""
    turn: int
    """Heads that take turns; 0: all."""

    def to(self, blocks: int, sm_count: int) -> DealtTo | None:
        """What each of so many blocks gets, a whole number of them on each SM; None where each has one tile or none, or
        more than MOST_ROUNDS."""
        return _dealt(self, blocks, sm_count)


@lru_cache(maxsize=512)
def _dealt(tiles: DealtTiles, blocks: int, sm_count: int) -> DealtTo | None:
    import numpy as np  # here: it takes longer to import than all of this room

    steps = _steps(tiles)  # [batches, row blocks], -1 where there is no tile
    batches, row_blocks = steps.shape
    rounds = -(-tiles.heads * row_blocks // blocks)
    if rounds < 2 or rounds > MOST_ROUNDS:
        return None
    index = np.arange(tiles.heads * row_blocks)
    turn = tiles.turn or tiles.heads
    first_head = index // (turn * row_blocks) * turn
    in_turn = index - first_head * row_blocks
    taking_turns = np.minimum(turn, tiles.heads - first_head)
    row_block, head = in_turn // taking_turns, first_head + in_turn % taking_turns
    causal = tiles.problem.masking.causal or bool(tiles.problem.blocks)  # LAST_FIRST of the kernels
    dealt = np.full(rounds * blocks, -1.0)
    dealt[: len(index)] = steps[head * batches // tiles.heads, row_blocks - 1 - row_block if causal else row_block]
    dealt = dealt.reshape(rounds, blocks)
    if causal:
        dealt[1::2] = dealt[1::2, ::-1]
    of_block = dealt.clip(0).sum(0)
    longest = int(of_block.argmax())
    sms = of_block if blocks % sm_count else of_block.reshape(-1, sm_count).sum(0)
    return DealtTo(float(of_block[longest]), int((dealt[:, longest] >= 0).sum()), float(sms.max()))


@lru_cache(maxsize=128)
def _steps(tiles: DealtTiles) -> NDArray[np.float64]:
    """Tiles of keys of each tile of rows, [batches, row blocks]; -1 where there is none. Of block lists only mean and
    most are known: rows are taken to see up to the most, in no order."""
    import numpy as np

    problem, rows = tiles.problem, tiles.rows
    if problem.blocks:
        mean, most, _ = listed_row_steps(problem, rows, tiles.keys)
        count = row_blocks(problem, rows, tiles.rows_per_query)
        seen: NDArray[np.float64] = most * ((np.arange(count) + 0.5) / count) ** (most / max(mean, 1e-3) - 1)
        return np.random.default_rng(0).permutation(seen)[None] * (UNEVEN_PACE if most > EVEN * mean else 1)
    queries, keys = np.array(problem.sequences).T
    if problem.varlen:
        tile = np.arange(row_blocks(problem, rows, tiles.rows_per_query))
        first = np.array(starts(tuple(queries))[:-1]) * tiles.rows_per_query // rows + np.arange(len(queries))
        sequence = np.searchsorted(first, tile, "right") - 1
        tile -= first[sequence]
        queries, keys = queries[sequence][None], keys[sequence][None]
    else:
        tile = np.arange(-(-problem.seqlen_q * tiles.rows_per_query // rows))
        queries, keys = queries[:, None], keys[:, None]
    begin = tile * rows // tiles.rows_per_query
    end = np.minimum(-(-(tile + 1) * rows // tiles.rows_per_query), queries)
    band = problem.masking.band(queries, keys)
    low = 0 if band.lowest is None else np.maximum(0, begin + band.lowest)
    high = keys if band.highest is None else np.minimum(keys, end + band.highest)
    visited = -(-high // tiles.keys) - low // tiles.keys
    return np.where(begin < queries, np.where(high > low, visited, 0), -1).astype(np.float64)
