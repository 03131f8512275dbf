"""Why a config of fp8_wgmma cannot be, or is redundant, in one sentence each."""

from __future__ import annotations

from evoattn.families.flash_wgmma.resources import moved_registers, registers_at_launch, warpgroups
from evoattn.families.fp8_wgmma.genes import Fp8WgmmaGenes
from evoattn.families.fp8_wgmma.resources import registers_needed, smem_bytes, widest_wgmma
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem

MOST_SUMMED = 512
"""Keys whose P V tensor cores add up before fp32 does. Of values with a mean, O is 0.4 % too short with as many, 1 %
with 1,024, and 57 % if they add up 131,072 (reports/performance.md, 2026-11-26)."""


def why_useless_flushes(genes: Fp8WgmmaGenes) -> str | None:
    """Genes that do nothing beside the others, or too much."""
    if genes.SUM_PLACE == "registers" and genes.FLUSH_TILES > 1:
        return (
            f"FLUSH_TILES={genes.FLUSH_TILES} needs SUM_PLACE=shared: O in registers is rescaled for every tile, and "
            "to flush it then costs no more."
        )
    if genes.FLUSH_TILES * genes.BLOCK_N > MOST_SUMMED:
        return (
            f"FLUSH_TILES={genes.FLUSH_TILES} tiles of {genes.BLOCK_N} keys are more than the {MOST_SUMMED} that "
            "tensor cores may add up: they keep some 14 bits."
        )
    if genes.SUM_PLACE == "shared" and genes.STORE == "chunks":
        return "SUM_PLACE=shared has room for all of O, and needs no STORE=chunks."
    return None


def why_too_big(problem: AttentionProblem, genes: Fp8WgmmaGenes, gpu: GpuSpec) -> str | None:
    """Shared memory, threads and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    blocks, smem = genes.BLOCKS_PER_SM, smem_bytes(problem, genes)
    tiles = f"BLOCK_M={genes.BLOCK_M} BLOCK_N={genes.BLOCK_N} STAGES={genes.STAGES}"
    if smem > gpu.smem_per_block:
        return f"{tiles} need {smem} bytes of shared memory; {gpu.name} gives a block {gpu.smem_per_block}."
    if blocks * (smem + gpu.smem_reserved_per_block) > gpu.smem_per_sm:
        return (
            f"BLOCKS_PER_SM={blocks} with {tiles} need {smem} bytes and 1 KB each, over the {gpu.smem_per_sm} of an SM."
        )
    launch, needed = registers_at_launch(genes.flash), registers_needed(problem, genes)
    producer, consumer = moved_registers(genes.flash)
    if consumer <= launch or producer >= launch:
        return (
            f"The producer has no registers to give: {warpgroups(genes.flash)} warpgroups and BLOCKS_PER_SM={blocks}."
        )
    said = f"{tiles} FLUSH_TILES={genes.FLUSH_TILES}"
    if needed > consumer:
        return f"{said} need about {needed} registers per consumer thread, which can have {consumer}."
    widest = widest_wgmma(problem, genes)
    if widest > launch:
        return f"One wgmma of {said} needs {widest} registers per thread at launch, where there are {launch}."
    return None
