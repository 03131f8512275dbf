"""Attention backward on tensor cores by mma.sync m16n8k16: rows' terms, dK and dV by blocks of keys, dQ; sm_80 and
newer."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from evoattn.families.backward import (
    Backward,
    bias_gradient,
    bias_gradient_strides,
    key_blocks,
    shares_bias,
    strides_of,
)
from evoattn.families.backward_mma.resources import (
    IDLE,
    ROW_THREADS,
    BackwardMmaGenes,
    adds_dq,
    block_warps,
    elements_of,
    idle_as_one,
    is_apart,
    launch_work,
    pass_registers_needed,
    pass_smem_bytes,
    registers_needed,
    scratch_bytes,
    sharing_of,
    smem_bytes,
    sum_offsets,
    tables_of,
)
from evoattn.families.base import softmax_scale_log2
from evoattn.families.block_list import block_list_constants, list_given, states_given, why_not_listed
from evoattn.families.dealt import batches, row_blocks
from evoattn.families.given import Given, passed, printed
from evoattn.families.residency import WARP, register_cap, why_no_memory, why_not_resident, why_same_code
from evoattn.families.variants import variant_constants, variant_given
from evoattn.families.work import LaunchWork
from evoattn.model.backward import parse_grads
from evoattn.model.gpu import MAX_GRID_YZ, GpuSpec
from evoattn.model.launch import NULL, Buffer, KernelArg, KernelLaunch, Scalar
from evoattn.model.problem import AttentionProblem
from evoattn.model.score import Load, Name, Number, Table, derivative
from evoattn.model.score_cuda import in_cuda, inside_in_cuda, place_in_cuda, size_member
from evoattn.model.space import KernelConfig

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


class BackwardMma(Backward):
    """The `Family` of `templates/backward_mma.cu.j2`."""

    name: ClassVar[str] = "backward_mma"
    genes = BackwardMmaGenes
    summary: ClassVar[str] = "gradients on tensor cores by mma.sync m16n8k16; fp16 and bf16"
    devices: ClassVar[str] = "sm_80 and newer"
    variants: ClassVar[tuple[str, ...]] = (*Backward.scored, "seqused", "varlen", "blocks")

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        return (
            self.why_too_old(gpu)
            or self.why_no_head_dim(MIN_HEAD_DIM, MAX_HEAD_DIM, problem.head_dim, problem.head_dim_v)
            or self.why_past_grid(max(problem.heads, batches(problem)))
        )

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = BackwardMmaGenes.of(config)
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
        genes = BackwardMmaGenes.of(config)
        return (
            {name: idle_as_one(genes).value(name) for name in IDLE}
            | problem.masking.constants()
            | variant_constants(problem, slope=True)
            | block_list_constants(problem)
            | printed(
                VARIANT=variant_given(problem),
                KEY_LIST=list_given(problem, packs=False),
                BLOCK_STATES=states_given(problem, packs=False),
                TABLE_GRADIENT=gradient_given(problem),
            )
            | {
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
        genes = BackwardMmaGenes.of(config)
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
        return scratch_bytes(problem, BackwardMmaGenes.of(config))

    def unordered(self, problem: AttentionProblem, config: KernelConfig) -> tuple[str, ...]:
        genes = BackwardMmaGenes.of(config)
        added = ["dq"] * adds_dq(genes) + ["dk", "dv"] * (genes.QUERY_SPLIT > 1)
        return (*added, *(["dbias"] if shares_bias(problem) else []), *unordered_tables(problem))

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, BackwardMmaGenes.of(config), registers)


def _lengths(problem: AttentionProblem) -> tuple[KernelArg, ...]:
    return Scalar("int32", problem.seqlen_q), Scalar("int32", problem.seqlen_k)


def _sums(problem: AttentionProblem, genes: BackwardMmaGenes) -> tuple[KernelArg, ...]:
    """The buffer of fp32 sums, and where in it those of dK and dV begin."""
    _, dk, dv, end = sum_offsets(problem, genes)
    return Buffer("sums") if end else NULL, Scalar("int64", dk), Scalar("int64", dv)


def _sink_sums(problem: AttentionProblem) -> KernelArg:
    return Buffer("sink_sums") if "sinks" in parse_grads(problem.grads) else NULL


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
        *passed(variant_given(problem), states_given(problem, packs=False), gradient_given(problem)),
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
        *passed(variant_given(problem), states_given(problem, packs=False), gradient_given(problem)),
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
        *passed(variant_given(problem), states_given(problem, packs=False)),
    )


MAX_WARPS = 16


def why_wrong_shape(problem: AttentionProblem, genes: BackwardMmaGenes) -> str | None:
    """Tiles that are not whole mma tiles of each warp, or too many warps."""
    block_m, block_n, warps, query_warps = genes.BLOCK_M, genes.BLOCK_N, genes.WARPS, genes.QUERY_WARPS
    if block_n % (16 * warps):
        return f"BLOCK_N={block_n} keys do not divide into tiles of 16 for WARPS={warps}."
    if block_m % (16 * query_warps):
        return f"BLOCK_M={block_m} queries do not divide into steps of 16 for QUERY_WARPS={query_warps}."
    if block_m // query_warps % genes.PART:
        return f"PART={genes.PART} does not divide the {block_m // query_warps} queries of a warp."
    if block_warps(genes) > MAX_WARPS:
        return (
            f"WARPS={warps} times QUERY_WARPS={query_warps} is over {MAX_WARPS} warps, with which a thread has 128 "
            "registers."
        )
    if query_warps * 16 > max(problem.head_dim, problem.head_dim_v):
        return f"QUERY_WARPS={query_warps}: head_dim has fewer blocks of 16 columns."
    if not adds_dq(genes):
        return None
    dq_warps = genes.DQ_WARPS
    columns = block_warps(genes) // dq_warps
    if block_warps(genes) % dq_warps or block_m % (16 * dq_warps):
        return (
            f"DQ_WARPS={dq_warps} does not divide the block's {block_warps(genes)} warps and its tiles of 16 queries."
        )
    if columns & (columns - 1):
        return f"DQ_WARPS={dq_warps} leaves {columns} warps for columns of dQ, which must be a power of two."
    if 16 * columns >= 2 * max(16, problem.head_dim):
        return f"DQ_WARPS={dq_warps} leaves {columns} warps for columns of dQ, of which half or more have none."
    return None


def why_not_whole_lists(problem: AttentionProblem, genes: BackwardMmaGenes) -> str | None:
    """Tiles that are no parts of a block, or do not take all tiles of a list; a bias behind an expression."""
    if problem.own_score and "bias" in parse_grads(problem.grads):
        return "The gradient of a bias beside an expression of scores is backward_scalar's."
    if not problem.blocks:
        return None
    if genes.QUERY_SPLIT > 1 or genes.CAUSAL_SKIP:
        name = "CAUSAL_SKIP" if genes.CAUSAL_SKIP else f"QUERY_SPLIT={genes.QUERY_SPLIT}"
        return f"{name}: a block takes all tiles of queries that a block list names."
    return why_not_listed(problem, genes.BLOCK_M, genes.BLOCK_N) or (
        None if adds_dq(genes) else why_no_part(problem, genes)
    )


def why_no_part(problem: AttentionProblem, genes: BackwardMmaGenes) -> str | None:
    """The same of tiles of the launch that computes dQ by itself."""
    reason = why_not_listed(problem, genes.PASS_M, genes.PASS_N)
    return reason and reason.replace("BLOCK_", "PASS_")


def why_wrong_pass(genes: BackwardMmaGenes) -> str | None:
    """Tiles of a launch that computes dQ by itself."""
    if not adds_dq(genes) and genes.PASS_M % (16 * genes.PASS_WARPS):
        return f"PASS_M={genes.PASS_M} queries do not divide into tiles of 16 for PASS_WARPS={genes.PASS_WARPS}."
    if not adds_dq(genes) and genes.QUERY_SPLIT > 1:
        return f"QUERY_SPLIT={genes.QUERY_SPLIT} goes with DQ=add: its sums are converted by the third launch."
    return None


def why_not_deterministic(problem: AttentionProblem, genes: BackwardMmaGenes) -> str | None:
    """Sums whose order differs from run to run, where the same bits are asked for."""
    if not problem.deterministic:
        return None
    if adds_dq(genes):
        return "DQ=add adds in any order; deterministic=1 asks for DQ=pass."
    if "bias" in parse_grads(problem.grads) and problem.bias != "bhs":
        return "deterministic: the gradient of a bias that batches or heads share is added up in any order."
    if added := unordered_tables(problem):
        return f"deterministic: the gradient {added[0]} of a table is added up in any order."
    return None


def why_redundant(problem: AttentionProblem, genes: BackwardMmaGenes) -> str | None:
    """Configs that do what a smaller one does."""
    block_m, block_n = genes.BLOCK_M, genes.BLOCK_N
    rows, keys = row_blocks(problem, block_m), key_blocks(problem, block_n)
    steps = rows * problem.group_size
    if block_m > 16 * genes.QUERY_WARPS and block_m >= 2 * problem.seqlen_q:
        return f"BLOCK_M={block_m} for {problem.seqlen_q} queries leaves half of the tile or more without work."
    if block_n > 16 and block_n >= 2 * problem.seqlen_k:
        return f"BLOCK_N={block_n} for {problem.seqlen_k} keys leaves half of the block or more without work."
    if steps < genes.STAGES:
        return f"STAGES={genes.STAGES} is more than the {steps} tiles of {block_m} queries of a block."
    if steps < genes.QUERY_SPLIT:
        return f"QUERY_SPLIT={genes.QUERY_SPLIT} is more than the {steps} tiles of {block_m} queries of K/V head."
    if genes.CAUSAL_SKIP and not problem.causal:
        return "CAUSAL_SKIP only matters with a causal mask or a window: without one every query sees every key."
    heads = problem.kv_heads * problem.batch
    if genes.BLOCK_ORDER == "heads" and (keys == 1 or heads == 1):
        return f"BLOCK_ORDER=heads is the same order as keys for {keys} tiles of {heads} heads."
    for name, value in IDLE.items():
        if name.startswith("PASS") == adds_dq(genes) and genes.value(name) != value:
            how = "is added up by the blocks of keys" if adds_dq(genes) else "is computed by a launch of its own"
            return f"{name}={genes.value(name)} does nothing where the gradient of Q {how}: it must be {value}."
    if adds_dq(genes):
        return None
    if genes.PASS_M > 16 and 2 * problem.seqlen_q <= genes.PASS_M and genes.PASS_M > 16 * genes.PASS_WARPS:
        return f"PASS_M={genes.PASS_M} for {problem.seqlen_q} queries leaves half of the block or more without work."
    if genes.PASS_N > 16 and 2 * problem.seqlen_k <= genes.PASS_N:
        return f"PASS_N={genes.PASS_N} for {problem.seqlen_k} keys leaves half of the tile or more without work."
    if math.ceil(problem.seqlen_k / genes.PASS_N) < genes.PASS_STAGES:
        return f"PASS_STAGES={genes.PASS_STAGES} is more than the tiles of {genes.PASS_N} of {problem.seqlen_k} keys."
    return None


def why_too_big(problem: AttentionProblem, genes: BackwardMmaGenes, gpu: GpuSpec) -> str | None:
    """Grids, shared memory, threads and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    tiles = max(
        key_blocks(problem, genes.BLOCK_N) * genes.QUERY_SPLIT,
        0 if adds_dq(genes) else row_blocks(problem, genes.PASS_M),
    )
    if genes.BLOCK_ORDER == "heads" and tiles > MAX_GRID_YZ:
        return f"BLOCK_ORDER=heads puts {tiles} tiles in grid z, which ends at {MAX_GRID_YZ}."
    needs = [(smem_bytes(problem, genes), "BLOCK_M, BLOCK_N and STAGES")]
    if not adds_dq(genes):
        needs.append((pass_smem_bytes(problem, genes), "PASS_M, PASS_N and PASS_STAGES"))
    for smem, by in needs:
        if smem > gpu.smem_per_block:
            return f"The block needs {smem} bytes of shared memory, by {by}; {gpu.name} gives one {gpu.smem_per_block}."
    blocks, warps = genes.BLOCKS_PER_SM, block_warps(genes)
    return (
        why_not_resident(gpu, blocks, warps, smem_bytes(problem, genes))
        or why_same_code(blocks, warps)
        or _why_too_few(
            registers_needed(problem, genes), register_cap(warps, blocks), "BLOCK_N, QUERY_WARPS, WARPS, PART"
        )
        or (
            None
            if adds_dq(genes)
            else _why_too_few(
                pass_registers_needed(problem, genes), register_cap(genes.PASS_WARPS, 1), "PASS_M, PASS_N, PASS_WARPS"
            )
        )
    )


