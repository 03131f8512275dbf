"""The genes of flash_mma, and what they take: threads, shared memory, registers, scratch, work."""

import math
from typing import Literal

from evoattn.families.dealt import batches
from evoattn.families.genes import Genes, gene
from evoattn.families.residency import WARP, register_cap
from evoattn.families.work import (
    CONVERSION,
    LAST_BLOCK_WAIT,
    LaunchWork,
    Step,
    bias_bytes,
    blocks_of_sequence,
    row_steps,
    tensor_bytes,
    together,
    up_to,
    variant_step,
    visit_share,
)
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import PER_TOKEN


class FlashMmaGenes(Genes):
    """The parameters of flash_mma."""

    BLOCK_M: int = gene("query rows per block", (16, 32, 48, 64, 96, 128, 192, 256))
    BLOCK_N: int = gene("keys per tile", (16, 32, 48, 64, 80, 96, 128, 160, 192, 256))
    WARPS: int = gene(
        "warps that share the rows of a block; each has BLOCK_M / (16 WARPS) tiles of 16 rows", (1, 2, 3, 4, 6, 8)
    )
    KEY_WARPS: int = gene(
        "warps that split the keys of the same rows and add up their results at the end; useful where there are "
        "few row blocks",
        (1, 2, 4),
    )
    STAGES: int = gene("tiles of K and of V in shared memory; those not in use are being copied", (1, 2, 3, 4))
    SCHEDULE: Literal["split", "split_short_v", "together", "overlapped"] = gene(
        "split: one barrier per tile for K and one for V; split_short_v: the same with one tile of V less in "
        "shared memory; together: one barrier per tile; overlapped: one barrier, and QKᵀ of the next tile is "
        "issued between the exponentials of this one"
    )
    SMEM_LAYOUT: Literal["swizzled", "padded"] = gene(
        "how rows lie in shared memory without bank conflicts: 16-byte chunks permuted by exclusive-or, or one "
        "chunk of padding per row"
    )
    Q_PLACE: Literal["shared", "registers", "direct"] = gene(
        "Q is read from shared memory for every tile (shared), or kept in registers, loaded by way of shared "
        "memory (registers) or directly (direct)"
    )
    RESCALE: Literal["always", "vote", "lazy"] = gene(
        "the output is rescaled for every tile (always), if a row maximum of the warp grew (vote), or if a score "
        "exceeded a shift set five powers of two above the first maximum (lazy)"
    )
    ROW_SUM: Literal["add", "mma"] = gene(
        "row sums of P by additions, or on the tensor cores as P times a matrix of ones"
    )
    O_STORE: Literal["direct", "shared"] = gene(
        "4-byte stores from the fragments, or 16-byte stores through shared memory"
    )
    BLOCK_ORDER: Literal["rows", "rows_reversed", "heads", "heads_reversed"] = gene(
        "neighbouring blocks take the row blocks of one head (rows) or one row block of all heads (heads); "
        "reversed: last row blocks first, which are the longest under a causal mask"
    )
    BLOCKS_PER_SM: int = gene("blocks that registers and shared memory leave room for on one SM", (1, 2, 3, 4, 6, 8))
    KEY_SPLIT: int = gene(
        "blocks that split the tiles of keys of the same rows; the last of them adds up their results, which lie "
        "in global memory",
        (1, 2, 3, 4, 6, 8, 12, 16),
        default=1,
    )


CHUNK_BYTES = 16
TICKET_BYTES = 16
"""Of shared memory, where blocks share keys."""
FIXED_REGISTERS = 44
"""Addresses, counters, bounds, fragments of K and V under way."""
ROW_TILE_REGISTERS = 8
"""Shifts, sums and the fragment of P of one tile of 16 rows."""
LAZY_REGISTERS = {"mma": 4, "add": 12}
"""What the way back of a lazy shift keeps alive for one tile of 16 rows, by ROW_SUM."""


def smem_row_bytes(head_dim: int, element_bytes: int, genes: FlashMmaGenes) -> int:
    """Bytes of a row of that head_dim in shared memory: up to whole k16 steps, and a padding chunk without swizzle."""
    padding = CHUNK_BYTES if genes.SMEM_LAYOUT == "padded" else 0
    return math.ceil(head_dim / 16) * 16 * element_bytes + padding


def block_warps(genes: FlashMmaGenes) -> int:
    return genes.WARPS * genes.KEY_WARPS


def ring_stages(genes: FlashMmaGenes) -> tuple[int, int]:
    """Tiles of K and of V in shared memory."""
    return genes.STAGES, genes.STAGES - (genes.SCHEDULE == "split_short_v")


