"""Why a config of backward_mma cannot be, or is redundant, in one sentence each."""

from __future__ import annotations

import math

from evoattn.families.backward import key_blocks
from evoattn.families.backward_mma.genes import BackwardMmaGenes
from evoattn.families.backward_mma.resources import (
    IDLE,
    adds_dq,
    block_warps,
    pass_registers_needed,
    pass_smem_bytes,
    registers_needed,
    smem_bytes,
)
from evoattn.families.backward_mma.tables import unordered_tables
from evoattn.families.block_list import why_not_listed
from evoattn.families.residency import register_cap, why_not_resident, why_same_code
from evoattn.families.row_blocks import row_blocks
from evoattn.model.backward import parse_grads
from evoattn.model.gpu import MAX_GRID_YZ, GpuSpec
from evoattn.model.problem import AttentionProblem

MAX_WARPS = 16


def why_wrong_shape(problem: AttentionProblem, genes: BackwardMmaGenes) -> str | None:
    """Tiles that are not whole mma tiles of each warp, or too many warps."""
    block_m, block_n, warps, query_warps = genes.BLOCK_M, genes.BLOCK_N, genes.WARPS, genes.QUERY_WARPS
    if block_n % (16 * warps):
        return f"BLOCK_N={block_n} keys do not divide into tiles of 16 for WARPS={warps}."
    if block_m % (16 * query_warps):
        return f"BLOCK_M={block_m} queries do not divide into steps of 16 for QUERY_WARPS={query_warps}."
    if block_m // query_warps % genes.PART:
        return f"PART={genes.PART} does not divide the {block_m // query_warps} queries of a warp."
    if block_warps(genes) > MAX_WARPS:
        return (
            f"WARPS={warps} times QUERY_WARPS={query_warps} is over {MAX_WARPS} warps, with which a thread has 128 "
            "registers."
        )
    if query_warps * 16 > max(problem.head_dim, problem.head_dim_v):
        return f"QUERY_WARPS={query_warps}: head_dim has fewer blocks of 16 columns."
    if not adds_dq(genes):
        return None
    dq_warps = genes.DQ_WARPS
    columns = block_warps(genes) // dq_warps
    if block_warps(genes) % dq_warps or block_m % (16 * dq_warps):
        return (
            f"DQ_WARPS={dq_warps} does not divide the block's {block_warps(genes)} warps and its tiles of 16 queries."
        )
    if columns & (columns - 1):
        return f"DQ_WARPS={dq_warps} leaves {columns} warps for columns of dQ, which must be a power of two."
    if 16 * columns >= 2 * max(16, problem.head_dim):
        return f"DQ_WARPS={dq_warps} leaves {columns} warps for columns of dQ, of which half or more have none."
    return None


def why_not_whole_lists(problem: AttentionProblem, genes: BackwardMmaGenes) -> str | None:
    """Tiles that are no parts of a block, or do not take all tiles of a list; a bias behind an expression."""
    if problem.own_score and "bias" in parse_grads(problem.grads):
        return "The gradient of a bias beside an expression of scores is backward_scalar's."
    if not problem.blocks:
        return None
    if genes.QUERY_SPLIT > 1 or genes.CAUSAL_SKIP:
        name = "CAUSAL_SKIP" if genes.CAUSAL_SKIP else f"QUERY_SPLIT={genes.QUERY_SPLIT}"
        return f"{name}: a block takes all tiles of queries that a block list names."
    return why_not_listed(problem, genes.BLOCK_M, genes.BLOCK_N) or (
        None if adds_dq(genes) else why_no_part(problem, genes)
    )


def why_no_part(problem: AttentionProblem, genes: BackwardMmaGenes) -> str | None:
    """The same of tiles of the launch that computes dQ by itself."""
    reason = why_not_listed(problem, genes.PASS_M, genes.PASS_N)
    return reason and reason.replace("BLOCK_", "PASS_")


def why_wrong_pass(genes: BackwardMmaGenes) -> str | None:
    """Tiles of a launch that computes dQ by itself."""
    if not adds_dq(genes) and genes.PASS_M % (16 * genes.PASS_WARPS):
        return f"PASS_M={genes.PASS_M} queries do not divide into tiles of 16 for PASS_WARPS={genes.PASS_WARPS}."
    if not adds_dq(genes) and genes.QUERY_SPLIT > 1:
        return f"QUERY_SPLIT={genes.QUERY_SPLIT} goes with DQ=add: its sums are converted by the third launch."
    return None


def why_not_deterministic(problem: AttentionProblem, genes: BackwardMmaGenes) -> str | None:
    """Sums whose order differs from run to run, where the same bits are asked for."""
    if not problem.deterministic:
        return None
    if adds_dq(genes):
        return "DQ=add adds in any order; deterministic=1 asks for DQ=pass."
    if "bias" in parse_grads(problem.grads) and problem.bias != "bhs":
        return "deterministic: the gradient of a bias that batches or heads share is added up in any order."
    if added := unordered_tables(problem):
        return f"deterministic: the gradient {added[0]} of a table is added up in any order."
    return None


