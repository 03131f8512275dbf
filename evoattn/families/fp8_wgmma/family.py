"""Flash attention on Hopper of Q, K and V of 8 bits with scales, by wgmma; sm_90a only."""

import math
from typing import Any, ClassVar

from evoattn.families.base import Family, softmax_scale_log2
from evoattn.families.block_list import block_list_constants
from evoattn.families.flash_wgmma.family import (
    ARCH,
    COUNTERS,
    MAX_HEAD_DIM,
    RESULTS,
    size_args,
    why_redundant,
    why_too_long,
    why_useless,
)
from evoattn.families.flash_wgmma.resources import (
    HEADS_IN_TURN,
    WARPGROUP_ROWS,
    grid,
    moved_registers,
    producer_warps,
    registers_at_launch,
    result_bytes,
    threads,
    warpgroups,
)
from evoattn.families.flash_wgmma.text import EightBits, wgmma_product
from evoattn.families.fp8_wgmma.resources import (
    Fp8WgmmaGenes,
    begins_ahead,
    in_pairs,
    launch_work,
    registers_needed,
    smem_bytes,
    value_chunk,
    widest_wgmma,
)
from evoattn.families.given import passed, printed
from evoattn.families.tensor_tiles import ELEMENT_BYTES, key_map, sliding_map, tile_map, why_not_sliding
from evoattn.families.variants import scale_given, variant_constants, variant_given
from evoattn.families.work import LaunchWork
from evoattn.model.forward import FORWARD, MAIN
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import NULL, Buffer, KernelArg, KernelLaunch, TensorMap, scratch_args
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import ANSWERED, BLOCK_ROWS, PER_BLOCK, PER_TOKEN, ROUNDED
from evoattn.model.space import KernelConfig
from evoattn.model.turned import turned_spec
from evoattn.model.variant import KEY_VARIANTS, TURNED

KV = "e5m2"
"""What K and V may have beside a Q of e4m3."""
DIM_STEP = 16
"""Bytes that the rows of a tensor map are multiples of."""