def smem_bytes(problem: AttentionProblem, genes: FlashMmaGenes) -> int:
    """Dynamic shared memory of a block: Q and the rings of K and V; in their place later O and the partial results of
    the key warps."""
    row_bytes = smem_row_bytes(problem.head_dim, problem.element_bytes, genes)
    key_bytes, value_bytes = (
        smem_row_bytes(problem.shape(t)[3], problem.element_of(t).bytes, genes) for t in ("k", "v")
    )
    q_bytes = 0 if genes.Q_PLACE == "direct" else genes.BLOCK_M * row_bytes
    k_stages, v_stages = ring_stages(genes)
    loop = q_bytes + genes.BLOCK_N * (k_stages * key_bytes + v_stages * value_bytes)
    o_row_bytes = smem_row_bytes(problem.head_dim_v, problem.answer.bytes, genes)
    o_bytes = genes.BLOCK_M * o_row_bytes if genes.O_STORE == "shared" else 0
    # O, two shifts and two sums of each lane in fp32: head_dim of V / 2 + 4 floats per lane for every 16 rows.
    merge = (genes.KEY_WARPS - 1) * genes.BLOCK_M // 16 * WARP * (problem.head_dim_v // 2 + 4) * 4
    return max(loop, max(q_bytes, o_bytes) + merge) + (TICKET_BYTES if genes.KEY_SPLIT > 1 else 0)