def _why_too_few(needed: int, cap: int, by: str) -> str | None:
    """Fewer registers than a thread needs: the kernel would spill."""
    return f"A thread needs about {needed} registers, by {by}, and has {cap}." if needed > cap else None


def unordered_tables(problem: AttentionProblem) -> tuple[str, ...]:
    """The gradients that are added up in any order: of tables an element of which several scores may be of."""
    return tuple(f"d{table.buffer}" for table in tables_of(problem) if not _is_each_alone(problem, table))


def _is_each_alone(problem: AttentionProblem, table: Table) -> bool:
    """Whether each score is of an element of its own."""
    found = [one for one in elements_of(problem) if one.table == table]
    if not found:
        return True
    sizes = {"b": problem.batch, "h": problem.heads, "q": problem.seqlen_q, "k": problem.seqlen_k}
    names = {index.name: size for index, size in zip(found[0].indices, table.shape) if isinstance(index, Name)}
    inside = all(names.get(name, 1) >= size for name, size in sizes.items())
    return len(found) == 1 and inside and not problem.varlen


def table_gradients(problem: AttentionProblem) -> str:
    """The class `Own` of `templates/backward_mma/table_gradients.cuh`."""
    tables, found, score = tables_of(problem), elements_of(problem), problem.own_score
    arguments = "int b, int h, int q, int k, int d"
    slopes = [in_cuda(derivative(score.tree, one)) for one in found] if score else []
    places = [f"d_{one.table.name} + {place_in_cuda(one)}" for one in found]
    few = [one if sharing_of(one) == "FEW" else None for one in found]
    first = [
        one and replace(one, indices=(*one.indices[:-1], Number(0)), wraps=(*one.wraps[:-1], False)) for one in few
    ]
    rows = [f"d_{one.table.name} + {place_in_cuda(one)}" if one else "nullptr" for one in first]
    return "\n".join(
        (
            "struct OwnGradients : OwnScore {",
            f"  static constexpr bool WANTED = {'true' if tables else 'false'};  // gradients of tables",
            f"  static constexpr int COUNT = {len(found)};  // elements that scores differ by",
            "  template <int I> static constexpr Sharing SHARED = "
            + "".join(f"I == {i} ? Sharing::{sharing_of(one)} : " for i, one in enumerate(found))
            + "Sharing::PAIR;",
            "  template <int I> static constexpr bool APART = "
            + "".join(f"I == {i} ? {str(is_apart(one)).lower()} : " for i, one in enumerate(found))
            + "false;  // diagonals have elements of their own",
            *(f"  float* d_{table.name};  // the gradient of {table.name}" for table in tables),
            f"  template <int I> __device__ __forceinline__ float slope_by(float s, {arguments}) const {{",
            *_cases(slopes, "0.f"),
            "  }",
            f"  template <int I> __device__ __forceinline__ float* place({arguments}) const {{",
            *_cases(places, "nullptr"),
            "  }",
            *(_few(few, rows) if any(few) else ()),
            "  __device__ __forceinline__ void clear(int64_t first, int64_t step) const {",
            *(line for table in tables for line in _clear(table)),
            "  }",
            "};",
        )
    )


