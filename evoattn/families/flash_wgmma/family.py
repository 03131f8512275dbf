"""Flash attention on Hopper: tensor copies by a producer warp, wgmma by one to four consumer warpgroups; sm_90a only."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from evoattn.families.base import ZEROED_SUFFIX, softmax_scale_log2
from evoattn.families.flash_wgmma.registers import (
    WARPGROUP,
    WARPGROUP_ROWS,
    begins_ahead,
    moved_registers,
    producer_warps,
    registers_at_launch,
    registers_needed,
    threads,
    warpgroups,
    widest_wgmma,
)
from evoattn.families.flash_wgmma.text import wgmma_function
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar, TensorMap
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

ARCH = "sm_90a"
MAX_HEAD_DIM = 256
MAX_KEY_TILES = 1 << 15
"""Of a balanced schedule, which packs a range of them into a word (`key_share.cuh`)."""
ELEMENT_TYPES = {"fp16": "Fp16", "bf16": "Bf16"}
ELEMENT_BYTES = 2
MAP_STRIDE = 16
"""Bytes that the strides of a tensor map are multiples of."""
CHUNK_COLUMNS = 64
"""Columns of a tile that one row of 128 bytes holds: the widest box of the 128-byte swizzle."""
ROW_BYTES = CHUNK_COLUMNS * ELEMENT_BYTES
HEADS_IN_TURN = {"by_head": 1, "heads_4": 4, "heads_8": 8, "heads_16": 16, "all_heads": 0}
SCHEDULES = {"single": "SINGLE", "fixed": "FIXED", "claimed": "CLAIMED", "balanced": "BALANCED"}
STORES = {"tensor_map": "TENSOR_MAP", "rows": "ROWS", "chunks": "CHUNKS"}
O_CHUNK_PLACES = 2
"""Of 64 columns in shared memory, a warpgroup, with STORE=chunks."""
RESCALES = {"always": ("ALWAYS", 0), "lazy_5": ("LAZY", 5), "lazy_8": ("LAZY", 8), "lazy_after": ("LAZY_AFTER", 0)}
TILE_WORDS = 4
"""That say which tile of rows is next: its row block, head, batch and key tiles."""
COUNTERS, RESULTS = "counters" + ZEROED_SUFFIX, "results"
"""Scratch buffers: tiles claimed or results given, and results of blocks that share a tile of rows."""


def _persistent(config: KernelConfig) -> bool:
    return config["SCHEDULE"] != "single"


def _chunks(problem: AttentionProblem) -> int:
    return math.ceil(problem.head_dim / CHUNK_COLUMNS)


def _result_bytes(problem: AttentionProblem) -> int:
    """What a warpgroup hands to another one: O before the division, shifts and sums, head_dim / 2 + 4 floats a thread."""
    return WARPGROUP * (problem.head_dim // 2 + 4) * 4


def smem_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    """Dynamic shared memory of a block.

    Q, the rings of K and V, O or some chunks of it if the next Q loads before O has left, results of the other blocks of a cluster
    (head_dim / 2 + 4 floats a thread), barriers, what the producer says of two tiles.
    """
    row_bytes = _chunks(problem) * ROW_BYTES
    q_bytes = config["BLOCK_M"] * row_bytes
    o_chunks = (O_CHUNK_PLACES if config["STORE"] == "chunks" else _chunks(problem)) if _persistent(config) else 0
    o_bytes = o_chunks * config["BLOCK_M"] * ROW_BYTES
    partial_bytes = (config["KEY_SPLIT"] - 1) * warpgroups(config) * _result_bytes(problem)
    barriers = 8 * (2 * warpgroups(config) + 4 * config["STAGES"] + 1)
    return (
        q_bytes
        + 2 * config["STAGES"] * config["BLOCK_N"] * row_bytes
        + o_bytes
        + partial_bytes
        + barriers
        + 2 * TILE_WORDS * 4
    )


def _why_useless(problem: AttentionProblem, config: KernelConfig) -> str | None:
    """Genes that do nothing beside the others, so that the same kernel has one config only."""
    consumers = warpgroups(config)
    if config["PING_PONG"] and (consumers == 1 or not config["OVERLAP"]):
        return "PING_PONG needs two consumer warpgroups that take turns, and OVERLAP."
    if config["KEY_SPLIT"] > 1 and _persistent(config):
        return (
            f"KEY_SPLIT={config['KEY_SPLIT']} needs SCHEDULE=single: the blocks of a cluster work on one tile of rows."
        )
    if config["SCHEDULE"] == "balanced" and problem.causal:
        return "SCHEDULE=balanced needs mask=full: it gives blocks the same number of key tiles, of which a causal mask hides some."
    if config["RESCALE"] == "lazy_after" and config["POLYNOMIAL_EIGHTHS"]:
        return "RESCALE=lazy_after needs POLYNOMIAL_EIGHTHS=0: the polynomial holds up to 2^127 only, and does not show when it is passed."
    if config["STORE"] == "chunks" and not (_persistent(config) and _chunks(problem) > O_CHUNK_PLACES):
        columns = O_CHUNK_PLACES * CHUNK_COLUMNS
        return f"STORE=chunks needs blocks that take several tiles and a head_dim over {columns}: it is for an O too big to lie beside Q."
    if config["CAUSAL_SKIP"] and not (problem.causal and consumers > 1):
        return "CAUSAL_SKIP needs a causal mask and several warpgroups: one alone sees every key tile of its block."
    return None


def _why_redundant(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
    """Configs that do on this problem what a smaller one does."""
    block_m, block_n, order = config["BLOCK_M"], config["BLOCK_N"], config["TILE_ORDER"]
    row_blocks, heads = math.ceil(problem.seqlen_q / block_m), problem.heads * problem.batch
    key_tiles, split = math.ceil(problem.seqlen_k / block_n), config["KEY_SPLIT"]
    if block_m > WARPGROUP_ROWS and block_m >= 2 * problem.seqlen_q:
        return f"BLOCK_M={block_m} for {problem.seqlen_q} queries leaves half of the warpgroups or more without work."
    if block_n > 48 and block_n >= 2 * problem.seqlen_k:
        return f"BLOCK_N={block_n} for {problem.seqlen_k} keys leaves half of the tile or more without work."
    if split > key_tiles:
        return f"KEY_SPLIT={split} leaves blocks of a cluster without work: {problem.seqlen_k} keys make {key_tiles} tiles of {block_n}."
    if split > 1 and row_blocks * heads > gpu.sm_count * config["BLOCKS_PER_SM"]:
        return f"KEY_SPLIT={split}: the {row_blocks * heads} tiles of rows fill the SMs without it."
    if config["STAGES"] > math.ceil(key_tiles / split):
        return f"STAGES={config['STAGES']} is more than the {math.ceil(key_tiles / split)} tiles of {block_n} keys that a block takes."
    if order != "by_head" and (row_blocks == 1 or heads <= max(1, HEADS_IN_TURN[order])):
        return f"TILE_ORDER={order} is the order of another value for {row_blocks} row blocks of {heads} heads."
    if _persistent(config) and row_blocks * heads <= gpu.sm_count * config["BLOCKS_PER_SM"]:
        return f"SCHEDULE={config['SCHEDULE']}: the {row_blocks * heads} tiles are one wave, so that no block takes a second one."
    if config["SCHEDULE"] == "balanced" and row_blocks * heads % (gpu.sm_count * config["BLOCKS_PER_SM"]) == 0:
        return f"SCHEDULE=balanced: the {row_blocks * heads} tiles are whole waves, so that it is SCHEDULE=fixed."
    return None


def _why_too_long(problem: AttentionProblem, config: KernelConfig) -> str | None:
    """More key tiles than a balanced schedule can count."""
    key_tiles = math.ceil(problem.seqlen_k / config["BLOCK_N"])
    if config["SCHEDULE"] == "balanced" and key_tiles > MAX_KEY_TILES:
        return (
            f"SCHEDULE=balanced counts at most {MAX_KEY_TILES} tiles of keys: {problem.seqlen_k} keys make {key_tiles} "
            f"of {config['BLOCK_N']}."
        )
    return None


def _tiles_of(config: KernelConfig) -> str:
    return f"BLOCK_M={config['BLOCK_M']} BLOCK_N={config['BLOCK_N']} STAGES={config['STAGES']} KEY_SPLIT={config['KEY_SPLIT']}"


def _registers_of(config: KernelConfig) -> str:
    names = ("BLOCK_M", "BLOCK_N", "BLOCKS_PER_SM", "PRODUCER", "RESCALE", "SCHEDULE")
    names += ("Q_IN_REGISTERS",) if config["Q_IN_REGISTERS"] else ()
    return " ".join(f"{name}={config[name]}" for name in names)


def _why_too_big(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
    """Shared memory, threads and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    blocks, smem = config["BLOCKS_PER_SM"], smem_bytes(problem, config)
    if smem > gpu.smem_per_block:
        return f"{_tiles_of(config)} need {smem} bytes of shared memory; {gpu.name} gives a block {gpu.smem_per_block}."
    if blocks * (smem + gpu.smem_reserved_per_block) > gpu.smem_per_sm:
        return f"BLOCKS_PER_SM={blocks} with {_tiles_of(config)} need {smem} bytes and 1 KB each, over the {gpu.smem_per_sm} of an SM."
    launch, needed = registers_at_launch(config), registers_needed(problem, config)
    producer, consumer = moved_registers(config)
    if config["PRODUCER"] == "warpgroup" and (consumer <= launch or producer >= launch):
        return f"PRODUCER=warpgroup has no registers to give: BLOCK_M={config['BLOCK_M']} BLOCKS_PER_SM={blocks} starts with {launch}."
    if needed > (consumer or launch):
        return f"{_registers_of(config)} need about {needed} registers a consumer thread, which can have {consumer or launch}."
    widest = widest_wgmma(problem, config)
    if widest > launch:
        return f"One wgmma of {_registers_of(config)} needs {widest} registers a thread at launch, where there are {launch}."
    return None


