"""Attention of few query heads over a latent cache on Hopper, whose V is the first columns of K: keys, and columns of
V, are the rows of wgmma's products; one wave of blocks shares all keys evenly; sm_90a only."""

from typing import Any, ClassVar

from evoattn.families.flash_wgmma.text import wgmma_function
from evoattn.families.given import passed, printed
from evoattn.families.latent import PARTIAL, STATE, Latent
from evoattn.families.latent_columns.resources import (
    MAX_REGISTERS,
    MERGE_THREADS,
    REGISTERS_BESIDE_CONVERTERS,
    LatentColumnsGenes,
    launch_work,
    registers_needed,
    row_tiles,
    smem_bytes,
    threads,
)
from evoattn.families.residency import why_no_memory
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, ROW_BYTES
from evoattn.families.variants import scale_given, variant_given
from evoattn.families.work import LaunchWork
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import Buffer, KernelLaunch, TensorMap
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import PER_COLUMNS, SCALE_COLUMNS
from evoattn.model.space import KernelConfig
from evoattn.model.variant import EIGHT_BITS

KV = "e4m3"
"""What a cache of 8 bits has, beside K's own columns of 16."""
SHARERS = "sharers"
"""A scratch buffer beside those of `latent.py`, of which each block has two: two integers for each tile of rows, which
blocks have its keys."""


