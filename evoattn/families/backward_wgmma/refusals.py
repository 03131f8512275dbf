"""Why a config of backward_wgmma cannot be, or is redundant, in one sentence each."""

from __future__ import annotations

from evoattn.families.backward_wgmma.genes import BackwardWgmmaGenes
from evoattn.families.backward_wgmma.resources import (
    dq_columns,
    key_blocks,
    moved_registers,
    producer_warps,
    registers_at_launch,
    registers_needed,
    scratch,
    smem_bytes,
    threads,
    units,
    warpgroups,
    whole_chunks,
)
from evoattn.families.residency import why_no_memory, why_not_resident, why_same_code
from evoattn.families.tensor_tiles import CHUNK_COLUMNS
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem

MAX_WARPGROUPS = 3
MAX_GRID_YZ = 65535


def why_useless(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> str | None:
    """Genes that do not fit each other."""
    groups, dims = warpgroups(genes), genes.DIM_GROUPS
    if groups > MAX_WARPGROUPS:
        return f"BLOCK_N={genes.BLOCK_N} with DIM_GROUPS={dims} are {groups} warpgroups, of which there are 3 at most."
    if dims > 1 and "registers" in (genes.P_PLACE, genes.DS_PLACE):
        return f"DIM_GROUPS={dims} needs P_PLACE=shared and DS_PLACE=shared: each warpgroup has a part of both."
    if dims > 1 and (
        problem.head_dim % (dims * CHUNK_COLUMNS) or problem.head_dim_v % (dims * CHUNK_COLUMNS) or genes.BLOCK_M % 32
    ):
        return f"DIM_GROUPS={dims} needs head_dims of {dims} times {CHUNK_COLUMNS}, and BLOCK_M in steps of 32."
    if not dq_columns(problem, genes):
        columns = whole_chunks(problem.head_dim)
        return (
            f"DQ_ROWS={genes.DQ_ROWS} BLOCK_M={genes.BLOCK_M}: {groups} warpgroups (BLOCK_N, DIM_GROUPS) cannot share "
            f"{genes.BLOCK_M} × {columns} of dQ in whole tiles of 64."
        )
    if genes.PRODUCER == "warp" and (genes.DQ_SUM == "warp" or genes.ROW_WORK == "spare_warps"):
        return "DQ_SUM=warp and ROW_WORK=spare_warps need PRODUCER=warpgroup, which has warps to spare."
    if genes.ROW_WORK == "spare_warps" and problem.varlen:
        return "ROW_WORK=spare_warps takes no packed sequences, whose heads end at different times."
    if genes.ROW_WORK == "spare_warps" and genes.BLOCK_ORDER == "heads":
        return "ROW_WORK=spare_warps needs BLOCK_ORDER=keys: the heads come one after another."
    if genes.ROTATE and problem.causal:
        return "ROTATE needs mask=full: under a causal mask blocks begin with different queries as it is."
    if genes.STAGGER and groups != 2:
        return f"STAGGER needs two warpgroups (BLOCK_N, DIM_GROUPS), not {groups}."
    if genes.STAGGER and genes.ORDER != "in_turn" and genes.P_PLACE == "registers":
        return (
            f"STAGGER ORDER={genes.ORDER} needs P_PLACE=shared: without its barrier one warpgroup gets two tiles ahead."
        )
    if genes.ORDER != "in_turn" and genes.Q_STAGES == 1:
        return f"ORDER={genes.ORDER} needs Q_STAGES of 2 or more: two tiles of Q are read at a time."
    if genes.ORDER != "in_turn" and genes.DS_PLACE == "registers":
        return (
            f"ORDER={genes.ORDER} needs DS_PLACE=shared: with dS in registers beside the next S products wait in turn "
            "(ptxas C7512)."
        )
    return None


def why_redundant(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> str | None:
    """Configs that do on this problem what a smaller one does."""
    if genes.BLOCK_M > 64 and 2 * problem.seqlen_q <= genes.BLOCK_M:
        return f"BLOCK_M={genes.BLOCK_M} for {problem.seqlen_q} queries leaves half of the tile without work."
    if genes.BLOCK_N > 64 and 2 * problem.seqlen_k <= genes.BLOCK_N:
        return f"BLOCK_N={genes.BLOCK_N} for {problem.seqlen_k} keys leaves half of the block without work."
    tiles = -(-problem.seqlen_q // genes.BLOCK_M) * problem.group_size
    for name, stages in (("Q_STAGES", genes.Q_STAGES), ("DO_STAGES", genes.DO_STAGES), ("DS_STAGES", genes.DS_STAGES)):
        if stages > max(1 + (name == "Q_STAGES" and genes.ORDER != "in_turn"), tiles):
            return (
                f"{name}={stages} is more than the {tiles} tiles of {genes.BLOCK_M} queries that a block goes through."
            )
    if genes.ROW_WORK == "spare_warps" and units(problem) == 1:
        return "ROW_WORK=spare_warps has nothing to do where there is one K/V head."
    if genes.BLOCK_ORDER == "heads" and (key_blocks(problem, genes) == 1 or units(problem) == 1):
        return "BLOCK_ORDER=heads is the order of keys where there is one head, or one tile of keys."
    if genes.ROTATE and (tiles == 1 or key_blocks(problem, genes) == 1):
        return "ROTATE needs several tiles of keys and of queries (BLOCK_M, BLOCK_N)."
    return None


def why_too_big(problem: AttentionProblem, genes: BackwardWgmmaGenes, gpu: GpuSpec) -> str | None:
    """Grid, memory and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    warps, smem = threads(genes) // 32, smem_bytes(problem, genes)
    if genes.BLOCK_ORDER == "heads" and key_blocks(problem, genes) > MAX_GRID_YZ:
        return f"BLOCK_ORDER=heads puts {key_blocks(problem, genes)} tiles of keys in grid z, which ends at 65535."
    if smem > gpu.smem_per_block:
        return (
            f"The block needs {smem} bytes of shared memory, by BLOCK_M, BLOCK_N, Q_STAGES, DO_STAGES, DS_STAGES and "
            f"DQ_SUM; {gpu.name} gives a block {gpu.smem_per_block}."
        )
    if reason := why_not_resident(gpu, genes.BLOCKS_PER_SM, warps, smem) or why_same_code(genes.BLOCKS_PER_SM, warps):
        return reason
    have, needed = moved_registers(genes)[1] or registers_at_launch(genes), registers_needed(problem, genes)
    if needed > have:
        return (
            f"A thread needs about {needed} registers, by BLOCK_M, BLOCK_N, P_PLACE, DS_PLACE, DQ_ROWS, and PRODUCER="
            f"{genes.PRODUCER} with {producer_warps(genes)} warps leaves it {have}."
        )
    return why_no_memory(problem, scratch(problem, genes), gpu)
