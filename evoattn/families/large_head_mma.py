"""Flash attention for a head_dim beyond 256 on tensor cores by mma.sync: K and V in chunks, sm_80 and newer."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from evoattn.families.base import attention_args, why_no_lse
from evoattn.families.residency import WARP, why_not_resident, why_same_code, why_too_few_registers
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

MIN_HEAD_DIM, MAX_HEAD_DIM = 264, 2048
ELEMENT_TYPES = {"fp16": "Fp16", "bf16": "Bf16"}
ELEMENT_BYTES = 2
CHUNK = 8
"""Elements of 16 bytes, which one lane copies at a time."""
MAX_WARPS = 16
FIXED_REGISTERS = 40
"""Addresses, counters, bounds, fragments of K and V under way."""
ROW_TILE_REGISTERS = 16
"""Shifts, sums and the fragment of Q or P of one tile of 16 rows."""
WIDE_CHUNK, WIDE_CHUNK_REGISTERS = 128, 12
"""What ptxas loads ahead for one tile of 16 rows from a DIM_CHUNK of this width on."""


def _warps(config: KernelConfig) -> int:
    return config["ROW_WARPS"] * config["COLUMN_WARPS"]


def _slice(problem: AttentionProblem, config: KernelConfig) -> int:
    """Columns of O that one block has."""
    return problem.head_dim // config["DV_SPLIT"]


def _in_cluster(config: KernelConfig) -> bool:
    return config["SCORES"] == "cluster"


def _dim_blocks(problem: AttentionProblem, config: KernelConfig) -> int:
    """Blocks of 16 columns of O that one warp has."""
    return math.ceil(_slice(problem, config) / (16 * config["COLUMN_WARPS"]))


def _row_bytes(config: KernelConfig, elements: int) -> int:
    """Bytes of a row of `elements` in shared memory, with a padding chunk if it is not swizzled."""
    return ELEMENT_BYTES * (elements + (CHUNK if config["SMEM_LAYOUT"] == "padded" else 0))


def _dim_steps(problem: AttentionProblem, config: KernelConfig) -> int:
    """Chunks that a tile of K comes in: of all columns, or of the block's slice."""
    return math.ceil((_slice(problem, config) if _in_cluster(config) else problem.head_dim) / config["DIM_CHUNK"])


def stage_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    """One place of the ring: a chunk of K, with one of Q if that is streamed, or a chunk of V."""
    rows = config["BLOCK_N"] + (config["BLOCK_M"] if config["Q_PLACE"] == "streamed" else 0)
    v_columns = 16 * config["COLUMN_WARPS"] * _dim_blocks(problem, config)
    return max(rows * _row_bytes(config, config["DIM_CHUNK"]), config["KEY_CHUNK"] * _row_bytes(config, v_columns))


def q_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    """Q of a block, in chunks as wide as those of K."""
    if config["Q_PLACE"] == "streamed":
        return 0
    return _dim_steps(problem, config) * config["BLOCK_M"] * _row_bytes(config, config["DIM_CHUNK"])


def smem_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    """Dynamic shared memory of a block: the ring, Q, P, two tiles of partial scores in a cluster, and a float for each row and column warp
    if there are several of these."""
    block_m, column_warps = config["BLOCK_M"], config["COLUMN_WARPS"]
    p = config["BLOCK_N"] // config["KEY_CHUNK"] * block_m * _row_bytes(config, config["KEY_CHUNK"])
    partials = 2 * 4 * block_m * config["BLOCK_N"] if _in_cluster(config) else 0
    rows = 4 * block_m * column_warps if column_warps > 1 else 0
    return config["STAGES"] * stage_bytes(problem, config) + q_bytes(problem, config) + p + partials + rows


