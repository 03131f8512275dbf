"""Flash attention on tensor cores by mma.sync m16n8k16: one kernel, one pass over the keys, sm_80 and newer."""

import math
from typing import Any, ClassVar

from evoattn.families.base import ZEROED_SUFFIX, Family, attention_args
from evoattn.families.block_list import block_list_constants, list_given, why_not_listed
from evoattn.families.dealt import batches, row_blocks
from evoattn.families.flash_mma.resources import (
    FlashMmaGenes,
    block_warps,
    launch_work,
    registers_needed,
    results_bytes,
    ring_stages,
    smem_bytes,
)
from evoattn.families.given import Given, passed, printed, tensor
from evoattn.families.mask_blocks import pack_launches, pack_work, packed_bytes
from evoattn.families.residency import WARP, why_no_memory, why_not_resident, why_same_code, why_too_few_registers
from evoattn.families.variants import lse_given, scale_constants, scale_given, variant_constants, variant_given
from evoattn.families.work import LaunchWork
from evoattn.model.gpu import MAX_GRID_YZ, GpuSpec
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import PER_TOKEN
from evoattn.model.space import KernelConfig, Value
from evoattn.model.variant import EIGHT_BITS, KEY_VARIANTS, SCORE_VARIANTS

MIN_HEAD_DIM, MAX_HEAD_DIM, EIGHT_BIT_STEP = 16, 256, 32
FIRST_E4M3 = 8, 9
"""The compute capability from which mma.sync multiplies e4m3."""
WIDE_HEAD_DIM, RECIPE_KEYS = 128, {False: 64, True: 32}
"""BLOCK_N of rows of the same bits in every batch, by whether a head_dim is wider."""
E4M3, INT8 = "e4m3", "int8"
"""The dtypes of 8 bits that Q may have: e4m3 where there is no wgmma of it; of int8 weights and V have 16 bits."""
RESULTS, ARRIVED = "results", "arrived" + ZEROED_SUFFIX
HAS_WGMMA = "sm_90a"
"""Whose such rows flash_wgmma computes."""


