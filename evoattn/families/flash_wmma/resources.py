"""The genes of flash_wmma, and what they take: threads, shared memory, registers, work."""

import math
from typing import Literal

from evoattn.families.genes import Genes, gene
from evoattn.families.residency import WARP, register_cap
from evoattn.families.tensor_tiles import ELEMENT_BYTES
from evoattn.families.work import LaunchWork, Step, bank_conflicts, blocks_of_sequence, row_steps, tensor_bytes
from evoattn.model.problem import AttentionProblem


class FlashWmmaGenes(Genes):
    """The parameters of flash_wmma."""

    BLOCK_M: int = gene("query rows per block", (16, 32, 48, 64, 80, 96, 112, 128))
    BLOCK_N: int = gene("keys per tile", (16, 32, 48, 64, 96, 128))
    ROW_WARPS: int = gene("warps that share the rows of a block, in tiles of 16", (1, 2, 3, 4, 5, 6, 7, 8))
    COLUMN_WARPS: int = gene("warps that share the columns of S and of O of the same rows", (1, 2, 3, 4))
    THREADS_PER_ROW: int = gene("lanes that share a row in the softmax", (2, 4, 8, 16, 32))
    STAGES: int = gene(
        "tiles of K and V in shared memory; with 1, V is copied during QKᵀ and the next K during PV", (1, 2, 3)
    )
    COPY: Literal["async", "registers"] = gene("K, V and Q are copied by cp.async, or through registers")
    PADDING_BYTES: int = gene("bytes after each row in shared memory, against bank conflicts", (0, 16, 32))
    Q_PLACE: Literal["shared", "fragments"] = gene(
        "Q is read from shared memory for every tile, or once into fragments"
    )
    O_PLACE: Literal["fragments", "shared"] = gene(
        "O stays in fragments, whose rows are found out once through shared memory, or in shared memory between "
        "products"
    )
    BLOCKS_PER_SM: int = gene("blocks that registers and shared memory leave room for on one SM", (1, 2, 3, 4))


TILE = 16
"""Side of a wmma matrix."""
FRAGMENT_REGISTERS = 8
"""Of an operand or an accumulator of m16n16k16, a lane."""
FIXED_REGISTERS = 56
"""Addresses, bounds, the map of rows, fragments of K and V under way: from here on few spills in random configs (ptxas
13.0)."""
V_REGISTERS = 3
"""Of each tile of O that a lane keeps: its V on the way."""
PASS_REGISTERS = 6
"""Of each row of a lane in the softmax: maximum, sum, address, scores under way."""


def block_warps(genes: FlashWmmaGenes) -> int:
    return genes.ROW_WARPS * genes.COLUMN_WARPS


def tiles_of_head(problem: AttentionProblem) -> int:
    return math.ceil(problem.head_dim / TILE)


def tiles_of_rows(genes: FlashWmmaGenes) -> int:
    """Tiles of 16 rows per warp."""
    return genes.BLOCK_M // (TILE * genes.ROW_WARPS)


def smem_parts(problem: AttentionProblem, genes: FlashWmmaGenes) -> dict[str, int]:
    """Bytes of dynamic shared memory by what they hold: a float per row; Q; the rings of K and V; S, in whose place P;
    O if it lives there.

    With O in fragments it takes the place of Q, K, V and S at the end, and counts only what it has over them."""
    block_m, block_n, padding = genes.BLOCK_M, genes.BLOCK_N, genes.PADDING_BYTES
    row_bytes = tiles_of_head(problem) * TILE * ELEMENT_BYTES + padding
    o_bytes = block_m * (tiles_of_head(problem) * TILE * 4 + padding)
    parts = {
        "row factors": 4 * block_m,
        "Q": block_m * row_bytes,
        "K and V": 2 * genes.STAGES * block_n * row_bytes,
        "S": block_m * (4 * block_n + padding),
    }
    if genes.O_PLACE == "fragments":
        o_bytes = max(0, o_bytes - parts["Q"] - parts["K and V"] - parts["S"])
    return parts | {"O": o_bytes}


def smem_bytes(problem: AttentionProblem, genes: FlashWmmaGenes) -> int:
    """Dynamic shared memory of a block."""
    return sum(smem_parts(problem, genes).values())


def registers_needed(problem: AttentionProblem, genes: FlashWmmaGenes) -> int:
    """Estimate of the registers per thread below which ptxas spills: O and Q if they stay in fragments, S, the scores
    of a row, the rest."""
    row_tiles, dim_tiles = tiles_of_rows(genes), tiles_of_head(problem)
    o_tiles = math.ceil(dim_tiles / genes.COLUMN_WARPS) if genes.O_PLACE == "fragments" else 1
    q_tiles = dim_tiles if genes.Q_PLACE == "fragments" else 1
    passes = math.ceil(TILE * row_tiles * genes.THREADS_PER_ROW / (WARP * genes.COLUMN_WARPS))
    product = row_tiles * FRAGMENT_REGISTERS
    softmax = genes.BLOCK_N // genes.THREADS_PER_ROW
    kept = row_tiles * (o_tiles + q_tiles) * FRAGMENT_REGISTERS + V_REGISTERS * o_tiles
    return kept + max(product, softmax) + PASS_REGISTERS * passes + FIXED_REGISTERS


