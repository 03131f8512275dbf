"""Attention for few query rows and many keys: the keys are split over warps and blocks, and partial results are added up."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from evoattn.families.base import ZEROED_SUFFIX, attention_args, why_no_lse
from evoattn.families.flash_wgmma.family import tile_map
from evoattn.families.residency import WARP, why_not_resident, why_same_code, why_too_few_registers
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar
from evoattn.model.problem import DTYPES, AttentionProblem
from evoattn.model.space import KernelConfig

MAX_HEAD_DIM = 256
ELEMENT_TYPES = {"fp16": "Fp16", "bf16": "Bf16", "fp32": "Fp32"}
MAX_WARPS = 16
FIXED_REGISTERS = {"mma": 44, "fma": 40}
"""Addresses, counters, bounds, states of the rows."""
LAST_BLOCK_REGISTERS = 88
"""Eight chunks and states under way while the splits are added up."""
MMA_ROWS, MMA_KEYS, MMA_LANES = 8, 16, 4
"""Rows, keys and lanes a key of the transposed m16n8k16."""
SPLIT_GRANULE = 16
"""Keys that a split is a multiple of."""
LEAST_SPLITS = 0.75
"""Share of SPLITS under which a smaller value of the space does the same; nearer ones are told apart by their launches."""
MERGE_THREADS = 128
MAX_CLUSTER = 8
"""Blocks a cluster that every sm_90 schedules (CUDA C++ Programming Guide, thread block clusters)."""
MAX_GRID_YZ = 65535
MAX_WAVES = 16
"""Waves of blocks beyond which splitting only adds partial results."""
TMA_VECTOR, TMA_KEYS, MAX_BOX_KEYS, TMA_ROW_BYTES = 16, 8, 256, 128
"""Of the 128-byte swizzle: bytes of a chunk, keys of a period, bytes of a row of a box; and the most rows of a box."""
PARTIAL, STATE, ARRIVED = "partial", "state", "arrived" + ZEROED_SUFFIX
UNUSED_BYTES = 16
"""Of a scratch buffer that no kernel touches."""


def _warp_keys(config: KernelConfig) -> int:
    return config["BLOCK_N"] // config["WARPS"]


def _vectors(problem: AttentionProblem, config: KernelConfig) -> tuple[int, int]:
    """Vectors of a row of K and of a row of V that a lane holds."""
    width, head_dim = config["VECTOR_BYTES"] // problem.element_bytes, problem.head_dim
    if config["COMPUTE"] == "fma":
        vectors = math.ceil(head_dim / (width * config["DOT_LANES"]))
        return vectors, vectors
    k_vectors = math.ceil(head_dim / 16) * 2 if width == 2 else math.ceil(head_dim / (4 * width))
    return k_vectors, math.ceil(head_dim / (8 * width))


def _tile_words(problem: AttentionProblem, config: KernelConfig) -> tuple[int, int]:
    """Registers a lane of its part of a warp's tile of K and of V."""
    words, keys = config["VECTOR_BYTES"] // 4, _warp_keys(config)
    k_rows, v_rows = (keys // 8, keys // 4) if config["COMPUTE"] == "mma" else 2 * (keys * config["DOT_LANES"] // WARP,)
    k_vectors, v_vectors = _vectors(problem, config)
    return k_rows * k_vectors * words, v_rows * v_vectors * words


def _cluster(config: KernelConfig) -> int:
    """Blocks a cluster."""
    return config["SPLITS"] if config["MERGE"] == "cluster" else 1


def smem_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    """Dynamic shared memory of a block: the rings of its warps, in their place later a result of each warp in fp32; two mbarriers (16
    bytes) for each stage of a ring that a tensor map fills; and a ticket, or, at a multiple of 16 bytes, four columns and a state (24
    bytes) of each item that the blocks of a cluster send.
    """
    rings, barriers, stages = 0, 0, config["WARPS"] * config["STAGES"]
    if config["LOAD"] == "cp_async":
        rings = stages * sum(_tile_words(problem, config)) * 4 * WARP
    elif config["LOAD"] == "tma":
        row_bytes = math.ceil(problem.head_dim * problem.element_bytes / TMA_ROW_BYTES) * TMA_ROW_BYTES
        rings, barriers = stages * 2 * _warp_keys(config) * row_bytes, stages * 16
    pitch = math.ceil(problem.head_dim / 32) * 32 * 4
    items, cluster = config["BLOCK_M"] * problem.head_dim // 4, _cluster(config)
    results = max(rings, config["WARPS"] * config["BLOCK_M"] * (pitch + 8)) + barriers
    return (
        math.ceil(results / 16) * 16 + cluster * math.ceil(items / (4 * cluster)) * 4 * 24
        if cluster > 1
        else results + 16
    )


def packed_rows(problem: AttentionProblem) -> int:
    """Query rows that share a K/V head."""
    return problem.group_size * problem.seqlen_q


def row_blocks(problem: AttentionProblem, config: KernelConfig) -> int:
    return math.ceil(packed_rows(problem) / config["BLOCK_M"])


def split_of(problem: AttentionProblem, config: KernelConfig) -> tuple[int, int]:
    """(splits, keys a split): SPLITS or fewer, each a multiple of `SPLIT_GRANULE` keys and none of them empty, but in a cluster, which is
    compiled for so many blocks.
    """
    keys = math.ceil(math.ceil(problem.seqlen_k / config["SPLITS"]) / SPLIT_GRANULE) * SPLIT_GRANULE
    return max(_cluster(config), math.ceil(problem.seqlen_k / keys)), keys


def _why_wrong_shape(problem: AttentionProblem, config: KernelConfig) -> str | None:
    """Tiles that are not whole for each warp, vectors that no row divides into."""
    block_m, block_n, warps, lanes, vector = (
        config[name] for name in ("BLOCK_M", "BLOCK_N", "WARPS", "DOT_LANES", "VECTOR_BYTES")
    )
    if problem.head_dim * problem.element_bytes % vector:
        return f"VECTOR_BYTES={vector} does not divide the {problem.head_dim * problem.element_bytes} bytes of a row."
    if config["COMPUTE"] == "mma":
        if problem.dtype == "fp32":
            return "COMPUTE=mma needs fp16 or bf16: the tensor cores have no fp32."
        if block_m % MMA_ROWS:
            return f"BLOCK_M={block_m} rows are no multiple of the {MMA_ROWS} that COMPUTE=mma takes at a time."
        if block_n % (warps * MMA_KEYS):
            return f"BLOCK_N={block_n} keys do not divide into steps of {MMA_KEYS} for WARPS={warps}."
        if lanes != MMA_LANES:
            return f"DOT_LANES={lanes}: with COMPUTE=mma the fragments put {MMA_LANES} lanes on a key."
        return None
    if block_n % (warps * WARP // lanes):
        return f"BLOCK_N={block_n} keys do not divide into steps of {WARP // lanes} for WARPS={warps} and DOT_LANES={lanes}."
    if lanes * vector >= 2 * problem.head_dim * problem.element_bytes:
        return f"DOT_LANES={lanes} lanes with vectors of {vector} bytes are twice what a row of {problem.head_dim} elements needs."
    return None


def _why_no_tensor_map(config: KernelConfig, gpu: GpuSpec) -> str | None:
    """What LOAD=tma asks for: Hopper, and tiles that its swizzle fits."""
    if config["LOAD"] != "tma":
        return None
    if gpu.capability < (9, 0):
        return f"LOAD=tma needs the tensor copy engine of sm_90, and {gpu.name} is {gpu.arch}."
    if config["VECTOR_BYTES"] != TMA_VECTOR:
        return f"VECTOR_BYTES={config['VECTOR_BYTES']}: with LOAD=tma a lane reads the {TMA_VECTOR}-byte chunks of the swizzle."
    keys = _warp_keys(config)
    if keys % TMA_KEYS or keys > MAX_BOX_KEYS:
        return (
            f"LOAD=tma: BLOCK_N={config['BLOCK_N']} over WARPS={config['WARPS']} makes boxes of {keys} keys, which must be a multiple of "
            f"{TMA_KEYS} up to {MAX_BOX_KEYS}."
        )
    return None


def _why_useless(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
    """Genes that do nothing beside the others, and configs that do what a smaller one does."""
    rows, block_m, block_n = packed_rows(problem), config["BLOCK_M"], config["BLOCK_N"]
    splits, keys = split_of(problem, config)
    if config["LOAD"] == "registers" and config["STAGES"] != 1:
        return f"STAGES={config['STAGES']}: LOAD=registers has room for one tile a warp and takes STAGES=1."
    if block_m > (MMA_ROWS if config["COMPUTE"] == "mma" else 1) and block_m >= 2 * rows:
        return f"BLOCK_M={block_m} for {rows} packed rows leaves half of the block or more without work."
    filled = math.ceil(problem.seqlen_k / keys)
    if filled <= config["SPLITS"] * LEAST_SPLITS:
        return f"SPLITS={config['SPLITS']} makes only {filled} of {keys} keys, as fewer SPLITS do."
    if reason := _why_not_on_card(config, gpu):
        return reason
    if keys <= block_n // config["WARPS"] * (config["WARPS"] - 1):
        return f"WARPS={config['WARPS']}: with {keys} keys a split in tiles of {block_n} the last warp never sees one."
    tiles = math.ceil(keys / block_n)
    if config["STAGES"] > tiles:
        return f"STAGES={config['STAGES']} is more than the {tiles} tiles of {block_n} keys that a split makes."
    if config["DEPENDENT_LAUNCH"] != "none" and (splits == 1 or config["MERGE"] != "kernel"):
        return (
            f"DEPENDENT_LAUNCH={config['DEPENDENT_LAUNCH']}: only MERGE=kernel with several SPLITS has a second launch to "
            "overlap."
        )
    if splits == 1:
        return (
            None
            if config["MERGE"] == "kernel"
            else "SPLITS=1 leaves nothing to merge: MERGE must be kernel, which then has no launch."
        )
    blocks = row_blocks(problem, config) * problem.kv_heads * problem.batch
    if blocks * (splits - 1) >= MAX_WAVES * gpu.sm_count * config["BLOCKS_PER_SM"]:
        return f"SPLITS={config['SPLITS']} of {blocks} blocks are more than {MAX_WAVES} waves on {gpu.sm_count} SMs."
    return None


def _why_not_on_card(config: KernelConfig, gpu: GpuSpec) -> str | None:
    """What the card lacks, whatever the problem."""
    if _cluster(config) > 1 and gpu.capability < (9, 0):
        return f"MERGE=cluster needs the clusters of sm_90, and {gpu.name} is {gpu.arch}."
    if _cluster(config) > MAX_CLUSTER:
        return f"SPLITS={config['SPLITS']}: with MERGE=cluster they are the blocks of a cluster, at most {MAX_CLUSTER}."
    if config["DEPENDENT_LAUNCH"] != "none" and gpu.capability < (9, 0):
        return (
            f"DEPENDENT_LAUNCH={config['DEPENDENT_LAUNCH']} needs griddepcontrol of sm_90 and newer, and {gpu.name} is "
            f"{gpu.arch}."
        )
    return None


def registers_needed(problem: AttentionProblem, config: KernelConfig) -> int:
    """Estimate of the registers a thread below which ptxas spills: O, Q, scores, and the tiles of K and V if they are loaded ahead."""
    k_words, v_words = _tile_words(problem, config)
    k_vectors, v_vectors = _vectors(problem, config)
    if config["COMPUTE"] == "mma":
        words, row_tiles = config["VECTOR_BYTES"] // 4, config["BLOCK_M"] // MMA_ROWS
        rows = row_tiles * (4 * v_vectors * words + k_vectors * words + _warp_keys(config) // 4 + 6)
    else:
        width = config["VECTOR_BYTES"] // problem.element_bytes
        rows = config["BLOCK_M"] * (2 * k_vectors * width + _warp_keys(config) * config["DOT_LANES"] // WARP + 2)
    if config["LOAD"] == "registers":
        tiles = k_words + v_words
    else:  # mma takes its operands out of the ring one by one, the CUDA cores a tile at once
        tiles = max(k_words, v_words) // (2 if config["COMPUTE"] == "mma" else 1)
    return max(
        rows + tiles + FIXED_REGISTERS[config["COMPUTE"]],
        LAST_BLOCK_REGISTERS if config["MERGE"] == "last_block" else 0,
    )


def _why_too_big(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
    """Shared memory, threads and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    blocks, warps, smem = config["BLOCKS_PER_SM"], config["WARPS"], smem_bytes(problem, config)
    if smem > gpu.smem_per_block:
        return f"The block needs {smem} bytes of shared memory; {gpu.name} gives a block {gpu.smem_per_block}."
    return (
        why_not_resident(gpu, blocks, warps, smem)
        or why_same_code(blocks, warps)
        or why_too_few_registers(blocks, warps, registers_needed(problem, config))
    )


class SplitKv:
    """The `Family` of `templates/split_kv.cu.j2`.

    A row is one query of one head; the rows of all heads that share a K/V head are packed into tiles of BLOCK_M, so that each byte of K and
    V is read once for all of them where they fit into one tile (decoding).
    """

    name: ClassVar[str] = "split_kv"
    summary: ClassVar[str] = (
        "keys split over warps and blocks, partial results merged; few queries and many keys; fp16, bf16 and fp32"
    )
    devices: ClassVar[str] = "sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = DTYPES

    def why_unsupported(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if gpu.capability < (8, 0):
            return f"split_kv needs mma.m16n8k16 and cp.async of sm_80 and newer, and {gpu.name} is {gpu.arch}."
        if problem.head_dim > MAX_HEAD_DIM:
            return f"split_kv takes a head_dim of up to {MAX_HEAD_DIM}, not {problem.head_dim}."
        if max(problem.kv_heads, problem.batch) > MAX_GRID_YZ:
            return f"split_kv takes at most {MAX_GRID_YZ} K/V heads and batches (grid y and z), not {max(problem.kv_heads, problem.batch)}."
        return why_no_lse(self.name, problem)

    def why_invalid(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return (
            self.why_unsupported(problem, gpu)
            or _why_wrong_shape(problem, config)
            or _why_no_tensor_map(config, gpu)
            or _why_useless(problem, config, gpu)
            or _why_too_big(problem, config, gpu)
        )

    def why_impossible(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return (
            self.why_unsupported(problem, gpu)
            or _why_wrong_shape(problem, config)
            or _why_no_tensor_map(config, gpu)
            or _why_not_on_card(config, gpu)
            or _why_too_big(problem, config, gpu)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        same = ("BLOCK_M", "BLOCK_N", "WARPS", "STAGES", "VECTOR_BYTES", "DOT_LANES", "BLOCKS_PER_SM")
        return {name: config[name] for name in same} | {
            "ELEMENT": ELEMENT_TYPES[problem.dtype],
            "HEAD_DIM": problem.head_dim,
            **problem.masking.constants(),
            "CLUSTER": _cluster(config),
            "CLUSTER_DIMS": f"__cluster_dims__({_cluster(config)}, 1, 1)" if _cluster(config) > 1 else "",
            "COMPUTE": config["COMPUTE"].upper(),
            "DEPENDENT_LAUNCH": config["DEPENDENT_LAUNCH"].upper(),
            "LOAD": config["LOAD"],
            "SWIZZLED": config["LOAD"] == "tma",
            "MERGE": config["MERGE"].upper(),
            "SMEM_BYTES": smem_bytes(problem, config),
            "MERGE_THREADS": MERGE_THREADS,
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        (splits, keys), blocks = split_of(problem, config), row_blocks(problem, config)
        sizes = (Scalar("int32", n) for n in (problem.group_size, blocks, splits, keys))
        args: list[KernelArg] = [*attention_args(problem), *sizes, Buffer(PARTIAL), Buffer(STATE), Buffer(ARRIVED)]
        if config["LOAD"] == "tma":
            args[1:3] = (tile_map(problem, tensor, _warp_keys(config)) for tensor in "kv")
        partial = KernelLaunch(
            self.name,
            (blocks * splits, problem.kv_heads, problem.batch),
            (WARP * config["WARPS"], 1, 1),
            smem_bytes(problem, config),
            tuple(args),
            (_cluster(config), 1, 1),
        )
        if splits == 1 or config["MERGE"] != "kernel":
            return (partial,)
        merge_args: list[KernelArg] = [Buffer("o")]
        merge_args += [
            Scalar("int32", n) for n in (problem.seqlen_q, problem.kv_heads, problem.group_size, blocks, splits)
        ]
        merge_args += [Scalar("int64", stride) for stride in problem.strides("o")[:3]]
        merge_args += [Buffer(PARTIAL), Buffer(STATE)]
        grid = (packed_rows(problem), problem.kv_heads, problem.batch)
        overlaps = config["DEPENDENT_LAUNCH"] != "none"
        return partial, KernelLaunch(
            f"{self.name}_merge", grid, (MERGE_THREADS, 1, 1), 0, tuple(merge_args), overlaps=overlaps
        )

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        (splits, _), tiles = split_of(problem, config), row_blocks(problem, config) * problem.kv_heads * problem.batch
        if splits == 1 or config["MERGE"] == "cluster":
            return {PARTIAL: UNUSED_BYTES, STATE: UNUSED_BYTES, ARRIVED: UNUSED_BYTES}
        rows = tiles * splits * config["BLOCK_M"]
        arrived = tiles * 4 if config["MERGE"] == "last_block" else UNUSED_BYTES
        return {PARTIAL: rows * problem.head_dim * 4, STATE: rows * 8, ARRIVED: arrived}