class FlashMma(Family):
    """The `Family` of `templates/flash_mma.cu.j2`."""

    name: ClassVar[str] = "flash_mma"
    genes = FlashMmaGenes
    summary: ClassVar[str] = "tensor cores by mma.sync, ldmatrix and cp.async; fp16, bf16, int8, from sm_89 on e4m3"
    devices: ClassVar[str] = "sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16", E4M3, INT8)
    writes_lse: ClassVar[bool] = True
    variants: ClassVar[tuple[str, ...]] = (
        *SCORE_VARIANTS,
        "value_dim",
        "shared_kv",
        *KEY_VARIANTS,
        "varlen",
        "blocks",
        *EIGHT_BITS,
    )

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        dims = problem.head_dim, problem.head_dim_v
        if reason := self.why_too_old(gpu) or self.why_no_head_dim(MIN_HEAD_DIM, MAX_HEAD_DIM, *dims):
            return reason
        if problem.element.bytes == 1 and (reason := why_not_all_eight(problem, gpu)):
            return reason
        eight = problem.kv or problem.element.bytes == 1
        if eight and (problem.head_dim % EIGHT_BIT_STEP or problem.head_dim_v % EIGHT_BIT_STEP):
            return f"flash_mma takes K and V of 8 bits with head_dims that are multiples of {EIGHT_BIT_STEP}."
        if eight and (problem.shared_kv or problem.blocks):
            return "flash_mma takes K and V of 8 bits without a block list, and no V within K."
        return self.why_past_grid(max(problem.heads, batches(problem)))

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = FlashMmaGenes.of(config)
        return (
            why_wrong_shape(genes)
            or why_not_eight_bits(problem, genes)
            or why_coarse_sums(problem, genes)
            or why_wrong_ring(genes)
            or why_not_listed(problem, genes.BLOCK_M, genes.BLOCK_N)
            or why_not_all_keys(problem, genes)
            or (why_redundant(problem, genes, gpu) if redundant else None)
            or why_too_big(problem, genes, gpu)
            or why_no_memory(problem, self.workspace(problem, config, gpu), gpu)
        )

    def recipe(self, problem: AttentionProblem, gpu: GpuSpec) -> dict[str, Value]:
        if gpu.arch == HAS_WGMMA or problem.dtype not in self.dtypes or problem.element.bytes == 1:
            return {}
        wide = max(problem.head_dim, problem.head_dim_v) > WIDE_HEAD_DIM
        return {"BLOCK_N": RECIPE_KEYS[wide], "KEY_WARPS": 1, "KEY_SPLIT": 1, "RESCALE": "always", "ROW_SUM": "add"}

    def row_bits(self, problem: AttentionProblem, config: KernelConfig) -> tuple[Value, ...] | None:
        """A row meets its tiles of keys, which begin at multiples of BLOCK_N, from the first to the last; a tile in
        which it sees no key leaves it as it is, and so does a rescale that the maximum of another row asks for."""
        genes = FlashMmaGenes.of(config)
        # A lazy shift is raised in masked tiles in another way; other rows say where a block's part of the keys begins.
        if problem.blocks or genes.RESCALE == "lazy" or genes.KEY_SPLIT > 1:
            return None
        rescale = "always" if genes.RESCALE == "vote" else genes.RESCALE
        return genes.BLOCK_N, genes.KEY_WARPS, genes.KEY_SPLIT, rescale, genes.ROW_SUM

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = FlashMmaGenes.of(config)
        order = genes.BLOCK_ORDER
        k_stages, v_stages = ring_stages(genes)
        return {
            "ELEMENT": problem.answer.cuda,
            "QUERY_ELEMENT": problem.element.cuda,
            **variant_constants(problem),
            **scale_constants(problem),
            **block_list_constants(problem),
            **printed(**given(problem, genes)),
            "SCHEDULE": genes.SCHEDULE.removesuffix("_short_v").upper(),
            "K_STAGES": k_stages,
            "V_STAGES": v_stages,
            "SWIZZLED": genes.SMEM_LAYOUT == "swizzled",
            "SUM_BY_MMA": genes.ROW_SUM == "mma",
            "O_THROUGH_SHARED": genes.O_STORE == "shared",
            "HEADS_FASTEST": order.startswith("heads"),
            "ROWS_REVERSED": order.endswith("reversed"),
            "SMEM_BYTES": smem_bytes(problem, genes),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes = FlashMmaGenes.of(config)
        rows, batch = row_blocks(problem, genes.BLOCK_M), batches(problem)
        heads_fastest = genes.BLOCK_ORDER.startswith("heads")
        split = genes.KEY_SPLIT
        grid = (problem.heads * split, batch, rows) if heads_fastest else (rows * split, problem.heads, batch)
        args = attention_args(problem) + passed(*given(problem, genes).values())
        before, threads, smem = pack_launches(problem), (WARP * block_warps(genes), 1, 1), smem_bytes(problem, genes)
        overlaps = bool(before) and gpu.capability >= (9, 0)
        return *before, KernelLaunch(self.name, grid, threads, smem, args, overlaps=overlaps)

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        genes = FlashMmaGenes.of(config)
        if genes.KEY_SPLIT == 1:
            return packed_bytes(problem)
        tiles = row_blocks(problem, genes.BLOCK_M) * problem.heads * batches(problem)
        return {RESULTS: results_bytes(problem, genes, tiles), ARRIVED: tiles * 4}

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return *pack_work(problem), *launch_work(problem, FlashMmaGenes.of(config), registers)


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


def why_not_all_eight(problem: AttentionProblem, gpu: GpuSpec) -> str | None:
    """What Q, K and V of 8 bits lack here."""
    if problem.dtype == E4M3 and (gpu.capability < FIRST_E4M3 or gpu.arch == HAS_WGMMA):
        return (
            f"flash_mma takes a Q of e4m3 from sm_89 on, but for {HAS_WGMMA}, where fp8_wgmma does, not on {gpu.arch}."
        )
    if problem.kv:
        return f"flash_mma takes K and V of {problem.dtype} beside such a Q, not of {problem.kv}."
    if problem.scales not in ("", "head"):
        return f"flash_mma takes scales of tensors or of heads beside such a Q, not of each {problem.scales}."
    return None


def why_not_eight_bits(problem: AttentionProblem, genes: FlashMmaGenes) -> str | None:
    """How queries lie beside K and V of 8 bits, and sums of weights that have a part of their scale."""
    if problem.dtype == E4M3 and (genes.RESCALE == "lazy" or genes.ROW_SUM != "add"):
        return (
            f"RESCALE={genes.RESCALE} ROW_SUM={genes.ROW_SUM}: weights of e4m3 are up to a power of two, and summed as "
            "they are (always or vote, and add)."
        )
    if problem.dtype == E4M3 and genes.BLOCK_N % (EIGHT_BIT_STEP * genes.KEY_WARPS):
        steps = f"steps of {EIGHT_BIT_STEP} for KEY_WARPS={genes.KEY_WARPS}"
        return f"BLOCK_N={genes.BLOCK_N} keys do not divide into {steps}."
    if (problem.kv or problem.element.bytes == 1) and genes.Q_PLACE != "direct":
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


def given(problem: AttentionProblem, genes: FlashMmaGenes) -> dict[str, list[Given]]:
    """What kernels take behind `attention_args`. KEY_SPLIT: `SplitResults` in `templates/flash_mma/key_split.cuh`."""
    results = tensor("float4", "results_gmem", RESULTS), tensor("uint32_t", "arrived_zeroed", ARRIVED)
    return {
        "KEY_SPLIT": [*results] if genes.KEY_SPLIT > 1 else [],
        "LSE": lse_given(problem),
        "VARIANT": variant_given(problem),
        "QUERY_SCALE": scale_given(problem, "q"),
        "SCALE": scale_given(problem, *"kv"),
        "KEY_LIST": list_given(problem),
    }


def why_not_all_keys(problem: AttentionProblem, genes: FlashMmaGenes) -> str | None:
    """Warps that share a listed tile: one of them may have no key of the first FULL tile, and a lazy shift no score.
    Blocks that share the tiles of a list."""
    if problem.blocks and genes.KEY_WARPS > 1:
        return f"KEY_WARPS={genes.KEY_WARPS}: with a block list one warp takes all keys of a tile."
    if problem.blocks and genes.KEY_SPLIT > 1:
        return f"KEY_SPLIT={genes.KEY_SPLIT}: a block takes all tiles of keys that a block list names."
    return None


def why_redundant(problem: AttentionProblem, genes: FlashMmaGenes, gpu: GpuSpec) -> str | None:
    """Configs that do what a smaller one does."""
    block_m, block_n, key_warps, order = (genes.BLOCK_M, genes.BLOCK_N, genes.KEY_WARPS, genes.BLOCK_ORDER)
    rows, all_tiles = row_blocks(problem, block_m), math.ceil(problem.seqlen_k / block_n)
    tiles, heads = math.ceil(all_tiles / genes.KEY_SPLIT), problem.heads * batches(problem)
    if block_m > 16 and block_m >= 2 * problem.seqlen_q:
        return f"BLOCK_M={block_m} for {problem.seqlen_q} queries leaves half of the block or more without work."
    if block_n > 16 * key_warps and block_n >= 2 * problem.seqlen_k:
        return f"BLOCK_N={block_n} for {problem.seqlen_k} keys leaves half of the tile or more without work."
    if problem.seqlen_k <= block_n // key_warps * (key_warps - 1):
        return (
            f"KEY_WARPS={key_warps}: with {problem.seqlen_k} keys in a tile of {block_n} the last key warp never sees "
            "one."
        )
    if genes.KEY_SPLIT > 1 and math.ceil(all_tiles / tiles) < genes.KEY_SPLIT:
        return (
            f"KEY_SPLIT={genes.KEY_SPLIT} leaves blocks without work: {problem.seqlen_k} keys make {all_tiles} tiles "
            f"of {block_n}."
        )
    if genes.KEY_SPLIT > 1 and rows * heads > gpu.sm_count * genes.BLOCKS_PER_SM:
        return f"KEY_SPLIT={genes.KEY_SPLIT}: the {rows * heads} tiles of rows fill the SMs without it."
    if tiles == 1 and (genes.SCHEDULE != "split" or genes.RESCALE != "always"):
        return (
            f"All {problem.seqlen_k} keys are one tile of {block_n} a block: SCHEDULE and RESCALE must be split and "
            "always, to do nothing."
        )
    if tiles < genes.STAGES:
        return f"STAGES={genes.STAGES} is more than the {tiles} tiles of {block_n} that a block takes."
    if order.endswith("reversed") and not problem.causal:
        return f"BLOCK_ORDER={order} only matters with a causal mask: without one all row blocks take the same time."
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