MMA_WAIT, SHUFFLE_WAIT, BARRIER_WAIT, LOAD_WAIT, FIRST_WAIT = 36, 24, 30, 60, 1100
FRAGMENT_BYTES = TILE * TILE * ELEMENT_BYTES


def launch_work(problem: AttentionProblem, genes: FlashWmmaGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The one launch. Scores go through shared memory, and so does O where it lives there."""
    rows, keys, dim_tiles = genes.BLOCK_M, genes.BLOCK_N, tiles_of_head(problem)
    warps, scores, dim = block_warps(genes), genes.BLOCK_M * genes.BLOCK_N, dim_tiles * TILE
    flops = 4.0 * scores * dim
    row_tiles = rows // (TILE * genes.ROW_WARPS)
    size = problem.element_bytes
    kv_fragments = 2.0 * genes.ROW_WARPS * keys * dim * size
    q_fragments = rows * dim * size * keys / TILE if genes.Q_PLACE == "shared" else 0.0
    p_fragments = rows * keys * size * (math.ceil(dim_tiles / genes.COLUMN_WARPS) if genes.O_PLACE == "shared" else 1)
    p_fragments *= genes.COLUMN_WARPS
    row_bytes = dim * size + genes.PADDING_BYTES
    conflicts = bank_conflicts(8, row_bytes, 16)
    s_conflicts = bank_conflicts(8, 4 * keys + genes.PADDING_BYTES, 8) / 2
    o_traffic = rows * dim * 4.0 * 3 if genes.O_PLACE == "shared" else rows * 4.0
    shared = (kv_fragments + q_fragments) * conflicts + p_fragments * max(1.0, s_conflicts)
    shared += scores * 4.0 * 2 * max(1.0, s_conflicts) + scores * size + o_traffic
    copied = 2.0 * keys * dim * size
    loads = (kv_fragments + q_fragments + p_fragments) / FRAGMENT_BYTES * 4
    lanes = scores * 5.0 + rows * dim
    shuffles = rows * genes.THREADS_PER_ROW / WARP * math.log2(genes.THREADS_PER_ROW) * 2
    issued = flops / 4096 + lanes / WARP + scores / WARP * 2 + loads + shuffles + 3 * copied / 512 + o_traffic / 512
    passes = math.ceil(TILE * row_tiles * genes.THREADS_PER_ROW / (WARP * genes.COLUMN_WARPS))
    waits = 2 * (dim_tiles * 0.5 + 1) * MMA_WAIT + BARRIER_WAIT * (4 if genes.COLUMN_WARPS > 1 else 2)
    waits += passes * (SHUFFLE_WAIT * math.log2(genes.THREADS_PER_ROW) + 40) * 0.5 + LOAD_WAIT * 3
    if genes.COPY == "registers":
        waits += 500
    mean, most, count = row_steps(problem, rows, keys)
    own = blocks_of_sequence(problem, count)
    return (
        LaunchWork(
            "flash_wmma",
            count * problem.heads * problem.batch,
            WARP * warps,
            warps,
            smem_bytes(problem, genes),
            registers or min(registers_needed(problem, genes), register_cap(warps, genes.BLOCKS_PER_SM)),
            Step(flops, lanes, scores + rows, issued, shared + copied, 2.0 * keys * problem.head_dim * size, waits),
            mean,
            most,
            Step(
                instructions=rows * dim / WARP * 3 + 60 * warps,
                shared_bytes=rows * dim * 8.0,
                loaded_bytes=2.0 * rows * problem.head_dim * size,
                waits=FIRST_WAIT,
            ),
            in_flight_bytes=copied * (genes.STAGES - 0.5) if genes.COPY == "async" else copied / 2,
            read_bytes=tensor_bytes(problem, "q", "k", "v"),
            write_bytes=tensor_bytes(problem, "o"),
            sweep_bytes=tensor_bytes(problem, "k", "v"),
            sweepers=own * problem.group_size,
            heads_in_turn=1.0,
            genes={
                "rows per warp": rows / genes.ROW_WARPS,
                "column warps": genes.COLUMN_WARPS,
                "dot lanes": genes.THREADS_PER_ROW,
                "stages": genes.STAGES,
                "by registers": genes.COPY == "registers",
                "padded": genes.PADDING_BYTES,
                "q registers": genes.Q_PLACE == "fragments",
                "o shared": genes.O_PLACE == "shared",
            },
        ),
    )
