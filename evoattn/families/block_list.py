"""What a kernel takes of a block list (`evoattn.model.block_list`), and which tiles it can have."""

import math
from typing import Any, NamedTuple

from evoattn.families.given import Given, number, tensor
from evoattn.families.residency import WARP
from evoattn.model.backward import BACKWARD
from evoattn.model.block_list import blocks_of_rows, parse_blocks
from evoattn.model.gpu import MAX_GRID_YZ
from evoattn.model.launch import NULL, Buffer, KernelArg
from evoattn.model.problem import AttentionProblem
from evoattn.model.score import cost, depends_on

BUFFERS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
BITS = "mask_bits"
"""The scratch buffer of what the predicate says in PARTIAL blocks, a bit each."""
MOST_BIT_BYTES, LEAST_ROOM = 1 << 28, 8
"""More is not kept, and bits of no fewer blocks of a list: heads ask the predicate of others themselves."""
BIT_LINE = 128
"""Bits of a load: rows of them are whole multiples."""
STATES = "block_states"
"""The scratch buffer of what each block is, which blocks of keys read column by column."""
READ_BIT = 2.0
"""Instructions of a head for each pair whose answer is a bit."""


class Packed(NamedTuple):
    """The shape of `BITS`: one answer for so many batches and heads, of all rows of whole blocks, and of each the keys
    of so many PARTIAL blocks of its list; of the backward pass, whose blocks have keys, of all keys the rows."""

    batches: int
    heads: int
    rows: int
    row_words: int

    @property
    def bytes(self) -> int:
        return 4 * math.prod(self)


def packed_mask(problem: AttentionProblem) -> Packed | None:
    """The bits that a launch before the kernel makes; None where heads ask the predicate themselves, as it is cheap,
    few share its answers, or there are none or too many."""
    if problem.shown is None:
        return None
    mask = parse_blocks(problem.blocks)
    if not (mask.documents or mask.counts[0]):
        return None
    rows, keys = (n * size for n, size in zip(mask.blocks(problem.band), (mask.rows, mask.keys), strict=True))
    batches = problem.batch if mask.by_batch or depends_on(problem.shown, "b") else 1
    heads = problem.heads if mask.by_head or depends_on(problem.shown, "h") else 1
    by_keys = problem.op == BACKWARD.name
    room = keys // mask.keys
    if not by_keys:
        whole_lines = BIT_LINE // math.gcd(BIT_LINE, mask.keys)
        most = 8 * MOST_BIT_BYTES // (batches * heads * rows * mask.keys) // whole_lines * whole_lines
        room = min(room, max(LEAST_ROOM, most), mask.room or room)
    lines, bits = (keys, rows) if by_keys else (rows, room * mask.keys)
    found = Packed(batches, heads, lines, 4 * math.ceil(bits / BIT_LINE))
    sharers, asked = problem.batch * problem.heads / (batches * heads), cost(problem.shown)[2] + 1
    too_many = found.bytes > MOST_BIT_BYTES or batches * heads > MAX_GRID_YZ
    saves = sharers * (asked - READ_BIT) > asked + READ_BIT
    whole = mask.keys % WARP == 0 and (not by_keys or mask.rows % WARP == 0)
    return found if saves and not too_many and whole else None


def block_list_constants(problem: AttentionProblem) -> dict[str, Any]:
    """KEY_LIST, the header in `templates/device/key_list` that says which tiles of keys a block of rows takes."""
    return {"KEY_LIST": "blocks" if problem.blocks else "none"}


def list_given(problem: AttentionProblem, packs: bool = True) -> list[Given]:
    """The fields of `KeyList` in `templates/device/key_list/blocks.cuh`, none without a block list; `packs`: with bits,
    if there are any."""
    if not problem.blocks:
        return []
    mask, shapes = parse_blocks(problem.blocks), problem.term_shapes
    batches, heads, rows, keys = shapes["kv_indices"]
    bits = packed_mask(problem) if packs else None
    words = bits.rows * bits.row_words if bits else 0
    of_bits: KernelArg = Buffer(BITS) if bits else NULL
    return [
        *(tensor("const int", name, name) for name in BUFFERS),
        number("int", "list_block_rows", mask.rows),
        number("int", "list_block_keys", mask.keys),
        number("int", "list_key_blocks", keys),
        number("int64_t", "list_batch_stride", heads * rows * (batches > 1)),
        number("int64_t", "list_head_stride", rows * (heads > 1)),
        Given("uint32_t*", "list_bits", of_bits),
        number("int64_t", "bits_batch_stride", bits.heads * words * (bits.batches > 1) if bits else 0),
        number("int64_t", "bits_head_stride", words * (bits.heads > 1) if bits else 0),
        number("int", "bits_row_words", bits.row_words if bits else 0),
    ]


def states_given(problem: AttentionProblem, packs: bool = True) -> list[Given]:
    """The fields of `BlockStates` in `templates/device/backward/block_states_blocks.cuh`, none without a block list."""
    if not problem.blocks:
        return []
    states = Given("uint8_t*", "block_states", Buffer(STATES))
    rows = number("int", "list_row_blocks", problem.term_shapes["kv_num_blocks"][2])
    return [*list_given(problem, packs), states, rows]


def block_state_bytes(problem: AttentionProblem) -> dict[str, int]:
    """The scratch of these, a byte for each block."""
    return {STATES: math.prod(problem.term_shapes["kv_indices"])} if problem.blocks else {}


def why_not_listed(problem: AttentionProblem, rows: int, keys: int) -> str | None:
    """Why tiles of `rows` (BLOCK_M) and `keys` (BLOCK_N) are not parts of the blocks, in one sentence."""
    if not problem.blocks:
        return None
    mask = parse_blocks(problem.blocks)
    for name, tile, block, what in (("BLOCK_M", rows, mask.rows, "rows"), ("BLOCK_N", keys, mask.keys, "keys")):
        if block % tile:
            return f"{name}={tile} does not divide the {block} {what} of a listed block."
    return None


def listed_row_steps(problem: AttentionProblem, rows: int, keys: int) -> tuple[float, int, int]:
    """As `work.row_steps`, of a problem with a block list."""
    mask = parse_blocks(problem.blocks)
    mean, most = blocks_of_rows(*problem.block_mask)
    tiles = max(1, mask.keys // keys)
    return mean * tiles, most * tiles, math.ceil(problem.seqlen_q / rows)
