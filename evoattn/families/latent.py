"""What families share that attend over a latent cache, whose V is the first columns of K, with the query heads of a
K/V head as the rows of a tile."""

import math
from typing import Any, ClassVar

from evoattn.families.base import Family, softmax_scale_log2
from evoattn.families.given import passed, printed
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, key_map, why_not_sliding
from evoattn.families.variants import variant_constants, variant_given
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import NULL, Buffer, KernelArg, KernelLaunch, Scalar, TensorMap
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.model.variant import KEY_VARIANTS, ROTARY_APART

ARCH = "sm_90a"
PARTIAL, STATE = "partial", "state"
"""Scratch buffers: results of blocks, O before the division in fp32, and two floats per row, its shift and its sum."""
MAX_VALUE_DIM = 512
"""Of V, whose sums in fp32 a warpgroup or two keep in registers."""


class Latent(Family):
    """A `Family` over such a cache, whose blocks share keys and leave results for a second launch to add up."""

    devices: ClassVar[str] = ARCH
    writes_lse: ClassVar[bool] = True
    variants: ClassVar[tuple[str, ...]] = ("value_dim", "shared_kv", ROTARY_APART, *KEY_VARIANTS)
    plain: ClassVar[bool] = False
    weighed_as: ClassVar[str] = "flash_wgmma"
    heads_are_rows: ClassVar[bool] = True
    value_columns: ClassVar[int]
    """Of V that a product takes at once."""
    merge_threads: ClassVar[int]
    """Of a block of the second launch."""

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        name, columns = self.name, self.value_columns
        if gpu.arch != ARCH:
            return f"{name} needs wgmma and tensor maps of {ARCH}, and {gpu.name} is {gpu.arch}."
        if not (problem.shared_kv or problem.rotary_apart):
            return f"{name} is for a V that is the first columns of K: take another family, or shared_kv=1."
        if problem.head_dim % CHUNK_COLUMNS or problem.head_dim_v % columns:
            return (
                f"{name} takes a head_dim of whole {CHUNK_COLUMNS} columns and of V of whole {columns}, not "
                f"{problem.head_dim} and {problem.head_dim_v}."
            )
        if problem.head_dim_v > MAX_VALUE_DIM:
            return f"{name} takes a head_dim of V of at most {MAX_VALUE_DIM}, not {problem.head_dim_v}."
        grid = max(problem.kv_heads, problem.batch)
        return self.why_past_grid(grid, "K/V heads and batches") or why_not_sliding(problem)

    def merge_smem_bytes(self, problem: AttentionProblem) -> int:
        """Of a block that merges one row: an O in fp32 of each group of threads, one for a chunk of four columns, in
        rows of eight chunks, and a shift and a sum (`split_merge.cuh`)."""
        chunks = problem.head_dim_v // 4
        return math.ceil(self.merge_threads / chunks) * (math.ceil(chunks / 8) * 8 * 16 + 8)

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        return {
            **variant_constants(problem),
            **printed(VARIANT=variant_given(problem)),
            "APART": problem.rotary_apart,
            "V_MAP": "v_map" if problem.rotary_apart else "k_map",
            "V_MAP_PARAMETER": ", const __grid_constant__ TensorMap v_map" if problem.rotary_apart else "",
            "MERGE_SMEM_BYTES": self.merge_smem_bytes(problem),
            "MERGE_THREADS": self.merge_threads,
        }

    def key_maps(self, problem: AttentionProblem, keys: int) -> tuple[TensorMap, ...]:
        """Of tiles of `keys` keys: of K; or of its last columns, and then of V."""
        return tuple(key_map(problem, tensor, keys) for tensor in ("kv" if problem.rotary_apart else "k"))

    def first_args(
        self, problem: AttentionProblem, maps: tuple[TensorMap, ...], results: tuple[KernelArg, ...], *sizes: int
    ) -> tuple[KernelArg, ...]:
        """Of the launch over the keys: maps of Q and K, O, the log-sum-exp, results for the second launch, sizes."""
        return (
            *(*maps, Buffer("o"), *_lse(problem), *results),
            *(Scalar("int32", size) for size in sizes),
            *(Scalar("int64", stride) for stride in problem.strides("o")[:3]),
            softmax_scale_log2(problem),
            *passed(variant_given(problem)),
        )

    def merge_launch(
        self, problem: AttentionProblem, results: tuple[KernelArg, ...], *sizes: int, overlaps: bool
    ) -> KernelLaunch:
        """A block for each row of O; `sizes` behind those of the problem."""
        grid = problem.seqlen_q * problem.group_size, problem.kv_heads, problem.batch
        args: tuple[KernelArg, ...] = (
            *(Buffer("o"), *_lse(problem), *results),
            *(Scalar("int32", n) for n in (problem.kv_heads, problem.seqlen_q, problem.group_size, *sizes)),
            *(Scalar("int64", stride) for stride in problem.strides("o")[:3]),
        )
        block, smem = (self.merge_threads, 1, 1), self.merge_smem_bytes(problem)
        return KernelLaunch(f"{self.name}_merge", grid, block, smem, args, overlaps=overlaps)


def _lse(problem: AttentionProblem) -> tuple[KernelArg]:
    return (Buffer("lse") if problem.lse else NULL,)


def row_blocks(problem: AttentionProblem, heads: int, queries: int = 1) -> int:
    """Tiles of rows of a K/V head, each of at most `heads` query heads of so many queries."""
    return math.ceil(problem.seqlen_q / queries) * math.ceil(problem.group_size / heads)
