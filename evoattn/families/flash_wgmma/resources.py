"""What the kernels of flash_wgmma take: grid, shared memory, results that blocks hand over."""

from __future__ import annotations

import math

from evoattn.families.flash_wgmma.genes import FlashWgmmaGenes
from evoattn.families.flash_wgmma.registers import WARPGROUP, warpgroups
from evoattn.families.gangs import TilesInOrder
from evoattn.families.row_blocks import batches, row_blocks
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, ROW_BYTES, group_slots
from evoattn.families.work import tensor_bytes
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem

IN_CLUSTER = (1, 2, 4)
"""Values of KEY_SPLIT whose blocks are a cluster where shared memory holds their results."""
SMEM_PER_SM, SMEM_RESERVED = 228 * 1024, 1024
"""Bytes of shared memory of an SM of sm_90, and of them those that a block takes for the system."""
HEADS_IN_TURN = {"by_head": 1, "heads_4": 4, "heads_8": 8, "heads_16": 16, "all_heads": 0}
L2_LINE = 128
O_CHUNK_PLACES = 2
"""64-column output buffers per warpgroup, with STORE=chunks."""
TILE_WORDS, SEQUENCE_TILE_WORDS = 4, 8
"""Words of the tile descriptor: row block, head, batch and key tiles of the next tile of rows; also where its sequence
lies."""


def is_persistent(genes: FlashWgmmaGenes) -> bool:
    return genes.SCHEDULE != "single"


def chunks_of(dim: int) -> int:
    """64-column chunks of a row."""
    return math.ceil(dim / CHUNK_COLUMNS)


def cluster_blocks(problem: AttentionProblem, genes: FlashWgmmaGenes) -> int:
    """Blocks of a cluster: those of KEY_SPLIT, if they are few and their results fit beside the tiles of a block."""
    split = genes.KEY_SPLIT
    if split == 1 or split not in IN_CLUSTER or genes.PART_TILES:
        return 1
    needed = _tile_bytes(problem, genes) + _handed_over_bytes(problem, genes, split) + SMEM_RESERVED
    return split if genes.BLOCKS_PER_SM * needed <= SMEM_PER_SM else 1


def merges_in_memory(problem: AttentionProblem, genes: FlashWgmmaGenes) -> bool:
    """Whether the blocks of KEY_SPLIT add up their results in global memory."""
    return cluster_blocks(problem, genes) < genes.KEY_SPLIT


def parts(problem: AttentionProblem, genes: FlashWgmmaGenes) -> int:
    """Of all keys, those whose sums are made by themselves."""
    tiles = math.ceil(problem.seqlen_k / genes.BLOCK_N)
    return math.ceil(tiles / genes.PART_TILES) if genes.PART_TILES else 1


def parts_bytes(problem: AttentionProblem, genes: FlashWgmmaGenes, gpu: GpuSpec) -> int:
    """Where the blocks of KEY_SPLIT=1 keep the sum of the parts so far, a result for each warpgroup; 0 where all keys
    are one part."""
    if parts(problem, genes) == 1 or genes.KEY_SPLIT > 1:
        return 0
    return math.prod(grid(problem, genes, gpu)) * warpgroups(genes) * result_bytes(problem)