def tile_map(problem: AttentionProblem, tensor: str, rows: int, by_chunks: bool = False) -> TensorMap:
    """The map of tiles of `rows` rows: all 64-column chunks in one box if head_dim is whole chunks, else, or `by_chunks`, a box a chunk.

    A dimension of chunks would run past the end of a row where the last chunk is not whole; without it columns past head_dim read zero.
    Maps are of 16-bit columns: an element of fp32 is two of them.
    """
    batch, heads, seqlen, head_dim = problem.shape(tensor)
    batch_bytes, head_bytes, row_bytes = (stride * problem.element_bytes for stride in problem.strides(tensor)[:3])
    columns, dtype = head_dim * problem.element_bytes // ELEMENT_BYTES, "bf16" if problem.dtype == "bf16" else "fp16"
    if columns % CHUNK_COLUMNS:
        shape, strides_bytes = (columns, seqlen, heads, batch), (row_bytes, head_bytes, batch_bytes)
        return TensorMap(tensor, dtype, shape, strides_bytes, (CHUNK_COLUMNS, rows, 1, 1))
    chunks = columns // CHUNK_COLUMNS
    return TensorMap(
        tensor,
        dtype,
        (CHUNK_COLUMNS, seqlen, chunks, heads, batch),
        (row_bytes, ROW_BYTES, head_bytes, batch_bytes),
        (CHUNK_COLUMNS, rows, 1 if by_chunks else chunks, 1, 1),
    )


