"""Why a config of flash_mma cannot be, or is redundant, in one sentence each."""

from __future__ import annotations

import math

from evoattn.families.flash_mma.genes import FlashMmaGenes
from evoattn.families.flash_mma.resources import block_warps, registers_needed, smem_bytes
from evoattn.families.residency import why_not_resident, why_same_code, why_too_few_registers
from evoattn.families.row_blocks import batches, row_blocks
from evoattn.model.gpu import MAX_GRID_YZ, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import PER_TOKEN

MAX_WARPS = 16
MAX_WARP_KEYS = 128
"""Beyond it ptxas spills at any register count, and scores alone take half of a thread's registers."""


def why_wrong_shape(genes: FlashMmaGenes) -> str | None:
    """Tiles that are not whole mma tiles of each warp, or too many warps."""
    block_m, block_n, warps, key_warps = (genes.BLOCK_M, genes.BLOCK_N, genes.WARPS, genes.KEY_WARPS)
    if block_m % (16 * warps):
        return f"BLOCK_M={block_m} rows do not divide into tiles of 16 for WARPS={warps}."
    if block_n % (16 * key_warps):
        return f"BLOCK_N={block_n} keys do not divide into steps of 16 for KEY_WARPS={key_warps}."
    if block_n // key_warps > MAX_WARP_KEYS:
        return f"BLOCK_N={block_n} over KEY_WARPS={key_warps} is more than {MAX_WARP_KEYS} keys per warp."
    if block_warps(genes) > MAX_WARPS:
        return (
            f"WARPS={warps} times KEY_WARPS={key_warps} is over {MAX_WARPS} warps, with which a thread has 128 "
            "registers."
        )
    return None


def why_not_eight_bits(problem: AttentionProblem, genes: FlashMmaGenes) -> str | None:
    """How queries lie beside K and V of 8 bits, and sums of weights that have a part of their scale."""
    if problem.kv and genes.Q_PLACE != "direct":
        return f"Q_PLACE={genes.Q_PLACE}: beside K and V of 8 bits fragments of Q come straight from memory (direct)."
    if problem.scales == PER_TOKEN and genes.ROW_SUM != "add":
        return f"ROW_SUM={genes.ROW_SUM}: weights of V with a scale of each key are summed up by additions (add)."
    return None


def why_coarse_sums(problem: AttentionProblem, genes: FlashMmaGenes) -> str | None:
    """A log-sum-exp of weights that were rounded to 16 bits."""
    if problem.lse and genes.ROW_SUM != "add":
        return f"ROW_SUM={genes.ROW_SUM} sums rounded weights, too coarse for a log-sum-exp, which takes add."
    return None


def why_wrong_ring(genes: FlashMmaGenes) -> str | None:
    """A ring too short for its schedule."""
    stages, schedule = genes.STAGES, genes.SCHEDULE
    if stages == 1 and schedule != "split":
        return (
            f"SCHEDULE={schedule} needs STAGES of at least 2: with one tile of K and V only split has room to copy the "
            "next."
        )
    return None


def why_key_warps(problem: AttentionProblem, genes: FlashMmaGenes) -> str | None:
    """Key warps of a listed tile: one of them may have no key of the first FULL tile, and a lazy shift no score."""
    if problem.blocks and genes.KEY_WARPS > 1:
        return f"KEY_WARPS={genes.KEY_WARPS}: with a block list one warp takes all keys of a tile."
    return None


def why_redundant(problem: AttentionProblem, genes: FlashMmaGenes) -> str | None:
    """Configs that do what a smaller one does."""
    block_m, block_n, key_warps, order = (genes.BLOCK_M, genes.BLOCK_N, genes.KEY_WARPS, genes.BLOCK_ORDER)
    rows, tiles = row_blocks(problem, block_m), math.ceil(problem.seqlen_k / block_n)
    if block_m > 16 and block_m >= 2 * problem.seqlen_q:
        return f"BLOCK_M={block_m} for {problem.seqlen_q} queries leaves half of the block or more without work."
    if block_n > 16 * key_warps and block_n >= 2 * problem.seqlen_k:
        return f"BLOCK_N={block_n} for {problem.seqlen_k} keys leaves half of the tile or more without work."
    if problem.seqlen_k <= block_n // key_warps * (key_warps - 1):
        return (
            f"KEY_WARPS={key_warps}: with {problem.seqlen_k} keys in a tile of {block_n} the last key warp never sees "
            "one."
        )
    if tiles == 1 and (genes.SCHEDULE != "split" or genes.RESCALE != "always"):
        return (
            f"All {problem.seqlen_k} keys are one tile of {block_n}: SCHEDULE and RESCALE must be split and always, to "
            "do nothing."
        )
    if tiles < genes.STAGES:
        return f"STAGES={genes.STAGES} is more than the {tiles} tiles of {block_n} that {problem.seqlen_k} keys make."
    if order.endswith("reversed") and not problem.causal:
        return f"BLOCK_ORDER={order} only matters with a causal mask: without one all row blocks take the same time."
    heads = problem.heads * batches(problem)
    if order != "rows" and (rows == 1 or (order == "heads" and heads == 1)):
        return f"BLOCK_ORDER={order} is the same order as rows for {rows} row blocks of {heads} heads."
    return None


def why_too_big(problem: AttentionProblem, genes: FlashMmaGenes, gpu: GpuSpec) -> str | None:
    """Grid, shared memory, threads and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    rows = row_blocks(problem, genes.BLOCK_M)
    if genes.BLOCK_ORDER.startswith("heads") and rows > MAX_GRID_YZ:
        return f"BLOCK_ORDER={genes.BLOCK_ORDER} puts {rows} row blocks in grid z, which ends at {MAX_GRID_YZ}."
    blocks, warps, smem = genes.BLOCKS_PER_SM, block_warps(genes), smem_bytes(problem, genes)
    if smem > gpu.smem_per_block:
        return f"The block needs {smem} bytes of shared memory; {gpu.name} gives a block {gpu.smem_per_block}."
    return (
        why_not_resident(gpu, blocks, warps, smem)
        or why_same_code(blocks, warps)
        or why_too_few_registers(blocks, warps, registers_needed(problem, genes))
    )
