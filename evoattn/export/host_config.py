"""What the C++ host code of a family is told of a kernel: the fields of `Config` in `templates/export/<family>.h`.

All of it depends on config, head_dim, dtype, mask and `lse` alone; what depends on lengths, batch, heads, strides and
the number of SMs is worked out in C++ when the kernel is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from evoattn.families.flash_mma import resources as mma
from evoattn.families.flash_mma.resources import FlashMmaGenes
from evoattn.families.flash_scalar import resources as scalar
from evoattn.families.flash_scalar.resources import FlashScalarGenes
from evoattn.families.flash_wgmma import resources as wgmma
from evoattn.families.flash_wgmma import resources as wgmma_registers
from evoattn.families.flash_wgmma.family import MAX_KEY_TILES, MAX_ROWS
from evoattn.families.flash_wgmma.resources import FlashWgmmaGenes
from evoattn.families.flash_wmma import resources as wmma
from evoattn.families.flash_wmma.resources import FlashWmmaGenes
from evoattn.families.gangs import IDLE, held_bytes
from evoattn.families.large_head import resources as large
from evoattn.families.large_head.resources import LargeHeadGenes
from evoattn.families.large_head_mma import resources as large_mma
from evoattn.families.large_head_mma.resources import LargeHeadMmaGenes
from evoattn.families.merge_work import MERGE_THREADS
from evoattn.families.residency import WARP
from evoattn.families.split_kv import resources as split
from evoattn.families.split_kv.family import UNUSED_BYTES
from evoattn.families.split_kv.resources import SplitKvGenes
from evoattn.families.three_kernel import resources as three
from evoattn.families.three_kernel.resources import ThreeKernelGenes
from evoattn.model.dtype import DTYPES
from evoattn.model.errors import WrongUse
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

Fields = dict[str, int | bool]
EXPORTED_L2 = GPUS["h100"].l2_bytes
"""Bytes of L2 that exported kernels reckon with: no card of sm_90 has fewer."""


def _flash_wgmma(problem: AttentionProblem, config: KernelConfig) -> Fields:
    genes = FlashWgmmaGenes.of(config)
    return {
        "block_m": genes.BLOCK_M,
        "block_n": genes.BLOCK_N,
        "blocks_per_sm": genes.BLOCKS_PER_SM,
        "key_split": genes.KEY_SPLIT,
        "cluster": wgmma.cluster_blocks(problem, genes),
        "merge_words": wgmma.merge_words(problem, genes) if wgmma.merges_in_memory(problem, genes) else 0,
        "heads_in_turn": wgmma.HEADS_IN_TURN[genes.TILE_ORDER],
        "warpgroups": wgmma_registers.warpgroups(genes),
        "warpgroup_rows": wgmma_registers.WARPGROUP_ROWS,
        "threads": wgmma_registers.threads(genes),
        "smem_bytes": wgmma.smem_bytes(problem, genes),
        "result_bytes": wgmma.result_bytes(problem),
        "max_key_tiles": MAX_KEY_TILES,
        "max_rows": MAX_ROWS,
        "held_bytes": held_bytes(EXPORTED_L2),
        "idle_part": IDLE,
        "persistent": wgmma.is_persistent(genes),
        "claimed": genes.SCHEDULE == "claimed",
        "balanced": genes.SCHEDULE == "balanced",
        "store_chunks": genes.STORE == "chunks",
        "group_rows": genes.GROUP_ROWS,
    }


def _flash_mma(problem: AttentionProblem, config: KernelConfig) -> Fields:
    genes = FlashMmaGenes.of(config)
    return {
        "block_m": genes.BLOCK_M,
        "threads": WARP * mma.block_warps(genes),
        "smem_bytes": mma.smem_bytes(problem, genes),
        "heads_fastest": genes.BLOCK_ORDER.startswith("heads"),
    }


def _flash_wmma(problem: AttentionProblem, config: KernelConfig) -> Fields:
    genes = FlashWmmaGenes.of(config)
    return {
        "block_m": genes.BLOCK_M,
        "threads": WARP * wmma.block_warps(genes),
        "smem_bytes": wmma.smem_bytes(problem, genes),
    }


def _flash_scalar(problem: AttentionProblem, config: KernelConfig) -> Fields:
    genes = FlashScalarGenes.of(config)
    return {
        "block_m": genes.BLOCK_M,
        "threads": scalar.block_threads(genes),
        "smem_bytes": scalar.smem_bytes(problem, genes),
    }


def _split_kv(problem: AttentionProblem, config: KernelConfig) -> Fields:
    genes = SplitKvGenes.of(config)
    return {
        "block_m": genes.BLOCK_M,
        "splits": genes.SPLITS,
        "warp_keys": split.warp_keys(genes),
        "threads": WARP * genes.WARPS,
        "merge_threads": MERGE_THREADS,
        "smem_bytes": split.smem_bytes(problem, genes),
        "unused_bytes": UNUSED_BYTES,
        "by_tensor_map": genes.LOAD == "tma",
        "merge_kernel": genes.MERGE == "kernel",
        "merge_last_block": genes.MERGE == "last_block",
        "merge_cluster": genes.MERGE == "cluster",
        "overlaps": genes.DEPENDENT_LAUNCH != "none",
    }


def _large_head(problem: AttentionProblem, config: KernelConfig) -> Fields:
    genes = LargeHeadGenes.of(config)
    scores_smem, smem = large.smem_bytes(problem, genes)
    return {
        "block_m": genes.BLOCK_M,
        "block_n": genes.BLOCK_N,
        "dim_split": genes.DIM_SPLIT,
        "threads": WARP * genes.WARPS,
        "scores_smem_bytes": scores_smem,
        "smem_bytes": smem,
        "fused": large.is_fused(genes),
        "in_cluster": genes.EXCHANGE == "cluster",
        "overlaps": genes.DEPENDENT_LAUNCH,
    }


def _large_head_mma(problem: AttentionProblem, config: KernelConfig) -> Fields:
    genes = LargeHeadMmaGenes.of(config)
    return {
        "block_m": genes.BLOCK_M,
        "dv_split": genes.DV_SPLIT,
        "threads": WARP * large_mma.block_warps(genes),
        "smem_bytes": large_mma.smem_bytes(problem, genes),
        "in_cluster": large_mma.in_cluster(genes),
    }


def _three_kernel(problem: AttentionProblem, config: KernelConfig) -> Fields:
    genes = ThreeKernelGenes.of(config)
    threads, tile_softmax = three.threads_a_block(genes), three.has_tile_softmax(genes)
    return {
        "block_m": genes.BLOCK_M,
        "block_n": genes.BLOCK_N,
        "tiles_a_block": genes.TILES_A_BLOCK,
        "rows_per_block": genes.ROWS_PER_BLOCK,
        "pv_block_m": genes.PV_BLOCK_M,
        "pv_block_k": genes.PV_BLOCK_K,
        "scores_threads": threads[0],
        "softmax_threads": threads[1],
        "values_threads": threads[2],
        "scores_smem_bytes": three.scores_smem_bytes(problem, genes),
        "values_smem_bytes": three.values_smem_bytes(problem, genes),
        "score_bytes": DTYPES[genes.S_TYPE].bytes,
        "score_map_dtype": DTYPES[problem.dtype if tile_softmax else genes.S_TYPE].tensor_map_code,
        "keys_a_maximum": genes.BLOCK_N // genes.WARPS_N,
        "own_p": genes.P_PLACE == "own",
        "tile_softmax": tile_softmax,
        "merges_late": three.merges_late(genes),
        "wgmma": three.uses_wgmma(genes),
        "overlaps": three.may_overlap(genes),
    }


Describe = Callable[[AttentionProblem, KernelConfig], Fields]
FIELDS: dict[str, Describe] = {
    "flash_wgmma": _flash_wgmma,
    "flash_mma": _flash_mma,
    "flash_wmma": _flash_wmma,
    "flash_scalar": _flash_scalar,
    "split_kv": _split_kv,
    "large_head": _large_head,
    "large_head_mma": _large_head_mma,
    "three_kernel": _three_kernel,
}
"""By the name of the family: those that have a `templates/export/<family>.h`."""


def host_config(problem: AttentionProblem, config: KernelConfig, fields: Mapping[str, Describe] = FIELDS) -> Fields:
    """The fields of `Config` by their names in C++.

    Raises `WrongUse` if the family has no host code, and `TypeError` or `KeyError` on a config that is not the
    family's.
    """
    if config.family not in fields:
        raise WrongUse(
            f"{config.family} has no host code in C++ yet; use --format check, or a kernel of {', '.join(FIELDS)}."
        )
    if config.params.get("PART_TILES"):
        raise WrongUse("Host code in C++ keeps no sums of parts of the keys (PART_TILES) yet; use --format check.")
    return {
        "head_dim": problem.head_dim,
        "element_bytes": problem.element_bytes,
        # A map of fp32 moves pairs of 16-bit columns.
        "map_dtype": DTYPES["bf16" if problem.dtype == "bf16" else "fp16"].tensor_map_code,
        "writes_lse": problem.lse,
        **fields[config.family](problem, config),
    }


def cpp_value(value: int | bool) -> str:
    """The value as C++ spells it."""
    return str(value).lower()