class Fp8Wgmma(Family):
    """The `Family` of `templates/fp8_wgmma.cu.j2`."""

    name: ClassVar[str] = "fp8_wgmma"
    genes = Fp8WgmmaGenes
    summary: ClassVar[str] = "Hopper's wgmma on Q, K and V of 8 bits with scales; e4m3, K and V e5m2 too"
    devices: ClassVar[str] = ARCH
    operations: ClassVar[tuple[str, ...]] = (FORWARD.name, *ANSWERED)
    dtypes: ClassVar[tuple[str, ...]] = ("e4m3",)
    writes_lse: ClassVar[bool] = True
    plain: ClassVar[bool] = False
    variants: ClassVar[tuple[str, ...]] = (
        "window",
        "softcap",
        "sink",
        "value_dim",
        "scales",
        "kv",
        *KEY_VARIANTS,
        "varlen",
        TURNED,
    )

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if gpu.arch != ARCH:
            return f"{self.name} needs wgmma and tensor maps of {ARCH}, and {gpu.name} is {gpu.arch}."
        for dim in (problem.head_dim, problem.head_dim_v):
            if dim % DIM_STEP:
                return f"{self.name} takes a head_dim that is a multiple of {DIM_STEP}, for tensor maps, not {dim}."
            if dim > MAX_HEAD_DIM:
                return f"{self.name} takes a head_dim of at most {MAX_HEAD_DIM}, the widest wgmma, not {dim}."
        if problem.kv not in ("", KV):
            return f"{self.name} takes K and V of {problem.dtype} or {KV}, not of {problem.kv}."
        if problem.scales == PER_TOKEN:
            return f"{self.name} takes scales of tensors or of heads, not of tokens: a product sums over those of V."
        return why_not_sliding(problem)

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = Fp8WgmmaGenes.of(config)
        return (
            why_useless(problem, genes.flash.with_(PING_PONG=genes.PING_PONG and genes.OVERLAP))
            or why_no_turns(problem, genes)
            or why_useless_flushes(genes)
            or why_no_parts(problem, genes)
            or why_no_blocks(problem, genes)
            or (why_redundant(problem, genes.flash, gpu) if redundant else None)
            or why_too_long(problem, genes.flash, gpu)
            or why_too_big(problem, genes, gpu)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = Fp8WgmmaGenes.of(config)
        producer, consumer = moved_registers(genes.flash)
        return {
            "ELEMENT": problem.answer.cuda,
            **variant_constants(problem),
            **block_list_constants(problem),
            **printed(VARIANT=variant_given(problem), KEY_LIST=()),
            "AHEAD": begins_ahead(problem, genes),
            "PRODUCER_WARPS": producer_warps(genes.flash),
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
            "SUM_IN_SHARED": genes.SUM_PLACE == "shared",
            "SCALES_BY_BLOCK": problem.scales == PER_BLOCK,
            "SCALE_ROWS": BLOCK_ROWS,
            "TURNED": problem.turned,
            "ROUNDS_ROWS": problem.op in ROUNDED,
            "PAIRS": in_pairs(problem),
            "HEADS_IN_TURN": HEADS_IN_TURN[genes.TILE_ORDER],
            "SMEM_BYTES": smem_bytes(problem, genes),
            "WGMMA_QK": wgmma_product(
                "wgmma_qk",
                math.ceil(problem.head_dim / problem.element.mma_k),
                genes.BLOCK_N,
                EightBits(problem.dtype, problem.kv, in_pairs(problem)),
                genes.Q_IN_REGISTERS,
                b_transposed=False,
            ),
            "WGMMA_PV": wgmma_product(
                "wgmma_pv",
                genes.BLOCK_N // problem.element.mma_k,
                problem.head_dim_v // genes.VALUE_PARTS,
                EightBits(problem.dtype, problem.kv),
                a_in_registers=True,
                b_transposed=False,
            ),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes = Fp8WgmmaGenes.of(config)
        args: tuple[KernelArg, ...] = (
            *_maps(problem, genes),
            Buffer("o"),
            Buffer("lse") if problem.lse else NULL,
            *scratch_args(self.workspace(problem, config, gpu), COUNTERS, RESULTS),
            *size_args(problem),
            *(() if "q_scale" in problem.scale_shapes else NO_SCALE),
            *passed(scale_given(problem, *"qkv")),
            softmax_scale_log2(problem),
            *passed(variant_given(problem)),
        )
        blocks = grid(problem, genes.flash, gpu)
        return (KernelLaunch(self.name, blocks, (threads(genes.flash), 1, 1), smem_bytes(problem, genes), args),)

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        genes = Fp8WgmmaGenes.of(config)
        if genes.SCHEDULE == "balanced":
            results = math.prod(grid(problem, genes.flash, gpu)) * warpgroups(genes.flash)
            return {COUNTERS: 4 * results, RESULTS: results * result_bytes(problem)}
        return {COUNTERS: 4} if genes.SCHEDULE == "claimed" else {}

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, Fp8WgmmaGenes.of(config), registers)


def _maps(problem: AttentionProblem, genes: Fp8WgmmaGenes) -> tuple[TensorMap, ...]:
    """Of q, k, v and o."""
    maps = {name: key_map(problem, name, genes.BLOCK_N) for name in "kv"}
    if problem.turned:
        maps["v"] = _turned_map(problem, value_chunk(genes))
    for name in "qo":
        maps[name] = (
            sliding_map(problem, name, WARPGROUP_ROWS)
            if problem.varlen
            else tile_map(problem, name, WARPGROUP_ROWS, name == "o" and genes.STORE == "chunks")
        )
    return tuple(maps[name] for name in MAIN)


def _turned_map(problem: AttentionProblem, keys: int) -> TensorMap:
    """Of V with its keys along rows, boxes of so many keys of all columns."""
    batch, heads, dim, row = turned_spec("v", problem.shape("v"), "").shape
    shape, strides = (row // ELEMENT_BYTES, dim, heads, batch), (row, dim * row, heads * dim * row)
    return TensorMap("v", "fp16", shape, strides, (keys // ELEMENT_BYTES, dim, 1, 1), swizzle_bytes=keys)


NO_SCALE = (NULL,) * 4
"""An address and strides, of Q that is rounded on the way."""
PART_COLUMNS = 8
"""Of V, of which the columns of a wgmma are a multiple."""
MOST_SUMMED = 512
"""Keys whose P V tensor cores add up before fp32 does. Of values with a mean, O is 0.4 % too short with as many, 1 %
with 1,024, and 57 % if they add up 131,072 (reports/performance.md, 2026-11-26)."""


def why_useless_flushes(genes: Fp8WgmmaGenes) -> str | None:
    """Genes that do nothing beside the others, or too much."""
    if genes.SUM_PLACE == "registers" and genes.FLUSH_TILES > 1:
        return f"FLUSH_TILES={genes.FLUSH_TILES} needs SUM_PLACE=shared: O in registers takes what comes at no cost."
    if genes.FLUSH_TILES * genes.BLOCK_N > MOST_SUMMED:
        return (
            f"FLUSH_TILES={genes.FLUSH_TILES} tiles of {genes.BLOCK_N} keys are more than the {MOST_SUMMED} that "
            "tensor cores may add up: they keep some 14 bits."
        )
    if genes.SUM_PLACE == "shared" and genes.STORE == "chunks":
        return "SUM_PLACE=shared has room for all of O, and needs no STORE=chunks."
    return None


def why_no_turns(problem: AttentionProblem, genes: Fp8WgmmaGenes) -> str | None:
    if problem.varlen and genes.SCHEDULE == "balanced":
        return "SCHEDULE=balanced takes sequences of one length here: blocks do not add up sums of three levels."
    if genes.PING_PONG and warpgroups(genes.flash) == 1:
        return "PING_PONG needs two consumer warpgroups that take turns."
    return None


def why_no_parts(problem: AttentionProblem, genes: Fp8WgmmaGenes) -> str | None:
    """Columns of V by parts: whole products, added to O in registers after every tile."""
    parts = genes.VALUE_PARTS
    if genes.VALUE_SUMS > 1 and parts == 1:
        return "VALUE_SUMS=2 needs VALUE_PARTS=2 or more: one part has one sum."
    if parts > 1 and genes.SUM_PLACE != "registers":
        return f"VALUE_PARTS={parts} needs SUM_PLACE=registers."
    if problem.head_dim_v % (PART_COLUMNS * parts):
        return f"VALUE_PARTS={parts} takes a head_dim of V of a multiple of {PART_COLUMNS * parts}."
    return None


def why_no_blocks(problem: AttentionProblem, genes: Fp8WgmmaGenes) -> str | None:
    """Scales of blocks of rows: a tile of keys has one, and O is rescaled by those of V after every tile."""
    if problem.scales != PER_BLOCK:
        return None
    if BLOCK_ROWS % genes.BLOCK_N:
        return f"BLOCK_N={genes.BLOCK_N}: with scales=block the {BLOCK_ROWS} keys that share one are whole tiles."
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
