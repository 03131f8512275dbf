"""What a kernel takes of a block list (`evoattn.model.block_list`), and which tiles it can have."""

from __future__ import annotations

import math
from typing import Any

from evoattn.model.block_list import blocks_of_rows, parse_blocks
from evoattn.model.launch import Buffer, KernelArg, Scalar
from evoattn.model.problem import AttentionProblem

BUFFERS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def block_list_constants(problem: AttentionProblem) -> dict[str, Any]:
    """KEY_LIST, the header in `templates/device/key_list` that says which tiles of keys a block of rows takes."""
    return {"KEY_LIST": "blocks" if problem.blocks else "none"}


def block_list_args(problem: AttentionProblem) -> tuple[KernelArg, ...]:
    """The arguments of `templates/device/key_list/blocks.cuh`, none without a block list."""
    if not problem.blocks:
        return ()
    mask, shapes = parse_blocks(problem.blocks), problem.term_shapes
    batches, heads, rows, keys = shapes["kv_indices"]
    return (
        *(Buffer(name) for name in BUFFERS),
        *(Scalar("int32", size) for size in (mask.rows, mask.keys, keys)),
        Scalar("int64", heads * rows * (batches > 1)),
        Scalar("int64", rows * (heads > 1)),
    )


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