def grid(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[int, int, int]:
    """Blocks: one wave if they are persistent, else KEY_SPLIT a tile of rows, in the dimensions that `block_tile.cuh` reads.

    Blocks of a balanced schedule wait for one another, so they all have to be resident: one wave. They are fewer than the tiles of rows, so
    that even a small problem has tiles that two blocks share.
    """
    row_blocks, heads = math.ceil(problem.seqlen_q / config["BLOCK_M"]), problem.heads * problem.batch
    if _persistent(config):
        at_most = max(1, row_blocks * heads - 1) if config["SCHEDULE"] == "balanced" else row_blocks * heads
        return min(at_most, gpu.sm_count * config["BLOCKS_PER_SM"]), 1, 1
    turn, split = HEADS_IN_TURN[config["TILE_ORDER"]], config["KEY_SPLIT"]
    if turn == 0:
        return problem.heads * split, problem.batch, row_blocks
    if turn == 1:
        return row_blocks * split, problem.heads, problem.batch
    return turn * split, row_blocks, math.ceil(heads / turn)


class FlashWgmma:
    """The `Family` of `templates/flash_wgmma.cu.j2`."""

    name: ClassVar[str] = "flash_wgmma"
    summary: ClassVar[str] = "Hopper's wgmma, tensor copies and warp specialization; fp16 and bf16"
    devices: ClassVar[str] = ARCH
    dtypes: ClassVar[tuple[str, ...]] = tuple(ELEMENT_TYPES)

    def why_unsupported(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if problem.dtype not in self.dtypes:
            return f"flash_wgmma takes {' and '.join(self.dtypes)}, not {problem.dtype}: wgmma has no fp32."
        if gpu.arch != ARCH:
            return f"flash_wgmma needs wgmma and tensor maps of {ARCH}, and {gpu.name} is {gpu.arch}."
        if problem.head_dim * ELEMENT_BYTES % MAP_STRIDE:
            return f"flash_wgmma takes a head_dim whose rows are multiples of {MAP_STRIDE} bytes, for tensor maps, not {problem.head_dim}."
        if problem.head_dim > MAX_HEAD_DIM:
            return f"flash_wgmma takes a head_dim of at most {MAX_HEAD_DIM}, the widest wgmma, not {problem.head_dim}."
        return None

    def why_invalid(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return (
            self.why_unsupported(problem, gpu)
            or _why_useless(problem, config)
            or _why_redundant(problem, config, gpu)
            or _why_too_long(problem, config)
            or _why_too_big(problem, config, gpu)
        )

    def why_impossible(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return (
            self.why_unsupported(problem, gpu)
            or _why_useless(problem, config)
            or _why_too_long(problem, config)
            or _why_too_big(problem, config, gpu)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        producer, consumer = moved_registers(config)
        rescale, octaves = RESCALES[config["RESCALE"]]
        split = config["KEY_SPLIT"]
        same = (
            "BLOCK_M",
            "BLOCK_N",
            "STAGES",
            "BLOCKS_PER_SM",
            "OVERLAP",
            "PING_PONG",
            "KEY_SPLIT",
            "CAUSAL_SKIP",
            "POLYNOMIAL_EIGHTHS",
            "Q_IN_REGISTERS",
        )
        return {name: config[name] for name in same} | {
            "CLUSTER_DIMS": f"__cluster_dims__({split}, 1, 1)" if split > 1 else "",
            "ELEMENT": ELEMENT_TYPES[problem.dtype],
            "HEAD_DIM": problem.head_dim,
            **problem.masking.constants(),
            "AHEAD": begins_ahead(problem, config),
            "PRODUCER_WARPS": producer_warps(config),
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
            "RESCALE": rescale,
            "LAZY_OCTAVES": octaves,
            "SCHEDULE": SCHEDULES[config["SCHEDULE"]],
            "HEADS_IN_TURN": HEADS_IN_TURN[config["TILE_ORDER"]],
            "STORE": STORES[config["STORE"]],
            "WRITE_LSE": problem.lse,
            "SMEM_BYTES": smem_bytes(problem, config),
            "WGMMA_QK": wgmma_function(
                "wgmma_qk", config["BLOCK_N"], problem.dtype, config["Q_IN_REGISTERS"], b_transposed=False
            ),
            "WGMMA_PV": wgmma_function(
                "wgmma_pv", problem.head_dim, problem.dtype, a_in_registers=True, b_transposed=True
            ),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        scratch, null = self.workspace(problem, config, gpu), Scalar("int64", 0)
        args: tuple[KernelArg, ...] = (
            tile_map(problem, "q", WARPGROUP_ROWS),
            tile_map(problem, "k", config["BLOCK_N"]),
            tile_map(problem, "v", config["BLOCK_N"]),
            tile_map(problem, "o", WARPGROUP_ROWS, config["STORE"] == "chunks"),
            Buffer("o"),
            Buffer("lse") if problem.lse else null,
            *(Buffer(name) if name in scratch else null for name in (COUNTERS, RESULTS)),
            *(
                Scalar("int32", n)
                for n in (problem.batch, problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k)
            ),
            *(Scalar("int64", stride) for stride in problem.strides("o")[:3]),
            softmax_scale_log2(problem),
        )
        return (
            KernelLaunch(
                self.name,
                grid(problem, config, gpu),
                (threads(config), 1, 1),
                smem_bytes(problem, config),
                args,
                (config["KEY_SPLIT"], 1, 1),
            ),
        )

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        if config["SCHEDULE"] == "balanced":
            results = grid(problem, config, gpu)[0] * warpgroups(config)
            return {COUNTERS: 4 * results, RESULTS: results * _result_bytes(problem)}
        return {COUNTERS: 4} if config["SCHEDULE"] == "claimed" else {}