def merge_words(problem: AttentionProblem, genes: FlashWgmmaGenes) -> int:
    """Words by which the blocks of a tile of rows tell one another that results are there: one for each part of the
    columns that is added up by itself, for each warpgroup (`merge_rows` in the template)."""
    return warpgroups(genes) * min(genes.KEY_SPLIT, problem.head_dim_v // 8)


def result_bytes(problem: AttentionProblem) -> int:
    """What a warpgroup hands to another one: O before the division, shifts and sums, head_dim of V / 2 + 4 floats per
    thread."""
    return WARPGROUP * (problem.head_dim_v // 2 + 4) * 4


def smem_bytes(problem: AttentionProblem, genes: FlashWgmmaGenes) -> int:
    """Dynamic shared memory of a block: its tiles, and results of the other blocks of its cluster."""
    return _tile_bytes(problem, genes) + _handed_over_bytes(problem, genes, cluster_blocks(problem, genes))


def _handed_over_bytes(problem: AttentionProblem, genes: FlashWgmmaGenes, blocks: int) -> int:
    """Of the results that a block of a cluster of so many takes from the others."""
    return (blocks - 1) * warpgroups(genes) * result_bytes(problem)


def _tile_bytes(problem: AttentionProblem, genes: FlashWgmmaGenes) -> int:
    """Q, the rings of K and V, O or some chunks of it if the next Q loads before O has left, barriers, what the
    producer says of two tiles."""
    chunks, value_chunks = chunks_of(problem.head_dim), chunks_of(problem.head_dim_v)
    o_chunks = (O_CHUNK_PLACES if genes.STORE == "chunks" else value_chunks) if is_persistent(genes) else 0
    tile_words = SEQUENCE_TILE_WORDS if problem.varlen or problem.seqused else TILE_WORDS
    q_bytes = genes.BLOCK_M * ROW_BYTES * (chunks if o_chunks else max(chunks, value_chunks))
    kv_bytes = genes.STAGES * genes.BLOCK_N * ROW_BYTES * (chunks + value_chunks)
    o_bytes = o_chunks * genes.BLOCK_M * ROW_BYTES
    barriers = 8 * (2 * warpgroups(genes) + 4 * genes.STAGES + 1)
    return q_bytes + kv_bytes + o_bytes + barriers + 2 * tile_words * 4


def row_tiles(problem: AttentionProblem, genes: FlashWgmmaGenes) -> tuple[int, int]:
    """(tiles of rows, heads of all batches that have so many each): heads of Q, or of K and V with GROUP_ROWS."""
    if genes.GROUP_ROWS:
        return row_blocks(problem, genes.BLOCK_M, group_slots(problem)), problem.kv_heads * batches(problem)
    return row_blocks(problem, genes.BLOCK_M), problem.heads * batches(problem)


def tiles_in_order(problem: AttentionProblem, genes: FlashWgmmaGenes) -> TilesInOrder:
    """The tiles of rows. Tiles next to one another share keys where they are of one head, or of a group of heads;
    where a line of L2 has rows of K of several heads, the lines."""
    rows, heads = row_tiles(problem, genes)
    turn, own = HEADS_IN_TURN[genes.TILE_ORDER], heads // batches(problem)
    _, head_stride, row_stride, _ = problem.strides("k")
    row_bytes = problem.head_dim * problem.element_bytes
    lines = problem.kv_heads > 1 and head_stride < row_stride and row_bytes % L2_LINE > 0
    near = own if lines else own // problem.kv_heads
    return TilesInOrder(
        rows * heads, int(tensor_bytes(problem, "k", "v")), rows * math.lcm(turn, near) if turn else near, max(1, turn)
    )


def gang_size(problem: AttentionProblem, genes: FlashWgmmaGenes, gpu: GpuSpec) -> int:
    """Blocks that keep step; 1 but for a balanced schedule."""
    if genes.SCHEDULE != "balanced":
        return 1
    return tiles_in_order(problem, genes).gang(gpu.sm_count * genes.BLOCKS_PER_SM, gpu.l2_bytes)


def grid(problem: AttentionProblem, genes: FlashWgmmaGenes, gpu: GpuSpec) -> tuple[int, int, int]:
    """Blocks: one wave if they are persistent, else KEY_SPLIT per tile of rows, in the dimensions that `block_tile.cuh`
    reads.

    Blocks of a balanced schedule are (those of a gang, gangs) and fewer than the tiles of rows, so that even a small
    problem has tiles that two blocks share.
    """
    rows, heads = row_tiles(problem, genes)
    if is_persistent(genes):
        tiles, slots = rows * heads, gpu.sm_count * genes.BLOCKS_PER_SM
        if genes.SCHEDULE != "balanced":
            return min(tiles, slots), 1, 1
        gang = gang_size(problem, genes, gpu)
        return gang, max(1, min(tiles - 1, slots // gang)), 1
    turn, split = HEADS_IN_TURN[genes.TILE_ORDER], genes.KEY_SPLIT
    if turn == 0:
        return heads // batches(problem) * split, batches(problem), rows
    if turn == 1:
        return rows * split, heads // batches(problem), batches(problem)
    return turn * split, rows, math.ceil(heads / turn)
