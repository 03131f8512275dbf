"""The backward pass on CUDA cores, in three launches that add up nothing in memory: any GPU, dtype and variant."""

import math
from typing import Any, ClassVar

from evoattn.families.backward import Backward
from evoattn.families.backward_scalar.resources import (
    EACH,
    BackwardScalarGenes,
    estimated_registers,
    launch_work,
    scratch,
    smem_bytes,
)
from evoattn.families.base import buffer_of
from evoattn.families.given import Given, number, passed, printed, tensor
from evoattn.families.residency import WARP, why_no_memory, why_not_resident, why_same_code, why_too_few_registers
from evoattn.families.variants import OWN, members, table_given, variant_constants
from evoattn.families.work import LaunchWork
from evoattn.model.backward import TERM_GRADS, parse_grads
from evoattn.model.gpu import MAX_GRID_YZ, GpuSpec
from evoattn.model.launch import NULL, Buffer, KernelArg, KernelLaunch, Scalar
from evoattn.model.problem import AttentionProblem
from evoattn.model.score import SCORE, Apply, Load, Name, Number, Table, Tree, derivative, parts, replaced
from evoattn.model.score_cuda import in_cuda
from evoattn.model.scoring import CAPPED
from evoattn.model.space import KernelConfig

MAX_HEAD_DIM = 256