def _few(few: list[Load | None], rows: list[str]) -> Iterator[str]:
    """What elements of `Sharing::FEW` have beside others: where their rows lie and how long they are, and which of the
    row an element is."""
    sizes = [size_member(one.table, len(one.indices) - 1) if one else "0" for one in few]
    within = [inside_in_cuda(one.indices[-1], one.wraps[-1], size) if one else "0" for one, size in zip(few, sizes)]
    yield "  template <int I> __device__ __forceinline__ int row_length() const {"
    yield from _cases(sizes, "0")
    yield "  }"
    yield "  template <int I> __device__ __forceinline__ float* row(int b, int h, int d) const {"
    yield from _cases(rows, "nullptr")
    yield "  }"
    yield "  template <int I> __device__ __forceinline__ int in_row(int b, int h, int q, int k, int d) const {"
    yield from _cases(within, "0")
    yield "  }"


def _cases(values: list[str], otherwise: str) -> Iterator[str]:
    yield from (f"    if constexpr (I == {i}) return {value};" for i, value in enumerate(values))
    yield f"    return {otherwise};"


def _clear(table: Table) -> Iterator[str]:
    count = " * ".join(f"int64_t({size_member(table, i)})" for i in range(len(table.shape)))
    yield f"    for (int64_t i = first; i < {count}; i += step) d_{table.name}[i] = 0.f;"


def gradient_given(problem: AttentionProblem) -> list[Given]:
    """The fields of `OwnGradients` behind those of `OwnScore`."""
    return [Given("float*", f"d_{table.name}", Buffer(f"d{table.buffer}")) for table in tables_of(problem)]