def registers_needed(problem: AttentionProblem, config: KernelConfig) -> int:
    """Estimate of the registers a thread below which ptxas spills: the accumulators of O and S beside what a tile of 16 rows needs.

    Fitted to NVRTC 13.0 on sm_89 and sm_90a.
    """
    row_tiles = config["BLOCK_M"] // (16 * config["ROW_WARPS"])
    accumulators = 8 * _dim_blocks(problem, config) + config["BLOCK_N"] // config["COLUMN_WARPS"] // 2
    ahead = WIDE_CHUNK_REGISTERS if config["DIM_CHUNK"] >= WIDE_CHUNK else 0
    return row_tiles * (accumulators + ROW_TILE_REGISTERS + ahead) + FIXED_REGISTERS


def _why_wrong_shape(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
    """Tiles and chunks that are not whole, and warps that have nothing to do."""
    block_m, block_n, row_warps, column_warps = (
        config[name] for name in ("BLOCK_M", "BLOCK_N", "ROW_WARPS", "COLUMN_WARPS")
    )
    threads, columns = WARP * _warps(config), 16 * column_warps * _dim_blocks(problem, config)
    if block_m % (16 * row_warps):
        return f"BLOCK_M={block_m} rows do not divide into tiles of 16 for ROW_WARPS={row_warps}."
    if block_n % (16 * column_warps):
        return f"BLOCK_N={block_n} keys do not divide into steps of 16 for COLUMN_WARPS={column_warps}."
    if block_n % config["KEY_CHUNK"]:
        return f"BLOCK_N={block_n} keys do not divide into chunks of KEY_CHUNK={config['KEY_CHUNK']}."
    if problem.head_dim % (CHUNK * config["DV_SPLIT"]):
        return f"DV_SPLIT={config['DV_SPLIT']} does not divide head_dim {problem.head_dim} into whole chunks of {CHUNK} elements."
    if _in_cluster(config) and config["DV_SPLIT"] == 1:
        return "SCORES=cluster does not go with DV_SPLIT=1: one block has all the scores."
    if _in_cluster(config) and gpu.capability < (9, 0):
        return f"SCORES=cluster needs the clusters of sm_90, and {gpu.name} is {gpu.arch}."
    if _warps(config) > MAX_WARPS:
        return f"ROW_WARPS={row_warps} times COLUMN_WARPS={column_warps} is over {MAX_WARPS} warps, with which a thread has 128 registers."
    if max(columns, config["DIM_CHUNK"]) > CHUNK * threads:
        return f"A row of a chunk has {max(columns, config['DIM_CHUNK']) // CHUNK} vectors, more than the {threads} threads that copy it."
    if columns - _slice(problem, config) >= columns // 4:
        return f"COLUMN_WARPS={column_warps} take {columns} columns for a slice of {_slice(problem, config)}: a quarter or more are zeros."
    return None


def _why_redundant(problem: AttentionProblem, config: KernelConfig) -> str | None:
    """Configs that do what a smaller one does."""
    block_m, block_n, order = (config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_ORDER"))
    rows, tiles = math.ceil(problem.seqlen_q / block_m), math.ceil(problem.seqlen_k / block_n)
    if block_m > 16 and block_m >= 2 * problem.seqlen_q:
        return f"BLOCK_M={block_m} for {problem.seqlen_q} queries leaves half of the block or more without work."
    if block_n > 16 * config["COLUMN_WARPS"] and block_n >= 2 * problem.seqlen_k:
        return f"BLOCK_N={block_n} for {problem.seqlen_k} keys leaves half of the tile or more without work."
    chunks = _dim_steps(problem, config) + block_n // config["KEY_CHUNK"]
    if config["STAGES"] > tiles * chunks:
        return f"STAGES={config['STAGES']} is more than the {tiles * chunks} chunks that {problem.seqlen_k} keys make."
    if tiles == 1 and config["RESCALE"] != "always":
        return (
            f"All {problem.seqlen_k} keys are one tile of {block_n}: RESCALE must be always, which then does nothing."
        )
    if order.endswith("reversed") and not problem.causal:
        return f"BLOCK_ORDER={order} only matters with a causal mask: without one all row blocks take the same time."
    if order != "rows" and (rows == 1 or (order == "heads" and problem.heads * problem.batch == 1)):
        return f"BLOCK_ORDER={order} is the same order as rows for {rows} row blocks of {problem.heads * problem.batch} heads."
    return None


def _why_too_big(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
    """Shared memory, threads and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    blocks, warps, smem = config["BLOCKS_PER_SM"], _warps(config), smem_bytes(problem, config)
    if smem > gpu.smem_per_block:
        return (
            f"The block needs {smem} bytes of shared memory, {q_bytes(problem, config)} of them for Q and "
            f"{stage_bytes(problem, config)} for each of STAGES={config['STAGES']} chunks; {gpu.name} gives it {gpu.smem_per_block}."
        )
    return (
        why_not_resident(gpu, blocks, warps, smem)
        or why_same_code(blocks, warps)
        or why_too_few_registers(blocks, warps, registers_needed(problem, config))
    )


class LargeHeadMma:
    """The `Family` of `templates/large_head_mma.cu.j2`: any lengths, grouped heads, three masks, fp16 and bf16."""

    name: ClassVar[str] = "large_head_mma"
    summary: ClassVar[str] = "tensor cores by mma.sync for a head_dim beyond 256: K and V in chunks; fp16 and bf16"
    devices: ClassVar[str] = "sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = tuple(ELEMENT_TYPES)

    def why_unsupported(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if problem.dtype not in self.dtypes:
            return (
                f"large_head_mma takes {' and '.join(self.dtypes)}, not {problem.dtype}: the tensor cores have no fp32."
            )
        if gpu.capability < (8, 0):
            return f"large_head_mma needs mma.m16n8k16 and cp.async of sm_80 and newer, and {gpu.name} is {gpu.arch}."
        if not MIN_HEAD_DIM <= problem.head_dim <= MAX_HEAD_DIM:
            return f"large_head_mma takes a head_dim of {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {problem.head_dim}."
        return why_no_lse(self.name, problem)

    def why_invalid(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return (
            self.why_unsupported(problem, gpu)
            or _why_wrong_shape(problem, config, gpu)
            or _why_redundant(problem, config)
            or _why_too_big(problem, config, gpu)
        )

    def why_impossible(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return (
            self.why_unsupported(problem, gpu)
            or _why_wrong_shape(problem, config, gpu)
            or _why_too_big(problem, config, gpu)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        order = config["BLOCK_ORDER"]
        same = (
            "BLOCK_M",
            "BLOCK_N",
            "DV_SPLIT",
            "ROW_WARPS",
            "COLUMN_WARPS",
            "DIM_CHUNK",
            "KEY_CHUNK",
            "STAGES",
            "BLOCKS_PER_SM",
        )
        return {name: config[name] for name in same} | {
            "ELEMENT": ELEMENT_TYPES[problem.dtype],
            "HEAD_DIM": problem.head_dim,
            **problem.masking.constants(),
            "IN_CLUSTER": _in_cluster(config),
            "CLUSTER_DIMS": f"__cluster_dims__({config['DV_SPLIT']}, 1, 1)" if _in_cluster(config) else "",
            "Q_STREAMED": config["Q_PLACE"] == "streamed",
            "SWIZZLED": config["SMEM_LAYOUT"] == "swizzled",
            "RESCALE": config["RESCALE"].upper(),
            "HEADS_FASTEST": order.startswith("heads"),
            "ROWS_REVERSED": order.endswith("reversed"),
            "SMEM_BYTES": smem_bytes(problem, config),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        blocks = math.ceil(problem.seqlen_q / config["BLOCK_M"]) * problem.heads * problem.batch * config["DV_SPLIT"]
        smem, cluster = smem_bytes(problem, config), (config["DV_SPLIT"] if _in_cluster(config) else 1, 1, 1)
        return (
            KernelLaunch(
                self.name, (blocks, 1, 1), (WARP * _warps(config), 1, 1), smem, attention_args(problem), cluster
            ),
        )

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        return {}