class BackwardScalar(Backward):
    """The `Family` of `templates/backward_scalar.cu.j2`."""

    name: ClassVar[str] = "backward_scalar"
    genes = BackwardScalarGenes
    summary: ClassVar[str] = "gradients on CUDA cores: fp32 arithmetic, all variants, the same bits in every run"
    devices: ClassVar[str] = "any GPU, sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "fp32")
    variants: ClassVar[tuple[str, ...]] = (*Backward.scored, "shared_kv", "seqused", "varlen")

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
        genes = BackwardScalarGenes.of(config)
        return (
            why_shape(genes)
            or (why_redundant(problem, genes) if redundant else None)
            or why_too_big(problem, genes, gpu)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes, wanted = BackwardScalarGenes.of(config), parse_grads(problem.grads)
        return {
            **variant_constants(problem),
            **printed(SCORE=score_given(problem)),
            "OWN_SCORE": score_class(problem),
            "SHARED_KV": problem.shared_kv,
            "LSE_GRADIENT": problem.lse,
            "BIAS_GRADIENT": "bias" in wanted,
            "SINK_GRADIENT": "sinks" in wanted,
            "SMEM_BYTES": smem_bytes(problem, genes),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        """delta of each query; dK, dV and the gradient of the sinks; dQ and the gradient of the bias."""
        genes, wanted, shapes = BackwardScalarGenes.of(config), parse_grads(problem.grads), problem.term_shapes
        batches, _, rows = problem.lse_shape
        block, smem = (genes.THREADS, 1, 1), smem_bytes(problem, genes)
        q_k_v_do = tuple(Buffer(buffer_of(problem, name)) for name in ("q", "k", "v", "do"))
        sums = Buffer("lse"), Buffer("deltas")
        sizes = _ints(problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k, rows, problem.batch)
        window = _ints(problem.masking.past or 0, problem.masking.ahead or 0)
        terms = [Buffer(n) if n in shapes else NULL for n in ("sinks", "seqused", "cu_seqlens_q", "cu_seqlens_k")]
        given: tuple[KernelArg, ...] = (*sizes, *window, Scalar("float32", problem.softmax_scale), *terms)
        inputs = _strides(problem, "q", "k", "v", "do")
        score = passed(score_given(problem))
        key_tiles = math.ceil(problem.seqlen_k / genes.BLOCK_N) + ("sinks" in wanted)
        of_keys = (Buffer("dk"), NULL if problem.shared_kv else Buffer("dv"))
        dsinks = Buffer("dsinks") if "sinks" in wanted else NULL
        bias = shapes["bias"] if "bias" in wanted else (problem.batch, problem.heads, 0, 0)
        dbias = Buffer("dbias") if "bias" in wanted else NULL
        dlse = Buffer("dlse") if problem.lse else NULL
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
        return launch_work(problem, BackwardScalarGenes.of(config), registers)


def _ints(*numbers: int) -> tuple[Scalar, ...]:
    return tuple(Scalar("int32", number) for number in numbers)


def _strides(problem: AttentionProblem, *tensors: str) -> tuple[Scalar, ...]:
    """Of batches, heads and rows, in elements."""
    return tuple(Scalar("int64", stride) for tensor in tensors for stride in problem.strides(tensor)[:3])


def why_shape(genes: BackwardScalarGenes) -> str | None:
    """Threads that do not fit the tiles."""
    m, n = genes.BLOCK_M, genes.BLOCK_N
    if m * n < genes.THREADS * EACH:
        return f"THREADS={genes.THREADS} are more than the BLOCK_M={m} by BLOCK_N={n} scores of a tile, {EACH} each."
    return None


def why_redundant(problem: AttentionProblem, genes: BackwardScalarGenes) -> str | None:
    """Configs that do on this problem what a smaller one does."""
    for name, rows, length in (
        ("BLOCK_M", genes.BLOCK_M, problem.seqlen_q),
        ("BLOCK_N", genes.BLOCK_N, problem.seqlen_k),
    ):
        if rows > 32 and rows >= 2 * max(length, 32):
            return f"{name}={rows} is twice the {length} that there are, or more."
    return why_same_code(genes.BLOCKS_PER_SM, genes.THREADS // WARP)


def why_too_big(problem: AttentionProblem, genes: BackwardScalarGenes, gpu: GpuSpec) -> str | None:
    """Memory and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    smem, warps = smem_bytes(problem, genes), genes.THREADS // WARP
    if smem > gpu.smem_per_block:
        return (
            f"Tiles of BLOCK_M={genes.BLOCK_M} and BLOCK_N={genes.BLOCK_N} take {smem} bytes of shared memory; a block "
            f"of {gpu.name} has {gpu.smem_per_block}."
        )
    return (
        why_not_resident(gpu, genes.BLOCKS_PER_SM, warps, smem)
        or why_too_few_registers(genes.BLOCKS_PER_SM, warps, estimated_registers(problem, genes))
        or why_no_memory(problem, scratch(problem), gpu)
    )


BIAS = Name("biased")
"""The element of the bias, whose strides are arguments, as a caller's may be any."""
BIAS_STRIDES = ("bias_batch_stride", "bias_head_stride", "bias_row_stride")
ARGUMENTS = "float s, int b, int h, int q, int k, int d"


BIASED = (
    "    const float biased = to_float(bias[b * bias_batch_stride + h * bias_head_stride + q * bias_row_stride + k]);"
)


def score_class(problem: AttentionProblem) -> str:
    """The class `Score`: `of` a scaled score, its `slope`, and its `slope_behind_bias`, by the score that has the bias;
    and the macros of its arguments in a kernel, in the order of `score_args`."""
    tree, own = _whole(problem), problem.own_score
    behind: Tree = (
        replaced(derivative(own.tree), Name(SCORE), _whole(problem.with_(score="", tables=""))) if own else Number(1)
    )
    methods = (("of", tree), ("slope", derivative(tree)), ("slope_behind_bias", behind))
    return "\n".join(
        (
            "struct Score {",
            *members(score_given(problem)),
            *(
                line
                for name, value in methods
                for line in (
                    f"  __device__ __forceinline__ float {name}({ARGUMENTS}) const {{",
                    *([BIASED] if problem.bias and BIAS in parts(value) else ()),
                    f"    return {in_cuda(value)};",
                    "  }",
                )
            ),
            "};",
        )
    )


def score_given(problem: AttentionProblem) -> list[Given]:
    """The softcap, the bias, and tables, where the score has them."""
    fields = [number("float", f"{OWN}cap", problem.softcap)] if problem.softcap else []
    if problem.bias:
        fields.append(tensor("const Element", f"{OWN}bias", "bias"))
        strides = zip(BIAS_STRIDES, problem.strides("bias")[:3], strict=True)
        fields += [number("int64_t", OWN + name, stride) for name, stride in strides]
    return fields + table_given(_tables(_whole(problem)))


def _whole(problem: AttentionProblem) -> Tree:
    """`Scoring.whole`, with the softcap and the bias by their names: both are arguments of a kernel."""
    tree = _named(problem.with_(softcap=0.0).scoring.whole)
    return replaced(tree, Name(SCORE), CAPPED) if problem.softcap else tree


def _named(tree: Tree) -> Tree:
    """The expression with `BIAS` for the element of the bias."""
    match tree:
        case Load(table, _) if table.name == "bias" and table.buffer == "bias":
            return BIAS
        case Apply(name, of):
            return Apply(name, tuple(map(_named, of)))
    return tree


def _tables(tree: Tree) -> list[Table]:
    """Those that an expression loads from, each once."""
    return list({one.table.name: one.table for one in parts(tree) if isinstance(one, Load)}.values())