def results_bytes(problem: AttentionProblem, genes: FlashMmaGenes, tiles: int) -> int:
    """Scratch of so many tiles of rows, each with a result of every block that shares its keys: as `merge` above."""
    return tiles * genes.KEY_SPLIT * (genes.BLOCK_M // 16) * WARP * (problem.head_dim_v // 2 + 4) * 4


def registers_needed(problem: AttentionProblem, genes: FlashMmaGenes) -> int:
    """Estimate of the registers per thread below which ptxas spills.

    A tile of 16 rows has accumulators of O, half of V's head_dim, the warp's keys / 2 of S (of two tiles if overlapped)
    and head_dim / 4 registers of Q if Q stays there (reports/sources.md). The rest was fitted to NVRTC 13.0 on sm_89
    and sm_90a: of 340 random configs let through 4 spilled."""
    row_tiles, scores, q = _of_row_tile(problem, genes)
    scales = scores if problem.scales == PER_TOKEN else 0
    scores *= 2 if genes.SCHEDULE == "overlapped" else 1
    lazy = LAZY_REGISTERS[genes.ROW_SUM] if genes.RESCALE == "lazy" else 0
    return row_tiles * (problem.head_dim_v // 2 + scores + q + lazy + ROW_TILE_REGISTERS) + scales + FIXED_REGISTERS


def _of_row_tile(problem: AttentionProblem, genes: FlashMmaGenes) -> tuple[int, int, int]:
    """Tiles of 16 rows of a warp; of each the registers of S of one tile of keys, and of Q."""
    q = 0 if genes.Q_PLACE == "shared" else 4 * math.ceil(problem.head_dim * problem.element_bytes / 32)
    return genes.BLOCK_M // (16 * genes.WARPS), genes.BLOCK_N // genes.KEY_WARPS // 2, q


def registers_taken(problem: AttentionProblem, genes: FlashMmaGenes) -> int:
    """Estimate of the registers that the compiler gives a thread: where launch bounds let it, it takes more than it
    needs.

    Fitted to 3,197 right kernels of 16 bits of the H100's campaigns (NVRTC 13.0, sm_90a), and 4 less, as on sm_80 and
    sm_89: of configs left out the error is 4 % in the median, 14 % at the 95th percentile."""
    row_tiles, scores, q = _of_row_tile(problem, genes)
    sums = 1.43 * (problem.head_dim_v // 2) - (9 if genes.ROW_SUM == "mma" else 0)
    tile = sums + scores * (2.45 if genes.SCHEDULE == "overlapped" else 1.7) + q
    scales = scores if problem.scales == PER_TOKEN else 0
    found = row_tiles * tile + scales + (9 if problem.causal else 0) + (12 if genes.KEY_SPLIT > 1 else 0) + 39
    return round(min(found, register_cap(block_warps(genes), genes.BLOCKS_PER_SM)))


MMA_FLOPS, MMA_WAIT, LDMATRIX_WAIT, SHUFFLE_WAIT, BARRIER_WAIT = 4096, 18, 24, 24, 30
"""Floating-point operations of one mma.m16n8k16; clocks until the results of an instruction are there, on any of
these cards to within some ten clocks."""
PART_WAIT = 700
"""Clocks for each result that the last of the blocks that share keys adds."""
SCORE_OPERATIONS = {"always": 4.5, "vote": 4.0, "lazy": 3.5}
"""FP32 and conversion instructions per score and lane: scale, maximum, sum, half a conversion."""


def launch_work(problem: AttentionProblem, genes: FlashMmaGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The one launch."""
    rows, keys, dim = genes.BLOCK_M, genes.BLOCK_N, up_to(problem.head_dim, 16)
    value_dim, v_dim = problem.head_dim_v, up_to(problem.head_dim_v, 16)
    warps, scores = block_warps(genes), genes.BLOCK_M * genes.BLOCK_N
    flops = 2.0 * scores * (dim + v_dim) + (16.0 * scores if genes.ROW_SUM == "mma" else 0.0)
    # Of 8 bits a clock has twice as many: of int8 in Q Kᵀ alone, a half of all.
    flops *= 0.75 if problem.dtype == "int8" else problem.element_bytes / 2
    rescale = rows * value_dim * {"always": 1.0, "vote": 0.3, "lazy": 0.02}[genes.RESCALE] * genes.KEY_WARPS
    lanes = scores * (SCORE_OPERATIONS[genes.RESCALE] - (genes.ROW_SUM == "mma")) + rescale
    q_reads = rows * dim * problem.element_bytes * genes.KEY_WARPS if genes.Q_PLACE == "shared" else 0
    size = problem.element_of("k").bytes
    fragments = genes.WARPS * keys * (dim + v_dim) * size + q_reads
    copied, loaded = keys * (dim + v_dim) * size, keys * (problem.head_dim + value_dim) * size
    row_tiles = rows // (16 * genes.WARPS)
    shuffles = row_tiles * 4 * (2 if genes.RESCALE != "lazy" else 0) * warps
    issued = flops / MMA_FLOPS + lanes / WARP + scores / WARP + fragments / 512 + 3 * copied / 512 + shuffles
    if problem.kv or problem.dtype == "int8":  # every warp converts all pairs of its keys, or those of V
        issued += genes.WARPS * keys * (dim * bool(problem.kv) + v_dim) / WARP / 2 * CONVERSION
    barriers = {"split": 2, "split_short_v": 2, "together": 1, "overlapped": 1}[genes.SCHEDULE]
    chained = 1 if genes.SCHEDULE == "overlapped" else 2
    waits = chained * (dim / 16 * 0.5 + 1) * MMA_WAIT + LDMATRIX_WAIT * 2 + barriers * BARRIER_WAIT
    waits += (2 * SHUFFLE_WAIT if genes.RESCALE != "lazy" else 10) + 40
    mean, most, count = row_steps(problem, rows, keys)
    own = blocks_of_sequence(problem, count)
    heads = problem.heads * batches(problem)
    merge = (genes.KEY_WARPS - 1) * rows * value_dim * 4 * 2
    split = genes.KEY_SPLIT
    scratch = float(results_bytes(problem, genes, count * heads)) if split > 1 else 0.0
    ends = Step(
        instructions=rows * value_dim / WARP * 1.5 + 40 * warps,
        shared_bytes=merge + (rows * v_dim * 4 if genes.O_STORE == "shared" else 0),
        # The last block reads the results of all, which are a part each of the others' bytes too.
        loaded_bytes=float(rows * (problem.head_dim + value_dim) * problem.element_bytes)
        + (2 * rows * value_dim * 4 if split > 1 else 0),
        waits=900 + (400 if genes.KEY_WARPS > 1 else 0) + (LAST_BLOCK_WAIT + PART_WAIT * split if split > 1 else 0),
    )
    k_stages, v_stages = ring_stages(genes)
    order = genes.BLOCK_ORDER
    return (
        LaunchWork(
            "flash_mma",
            count * heads * split,
            WARP * warps,
            warps,
            smem_bytes(problem, genes),
            registers or registers_taken(problem, genes),
            together(
                Step(flops, lanes, scores + rescale / 32, issued, fragments + copied, loaded, waits),
                variant_step(problem, scores),
            ),
            mean / split,
            math.ceil(most / split) if split > 1 else most,
            ends,
            longest_first=order == "heads_reversed" if problem.causal else False,
            in_flight_bytes=((k_stages - 1) * problem.head_dim + v_stages * value_dim) * keys * size,
            read_bytes=tensor_bytes(problem, "q", "k", "v") + bias_bytes(problem),
            write_bytes=tensor_bytes(problem, "o") + scratch,
            sweep_bytes=tensor_bytes(problem, "k", "v"),
            sweepers=own * problem.group_size,
            visits=own,
            visit_share=visit_share(problem, mean, keys),
            scratch_bytes=scratch,
            heads_in_turn=problem.kv_heads * batches(problem) if order.startswith("heads") else 1.0,
            genes={
                "rows per warp": rows / genes.WARPS,
                "key warps": genes.KEY_WARPS,
                "key split": split,
                "stages": genes.STAGES,
                "barriers": barriers,
                "overlapped": genes.SCHEDULE == "overlapped",
                "padded": genes.SMEM_LAYOUT == "padded",
                "q place": ("shared", "registers", "direct").index(genes.Q_PLACE),
                "rescale": ("always", "vote", "lazy").index(genes.RESCALE),
                "sum by mma": genes.ROW_SUM == "mma",
                "direct store": genes.O_STORE == "direct",
                "heads first": order.startswith("heads"),
                "reversed": order.endswith("reversed"),
                "asked blocks": genes.BLOCKS_PER_SM,
                "row bytes": smem_row_bytes(problem.head_dim, size, genes),
            },
        ),
    )
