"""The backward pass on CUDA cores, in three launches that add up nothing in memory: any GPU, dtype and variant."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from evoattn.families.backward_scalar.genes import BackwardScalarGenes
from evoattn.families.backward_scalar.refusals import why_redundant, why_shape, why_too_big
from evoattn.families.backward_scalar.resources import scratch, smem_bytes
from evoattn.families.backward_scalar.score import score_args, score_class
from evoattn.families.backward_scalar.work import launch_work
from evoattn.families.base import Family, buffer_of
from evoattn.families.variants import variant_constants
from evoattn.families.work import LaunchWork
from evoattn.model.backward import TERM_GRADS, parse_grads
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar
from evoattn.model.mask import FULL_AND_CAUSAL
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

MAX_HEAD_DIM = 256
MAX_GRID_YZ = 65535
NONE = Scalar("int64", 0)
"""In the place of a buffer that there is not."""


class BackwardScalar(Family):
    """The `Family` of `templates/backward_scalar.cu.j2`."""

    name: ClassVar[str] = "backward_scalar"
    summary: ClassVar[str] = "gradients on CUDA cores: fp32 arithmetic, all variants, the same bits in every run"
    devices: ClassVar[str] = "any GPU, sm_80 and newer"
    operations: ClassVar[tuple[str, ...]] = ("backward",)
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "fp32")
    masks: ClassVar[tuple[str, ...]] = FULL_AND_CAUSAL
    writes_lse: ClassVar[bool] = True
    variants: ClassVar[tuple[str, ...]] = (
        "window", "softcap", "sink", "alibi", "bias", "score", "value_dim", "shared_kv", "seqused", "varlen",
    )  # fmt: skip

    def genes(self, config: KernelConfig) -> BackwardScalarGenes:
        return BackwardScalarGenes.of(config)

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
            return f"backward_scalar takes head_dims up to {MAX_HEAD_DIM}."
        if max(problem.heads, problem.batch) > MAX_GRID_YZ:
            return f"backward_scalar takes up to {MAX_GRID_YZ} heads and as many batches."
        if not set(parse_grads(problem.grads)) <= set(TERM_GRADS):
            return "backward_scalar computes no gradients of tables."
        return None

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = self.genes(config)
        return (
            why_shape(genes)
            or (why_redundant(problem, genes) if redundant else None)
            or why_too_big(problem, genes, gpu)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes, wanted = self.genes(config), parse_grads(problem.grads)
        return {
            "ELEMENT": problem.element.cuda,
            "HEAD_DIM": problem.head_dim,
            "VALUE_DIM": problem.head_dim_v,
            **problem.masking.constants(),
            **variant_constants(problem),
            "OWN_SCORE": score_class(problem),
            **genes.named("BLOCK_M", "BLOCK_N", "THREADS", "BLOCKS_PER_SM"),
            "SHARED_KV": problem.shared_kv,
            "LSE_GRADIENT": problem.lse,
            "BIAS_GRADIENT": "bias" in wanted,
            "SINK_GRADIENT": "sinks" in wanted,
            "SMEM_BYTES": smem_bytes(problem, genes),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        """delta of each query; dK, dV and the gradient of the sinks; dQ and the gradient of the bias."""
        genes, wanted, shapes = self.genes(config), parse_grads(problem.grads), problem.term_shapes
        batches, _, rows = problem.lse_shape
        block, smem = (genes.THREADS, 1, 1), smem_bytes(problem, genes)
        q_k_v_do = tuple(Buffer(buffer_of(problem, name)) for name in ("q", "k", "v", "do"))
        sums = Buffer("lse"), Buffer("deltas")
        sizes = _ints(problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k, rows, problem.batch)
        window = _ints(problem.masking.past or 0, problem.masking.ahead or 0)
        terms = [Buffer(n) if n in shapes else NONE for n in ("sinks", "seqused", "cu_seqlens_q", "cu_seqlens_k")]
        given: tuple[KernelArg, ...] = (*sizes, *window, Scalar("float32", problem.softmax_scale), *terms)
        inputs = _strides(problem, "q", "k", "v", "do")
        score = score_args(problem)
        key_tiles = math.ceil(problem.seqlen_k / genes.BLOCK_N) + ("sinks" in wanted)
        of_keys = (Buffer("dk"), NONE if problem.shared_kv else Buffer("dv"))
        dsinks = Buffer("dsinks") if "sinks" in wanted else NONE
        bias = shapes["bias"] if "bias" in wanted else (problem.batch, problem.heads, 0, 0)
        dbias = Buffer("dbias") if "bias" in wanted else NONE
        dlse = Buffer("dlse") if problem.lse else NONE
        first: tuple[KernelArg, ...] = (
            *(Buffer("o"), Buffer("do"), dlse, Buffer("deltas")),
            *_ints(problem.heads, rows),
            *_strides(problem, "o", "do"),
        )
        keys = (*q_k_v_do, *sums, *of_keys, dsinks, *given, *inputs, *_strides(problem, "dk", "dv"), *score)
        queries = (*q_k_v_do, *sums, Buffer("dq"), dbias, *_ints(bias[3]), *given, *inputs)
        return (
            KernelLaunch(
                "backward_scalar_terms",
                (math.ceil(rows / (genes.THREADS // 32)), problem.heads, batches),
                block,
                0,
                first,
            ),
            KernelLaunch("backward_scalar_keys", (key_tiles, problem.kv_heads, problem.batch), block, smem, keys),
            KernelLaunch(
                "backward_scalar_queries",
                (math.ceil(problem.seqlen_q / genes.BLOCK_M), bias[1], bias[0]),
                block,
                smem,
                (*queries, *_strides(problem, "dq"), *score),
            ),
        )

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        return scratch(problem)

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, self.genes(config), registers)


def _ints(*numbers: int) -> tuple[Scalar, ...]:
    return tuple(Scalar("int32", number) for number in numbers)


def _strides(problem: AttentionProblem, *tensors: str) -> tuple[Scalar, ...]:
    """Of batches, heads and rows, in elements."""
    return tuple(Scalar("int64", stride) for tensor in tensors for stride in problem.strides(tensor)[:3])