class LatentColumns(Latent):
    """The `Family` of `templates/latent_columns.cu.j2`."""

    name: ClassVar[str] = "latent_columns"
    genes = LatentColumnsGenes
    summary: ClassVar[str] = (
        "a latent cache on Hopper for few heads, of 8 bits too: keys are the rows of products; fp16 and bf16"
    )
    variants: ClassVar[tuple[str, ...]] = (*Latent.variants, *EIGHT_BITS)
    value_columns: ClassVar[int] = CHUNK_COLUMNS
    merge_threads: ClassVar[int] = MERGE_THREADS

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if problem.kv and (problem.kv, problem.scales) != (KV, PER_COLUMNS):
            return (
                f"{self.name} takes a latent cache of 16 bits, or of {KV} with scales={PER_COLUMNS}, not of "
                f"{problem.kv} with scales={problem.scales!r}."
            )
        return super().refuse(problem, gpu)

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = LatentColumnsGenes.of(config)
        return (
            why_too_big(problem, genes, gpu)
            or self.why_too_long(problem, config, gpu)
            or why_no_memory(problem, self.workspace(problem, config, gpu), gpu)
            or (why_redundant(problem, genes) if redundant else None)
        )

    def why_too_long(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        genes = LatentColumnsGenes.of(config)
        rows = row_tiles(problem, genes) * problem.kv_heads * problem.batch
        if rows * (problem.seqlen_k // genes.BLOCK_N + 2) >= 1 << 31:
            return f"latent_columns counts tiles of {genes.BLOCK_N} keys of all {rows} tiles of rows in int32."
        return None

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes, dtype = LatentColumnsGenes.of(config), problem.dtype
        given = printed(VARIANT=variant_given(problem), SCALE=scale_given(problem, "v"))
        return super().constants(problem, config, gpu) | {
            **given,
            "EIGHT_BITS": bool(problem.kv),
            "SCALE_COLUMNS": SCALE_COLUMNS,
            "SMEM_BYTES": smem_bytes(problem, genes),
            "WGMMA_KQ": wgmma_function("wgmma_kq", genes.BLOCK_M, dtype, a_in_registers=False, b_transposed=False),
            "WGMMA_VP": wgmma_function(
                "wgmma_vp", genes.BLOCK_M, dtype, a_in_registers=False, b_transposed=False, a_transposed=True
            ),
        }

    def why_outdated(self, config: KernelConfig, source: str) -> str | None:
        if "constexpr bool EIGHT_BITS = true;" in source and "copy_scales" not in source:
            return "It has two places for Q, in shared memory that today's launches leave out."
        return super().why_outdated(config, source)

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes, p = LatentColumnsGenes.of(config), problem
        results = Buffer(PARTIAL), Buffer(STATE), Buffer(SHARERS)
        maps = _rows_map(p, genes), *self.key_maps(p, genes.LOAD_KEYS if p.kv else genes.BLOCK_N)
        args = self.first_args(p, maps, results, p.batch, p.kv_heads, p.seqlen_q, p.seqlen_k, p.group_size)
        args += passed(scale_given(p, "v"))
        first = KernelLaunch(self.name, (gpu.sm_count, 1, 1), (threads(p), 1, 1), smem_bytes(p, genes), args)
        return first, self.merge_launch(p, results, overlaps=True)

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        genes = LatentColumnsGenes.of(config)
        results = 2 * gpu.sm_count * genes.BLOCK_M
        rows = row_tiles(problem, genes) * problem.kv_heads * problem.batch
        return {PARTIAL: results * problem.head_dim_v * 4, STATE: results * 8, SHARERS: rows * 8}

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, LatentColumnsGenes.of(config), registers)


def _rows_map(problem: AttentionProblem, genes: LatentColumnsGenes) -> TensorMap:
    """The map of Q whose rows are heads of queries: all 64-column chunks in one box."""
    batch, heads, seqlen, head_dim = problem.shape("q")
    batch_bytes, head_bytes, row_bytes = (stride * problem.element_bytes for stride in problem.strides("q")[:3])
    chunks = head_dim // CHUNK_COLUMNS
    return TensorMap(
        "q",
        problem.dtype,
        (CHUNK_COLUMNS, heads, seqlen, chunks, batch),
        (head_bytes, row_bytes, ROW_BYTES, batch_bytes),
        (CHUNK_COLUMNS, genes.heads, genes.QUERIES, chunks, 1),
    )


LEAST_STAGES = 2
"""With fewer no key comes while others are used, but of 8 bits, which are loaded elsewhere."""


def why_too_big(problem: AttentionProblem, genes: LatentColumnsGenes, gpu: GpuSpec) -> str | None:
    """Shared memory and registers against the limits of the GPU."""
    if (smem := smem_bytes(problem, genes)) > gpu.smem_per_block:
        return (
            f"BLOCK_M={genes.BLOCK_M} STAGES={genes.STAGES} need {smem} bytes of shared memory; {gpu.name} gives "
            f"a block {gpu.smem_per_block}."
        )
    most = REGISTERS_BESIDE_CONVERTERS if problem.kv else MAX_REGISTERS
    if (needed := registers_needed(problem, genes)) > most:
        return f"BLOCK_M={genes.BLOCK_M} needs about {needed} registers per thread, which can have {most}."
    return None


def why_redundant(problem: AttentionProblem, genes: LatentColumnsGenes) -> str | None:
    """Configs that do on this problem what a smaller one does."""
    heads = f"BLOCK_M={genes.BLOCK_M} and QUERIES={genes.QUERIES} have {genes.heads} heads"
    if genes.BLOCK_M > 16 and 2 * problem.group_size <= genes.heads:
        return f"{heads} of a query, and with {problem.group_size} half of the tile or more is left without work."
    if 2 * problem.seqlen_q <= genes.QUERIES:
        return f"QUERIES={genes.QUERIES} for {problem.seqlen_q} leaves half of the tile or more without work."
    if genes.STAGES < LEAST_STAGES and not problem.kv:
        return f"STAGES={genes.STAGES}: no key comes while others are used."
    if (genes.LOADED > 1 or genes.LOAD_KEYS != 16) and not problem.kv:
        return f"LOADED={genes.LOADED} LOAD_KEYS={genes.LOAD_KEYS}: keys of 16 bits are loaded where they are used."
    tiles = -(-problem.seqlen_k // genes.BLOCK_N) * row_tiles(problem, genes)
    if tiles < genes.STAGES > LEAST_STAGES:
        return f"STAGES={genes.STAGES} is more than the {tiles} tiles of {genes.BLOCK_N} keys of a head."
    return None
