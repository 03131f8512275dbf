"""Attention backward on tensor cores by mma.sync m16n8k16: rows' terms, dK and dV by blocks of keys, dQ; sm_80 and
newer."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from evoattn.families.backward import (
    NULL,
    bias_gradient,
    bias_gradient_strides,
    key_blocks,
    shares_bias,
    strides_of,
)
from evoattn.families.backward_mma.genes import BackwardMmaGenes
from evoattn.families.backward_mma.refusals import (
    why_not_deterministic,
    why_not_whole_lists,
    why_redundant,
    why_too_big,
    why_wrong_pass,
    why_wrong_shape,
)
from evoattn.families.backward_mma.resources import (
    BLOCK_STATES,
    ROW_THREADS,
    adds_dq,
    block_warps,
    idle_as_one,
    pass_smem_bytes,
    scratch_bytes,
    smem_bytes,
    sum_offsets,
)
from evoattn.families.backward_mma.tables import table_gradient_args, table_gradients, unordered_tables
from evoattn.families.backward_mma.work import launch_work
from evoattn.families.base import Family, softmax_scale_log2
from evoattn.families.block_list import block_list_args, block_list_constants
from evoattn.families.residency import WARP, why_no_memory
from evoattn.families.row_blocks import batches, row_blocks
from evoattn.families.variants import variant_args, variant_constants
from evoattn.families.work import LaunchWork
from evoattn.model.backward import parse_grads
from evoattn.model.gpu import MAX_GRID_YZ, GpuSpec
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar
from evoattn.model.mask import FULL_AND_CAUSAL
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


class BackwardMma(Family):
    """The `Family` of `templates/backward_mma.cu.j2`."""

    name: ClassVar[str] = "backward_mma"
    summary: ClassVar[str] = "gradients on tensor cores by mma.sync m16n8k16; fp16 and bf16"
    devices: ClassVar[str] = "sm_80 and newer"
    operations: ClassVar[tuple[str, ...]] = ("backward",)
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16")
    masks: ClassVar[tuple[str, ...]] = FULL_AND_CAUSAL
    writes_lse: ClassVar[bool] = True
    variants: ClassVar[tuple[str, ...]] = (
        "window",
        "softcap",
        "sink",
        "alibi",
        "bias",
        "score",
        "value_dim",
        "seqused",
        "varlen",
        "blocks",
    )

    def genes(self, config: KernelConfig) -> BackwardMmaGenes:
        return BackwardMmaGenes.of(config)

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if gpu.capability < (8, 0):
            return f"backward_mma needs mma.m16n8k16 and cp.async of sm_80 and newer, and {gpu.name} is {gpu.arch}."
        for dim in (problem.head_dim, problem.head_dim_v):
            if not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
                return f"backward_mma takes a head_dim of {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {dim}."
        if max(problem.heads, batches(problem)) > MAX_GRID_YZ:
            return (
                f"backward_mma takes at most {MAX_GRID_YZ} heads and batches (grid y and z), not "
                f"{max(problem.heads, batches(problem))}."
            )
        return None

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = self.genes(config)
        return (
            why_wrong_shape(problem, genes)
            or why_not_whole_lists(problem, genes)
            or why_wrong_pass(genes)
            or why_not_deterministic(problem, genes)
            or (why_redundant(problem, genes) if redundant else None)
            or why_too_big(problem, genes, gpu)
            or why_no_memory(problem, self.workspace(problem, config, gpu), gpu)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = self.genes(config)
        same = ("BLOCK_M", "BLOCK_N", "WARPS", "QUERY_WARPS", "PART", "STAGES", "BLOCKS_PER_SM")
        return (
            genes.named(*same)
            | idle_as_one(genes).named("DQ_WARPS", "PASS_M", "PASS_N", "PASS_WARPS", "PASS_STAGES")
            | problem.masking.constants()
            | variant_constants(problem, slope=True)
            | block_list_constants(problem)
            | {
                "ELEMENT": problem.element.cuda,
                "HEAD_DIM": problem.head_dim,
                "VALUE_DIM": problem.head_dim_v,
                "BIAS_GRADIENT": "bias" in parse_grads(problem.grads),
                "SINK_GRADIENT": "sinks" in parse_grads(problem.grads),
                "TABLE_GRADIENTS": table_gradients(problem),
                "HIDDEN_SKIPPED": genes.CAUSAL_SKIP,
                "SWIZZLED": genes.SMEM_LAYOUT == "swizzled",
                "K_KEPT": genes.KV_PLACE == "registers",
                "V_KEPT": genes.KV_PLACE != "shared",
                "DQ_ADDED": adds_dq(genes),
                "QUERIES_SPLIT": genes.QUERY_SPLIT > 1,
                "VECTORS_ADDED": gpu.capability >= (9, 0),
                "HEADS_FASTEST": genes.BLOCK_ORDER == "heads",
                "SMEM_BYTES": smem_bytes(problem, genes),
                "PASS_SMEM_BYTES": pass_smem_bytes(problem, idle_as_one(genes)),
            }
        )

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes = self.genes(config)
        rows, keys = row_blocks(problem, genes.BLOCK_M), key_blocks(problem, genes.BLOCK_N)
        overlaps = gpu.capability >= (9, 0)
        row_threads, sinks = (
            (ROW_THREADS, 1, 1),
            "sinks" in parse_grads(problem.grads),
        )  # whose blocks are behind the others
        return (
            KernelLaunch(
                "backward_mma_rows", (rows, problem.heads, batches(problem)), row_threads, 0, _row_args(problem, genes)
            ),
            KernelLaunch(
                "backward_mma",
                self._grid(genes, keys * genes.QUERY_SPLIT, problem.kv_heads, batches(problem)),
                (WARP * block_warps(genes), 1, 1),
                smem_bytes(problem, genes),
                _key_args(problem, genes, rows),
                overlaps=overlaps,
            ),
            KernelLaunch(
                "backward_mma_queries",
                (rows + keys * (genes.QUERY_SPLIT > 1) + sinks, problem.heads, batches(problem)),
                row_threads,
                0,
                _query_args(problem, genes, rows, keys),
                overlaps=overlaps,
            )
            if adds_dq(genes)
            else KernelLaunch(
                "backward_mma_queries",
                self._grid(genes, row_blocks(problem, genes.PASS_M) + sinks, problem.heads, batches(problem)),
                (WARP * genes.PASS_WARPS, 1, 1),
                pass_smem_bytes(problem, genes),
                _query_args(problem, genes, rows, keys),
                overlaps=overlaps,
            ),
        )

    @staticmethod
    def _grid(genes: BackwardMmaGenes, tiles: int, heads: int, batch: int) -> tuple[int, int, int]:
        return (heads, batch, tiles) if genes.BLOCK_ORDER == "heads" else (tiles, heads, batch)

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        return scratch_bytes(problem, self.genes(config))

    def unordered(self, problem: AttentionProblem, config: KernelConfig) -> tuple[str, ...]:
        genes = self.genes(config)
        added = ["dq"] * adds_dq(genes) + ["dk", "dv"] * (genes.QUERY_SPLIT > 1)
        return (*added, *(["dbias"] if shares_bias(problem) else []), *unordered_tables(problem))

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, self.genes(config), registers)


def _lengths(problem: AttentionProblem) -> tuple[KernelArg, ...]:
    return Scalar("int32", problem.seqlen_q), Scalar("int32", problem.seqlen_k)


def _sums(problem: AttentionProblem, genes: BackwardMmaGenes) -> tuple[KernelArg, ...]:
    """The buffer of fp32 sums, and where in it those of dK and dV begin."""
    _, dk, dv, end = sum_offsets(problem, genes)
    return Buffer("sums") if end else NULL, Scalar("int64", dk), Scalar("int64", dv)


def _sink_sums(problem: AttentionProblem) -> KernelArg:
    return Buffer("sink_sums") if "sinks" in parse_grads(problem.grads) else NULL


def _block_states(problem: AttentionProblem) -> tuple[KernelArg, ...]:
    """The arguments of `templates/backward_mma/block_states_blocks.cuh`."""
    if not problem.blocks:
        return ()
    rows = problem.term_shapes["kv_num_blocks"][2]
    return *block_list_args(problem, packs=False), Buffer(BLOCK_STATES), Scalar("int32", rows)


def _row_args(problem: AttentionProblem, genes: BackwardMmaGenes) -> tuple[KernelArg, ...]:
    """Of the launch that reads O and dO."""
    sums, *_ = _sums(problem, genes)
    return (
        *map(Buffer, ("o", "do", "lse")),
        Buffer("dlse") if problem.lse else NULL,
        Buffer("row_terms"),
        sums,
        bias_gradient(problem),
        _sink_sums(problem),
        Scalar("int64", sum_offsets(problem, genes)[-1]),
        Scalar("int64", math.prod(problem.term_shapes["bias"]) if "bias" in parse_grads(problem.grads) else 0),
        Scalar("int32", problem.heads),
        *_lengths(problem),
        *strides_of(problem, "o", "do"),
        *variant_args(problem),
        *_block_states(problem),
        *table_gradient_args(problem),
    )


def _key_args(problem: AttentionProblem, genes: BackwardMmaGenes, rows: int) -> tuple[KernelArg, ...]:
    """Of the launch of blocks of keys; `rows` are the tiles of queries of a head."""
    return (
        *map(Buffer, ("q", "k", "v", "do", "row_terms")),
        *_sums(problem, genes),
        *map(Buffer, ("dk", "dv")),
        bias_gradient(problem),
        *(Scalar("int32", n) for n in (problem.heads, problem.kv_heads)),
        *_lengths(problem),
        *(Scalar("int32", n) for n in (rows, genes.QUERY_SPLIT)),
        *strides_of(problem, "q", "k", "v", "do", "dk", "dv"),
        *bias_gradient_strides(problem),
        softmax_scale_log2(problem),
        Scalar("float32", problem.softmax_scale),
        *variant_args(problem),
        *_block_states(problem),
        *table_gradient_args(problem),
    )


def _query_args(problem: AttentionProblem, genes: BackwardMmaGenes, rows: int, keys: int) -> tuple[KernelArg, ...]:
    """Of the launch that ends dQ, with so many tiles of queries and of keys of a head."""
    return (
        *map(Buffer, ("q", "k", "v", "do", "row_terms")),
        *_sums(problem, genes),
        _sink_sums(problem),
        Buffer("dsinks") if "sinks" in parse_grads(problem.grads) else NULL,
        *map(Buffer, ("dq", "dk", "dv")),
        *(Scalar("int32", n) for n in (problem.heads, problem.kv_heads)),
        *_lengths(problem),
        *(Scalar("int32", n) for n in (rows, keys)),
        *strides_of(problem, "q", "k", "v", "do", "dq", "dk", "dv"),
        softmax_scale_log2(problem),
        Scalar("float32", problem.softmax_scale),
        *variant_args(problem),
        *_block_states(problem),
    )