def why_redundant(problem: AttentionProblem, genes: BackwardMmaGenes) -> str | None:
    """Configs that do what a smaller one does."""
    block_m, block_n = genes.BLOCK_M, genes.BLOCK_N
    rows, keys = row_blocks(problem, block_m), key_blocks(problem, block_n)
    steps = rows * problem.group_size
    if block_m > 16 * genes.QUERY_WARPS and block_m >= 2 * problem.seqlen_q:
        return f"BLOCK_M={block_m} for {problem.seqlen_q} queries leaves half of the tile or more without work."
    if block_n > 16 and block_n >= 2 * problem.seqlen_k:
        return f"BLOCK_N={block_n} for {problem.seqlen_k} keys leaves half of the block or more without work."
    if steps < genes.STAGES:
        return f"STAGES={genes.STAGES} is more than the {steps} tiles of {block_m} queries of a block."
    if steps < genes.QUERY_SPLIT:
        return f"QUERY_SPLIT={genes.QUERY_SPLIT} is more than the {steps} tiles of {block_m} queries of K/V head."
    if genes.CAUSAL_SKIP and not problem.causal:
        return "CAUSAL_SKIP only matters with a causal mask or a window: without one every query sees every key."
    heads = problem.kv_heads * problem.batch
    if genes.BLOCK_ORDER == "heads" and (keys == 1 or heads == 1):
        return f"BLOCK_ORDER=heads is the same order as keys for {keys} tiles of {heads} heads."
    for name, value in IDLE.items():
        if name.startswith("PASS") == adds_dq(genes) and genes.value(name) != value:
            how = "is added up by the blocks of keys" if adds_dq(genes) else "is computed by a launch of its own"
            return f"{name}={genes.value(name)} does nothing where the gradient of Q {how}: it must be {value}."
    if adds_dq(genes):
        return None
    if genes.PASS_M > 16 and 2 * problem.seqlen_q <= genes.PASS_M and genes.PASS_M > 16 * genes.PASS_WARPS:
        return f"PASS_M={genes.PASS_M} for {problem.seqlen_q} queries leaves half of the block or more without work."
    if genes.PASS_N > 16 and 2 * problem.seqlen_k <= genes.PASS_N:
        return f"PASS_N={genes.PASS_N} for {problem.seqlen_k} keys leaves half of the tile or more without work."
    if math.ceil(problem.seqlen_k / genes.PASS_N) < genes.PASS_STAGES:
        return f"PASS_STAGES={genes.PASS_STAGES} is more than the tiles of {genes.PASS_N} of {problem.seqlen_k} keys."
    return None


def why_too_big(problem: AttentionProblem, genes: BackwardMmaGenes, gpu: GpuSpec) -> str | None:
    """Grids, shared memory, threads and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    tiles = max(
        key_blocks(problem, genes.BLOCK_N) * genes.QUERY_SPLIT,
        0 if adds_dq(genes) else row_blocks(problem, genes.PASS_M),
    )
    if genes.BLOCK_ORDER == "heads" and tiles > MAX_GRID_YZ:
        return f"BLOCK_ORDER=heads puts {tiles} tiles in grid z, which ends at {MAX_GRID_YZ}."
    needs = [(smem_bytes(problem, genes), "BLOCK_M, BLOCK_N and STAGES")]
    if not adds_dq(genes):
        needs.append((pass_smem_bytes(problem, genes), "PASS_M, PASS_N and PASS_STAGES"))
    for smem, by in needs:
        if smem > gpu.smem_per_block:
            return f"The block needs {smem} bytes of shared memory, by {by}; {gpu.name} gives one {gpu.smem_per_block}."
    blocks, warps = genes.BLOCKS_PER_SM, block_warps(genes)
    return (
        why_not_resident(gpu, blocks, warps, smem_bytes(problem, genes))
        or why_same_code(blocks, warps)
        or _why_too_few(
            registers_needed(problem, genes), register_cap(warps, blocks), "BLOCK_N, QUERY_WARPS, WARPS, PART"
        )
        or (
            None
            if adds_dq(genes)
            else _why_too_few(
                pass_registers_needed(problem, genes), register_cap(genes.PASS_WARPS, 1), "PASS_M, PASS_N, PASS_WARPS"
            )
        )
    )


def _why_too_few(needed: int, cap: int, by: str) -> str | None:
    """Fewer registers than a thread needs: the kernel would spill."""
    return f"A thread needs about {needed} registers, by {by}, and has {cap}." if needed > cap else None
