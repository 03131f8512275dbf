"""The backward pass on Hopper: tensor copies by a producer warp, wgmma by one to three consumer warpgroups; sm_90a
only."""

import math
from typing import Any, ClassVar

from evoattn.families.backward import Backward, bias_gradient, bias_gradient_strides, shares_bias, strides_of
from evoattn.families.backward_wgmma.resources import (
    GROUP_KEYS,
    ROW_THREADS,
    BackwardWgmmaGenes,
    adds_in_order,
    dim_shares,
    dq_columns,
    dq_share,
    dq_width,
    head_blocks,
    is_alone,
    key_blocks,
    lacks_room,
    may_see_none,
    moved_registers,
    pair,
    producer_warps,
    registers_at_launch,
    registers_needed,
    rounds_of_parts,
    scratch,
    section_heads,
    smem_bytes,
    term_parts,
    threads,
    units,
    v_steps,
    waits_ahead,
    warpgroups,
    whole_tiles,
)
from evoattn.families.backward_wgmma.work import launch_work
from evoattn.families.base import softmax_scale_log2
from evoattn.families.block_list import block_list_constants, list_given, states_given, why_not_listed
from evoattn.families.dealt import batches, row_blocks
from evoattn.families.flash_wgmma.text import wgmma_function
from evoattn.families.given import passed, printed
from evoattn.families.mask_blocks import pack_launches, pack_work
from evoattn.families.residency import why_no_memory, why_not_resident, why_same_code
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, bias_map, sliding_map, tile_map, why_not_sliding
from evoattn.families.variants import variant_constants, variant_given
from evoattn.families.work import LaunchWork
from evoattn.model.backward import TERM_GRADS, parse_grads
from evoattn.model.gpu import MAX_GRID_YZ, GpuSpec
from evoattn.model.launch import NULL, Buffer, KernelArg, KernelLaunch, Scalar
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

ARCH = "sm_90a"
MAX_HEAD_DIM, DIM_STEP = 256, 8
MAX_SINGLE_DIM = 128
"""The largest head_dim that all tiles take."""
MAX_SHARED_DIM, MAX_SUM_OF_DIMS = 192, 320
"""The largest head_dim, and sum of both, whose dK and dV a thread's registers hold beside small tiles of queries;
of larger ones warpgroups have parts."""
ROW_PARTS = 4
"""Blocks of the launch that makes rows of dQ that share a tile of queries: of one alone each row would wait for those
before it."""
KEY_SHARES = 8
"""Blocks of the last launch that add up dK and dV of a tile of keys, QUERY_SPLIT > 1; of grouped heads in all."""


class BackwardWgmma(Backward):
    """The `Family` of `templates/backward_wgmma.cu.j2`."""

    name: ClassVar[str] = "backward_wgmma"
    genes = BackwardWgmmaGenes
    summary: ClassVar[str] = "gradients by Hopper's wgmma, tensor copies and warp specialization; fp16 and bf16"
    devices: ClassVar[str] = ARCH
    variants: ClassVar[tuple[str, ...]] = (*Backward.scored, "varlen", "blocks")

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if gpu.arch != ARCH:
            return f"backward_wgmma needs wgmma and tensor maps of {ARCH}, and {gpu.name} is {gpu.arch}."
        for dim in (problem.head_dim, problem.head_dim_v):
            if dim % DIM_STEP or dim > MAX_HEAD_DIM:
                return (
                    f"backward_wgmma takes head_dims of {DIM_STEP} to {MAX_HEAD_DIM} in steps of {DIM_STEP}, not {dim}."
                )
        dim, value_dim = problem.head_dim, problem.head_dim_v
        halves = dim == MAX_HEAD_DIM and value_dim % MAX_SINGLE_DIM == 0
        single = max(dim, value_dim) <= MAX_SHARED_DIM and dim + value_dim <= MAX_SUM_OF_DIMS
        if needs_both(problem) and dim > MAX_SINGLE_DIM and not (halves or single):
            return (
                f"Beside an expression of scores, or for a bias's gradient, backward_wgmma has no tile for a head_dim "
                f"of {dim} beside {value_dim}: above {MAX_SINGLE_DIM} it takes those to {MAX_SHARED_DIM} that are "
                f"{MAX_SUM_OF_DIMS} together, and {MAX_HEAD_DIM} beside {MAX_SINGLE_DIM} or {MAX_HEAD_DIM}."
            )
        if reason := why_not_sliding(problem):
            return reason
        if not set(parse_grads(problem.grads)) <= set(TERM_GRADS):
            return "backward_wgmma computes no gradients of tables."
        if problem.own_score and "bias" in parse_grads(problem.grads):
            return "The gradient of a bias beside an expression of scores is backward_scalar's."
        if problem.deterministic and shares_bias(problem):
            return "backward_wgmma adds up the gradient of a bias that batches or heads share in any order."
        return self.why_past_grid(max(problem.heads, batches(problem)))

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = BackwardWgmmaGenes.of(config)
        return (
            why_useless(problem, genes)
            or why_not_whole_lists(problem, genes)
            or (why_redundant(problem, genes) if redundant else None)
            or (why_not_last(problem, genes, gpu) if genes.SPLIT == "last" else None)
            or (why_not_stored(problem, genes) if genes.DQ_BEGIN == "stored" else None)
            or why_too_big(problem, genes, gpu)
            or self.why_too_long(problem, config, gpu)
        )

    def why_too_long(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        genes = BackwardWgmmaGenes.of(config)
        if adds_in_order(problem, genes) and genes.ROTATE and waits_ahead(problem, genes, gpu.sm_count) > 0:
            return (
                f"ROTATE: blocks of BLOCK_N={genes.BLOCK_N} of {problem.seqlen_k} keys wait for one another, "
                f"and may not all run at once on {gpu.name}."
            )
        return None

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = BackwardWgmmaGenes.of(config)
        producer, consumer = moved_registers(problem, genes)
        dims, dtype = dim_shares(genes), problem.dtype
        columns, share = dq_columns(problem, genes), dq_share(problem, genes)
        steps_of_v = v_steps(problem, genes)
        p_in_registers, ds_in_registers = genes.P_PLACE == "registers", genes.DS_PLACE == "registers"
        by_dims, claimed = genes.DQ_ROWS == "dims", genes.SCHEDULE == "claimed"
        keys = genes.BLOCK_N if genes.DKV_ROWS == "dims" else 0
        return {
            **variant_constants(problem, slope=True),
            **block_list_constants(problem),
            **printed(VARIANT=variant_given(problem), KEY_LIST=list_given(problem), BLOCK_STATES=states_given(problem)),
            "BIAS_GRADIENT": "bias" in parse_grads(problem.grads),
            "BIAS_PARAMETERS": ", const __grid_constant__ TensorMap bias_map" if problem.bias else "",
            "BIAS_MAP": "bias_map" if problem.bias else "q_map",
            "SINK_GRADIENT": "sinks" in parse_grads(problem.grads),
            "QUERY_SPLIT": genes.QUERY_SPLIT,
            "DV_LAST": genes.ORDER == "dv_last",
            "TERM_PARTS": term_parts(problem, genes),
            "ROW_PARTS": ROW_PARTS,
            "KEY_SHARES": KEY_SHARES,
            "SPLIT_LAST": genes.SPLIT == "last",
            "PRODUCER_WARPS": producer_warps(genes),
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
            "V_STEPS": steps_of_v,
            "P_IN_REGISTERS": p_in_registers,
            "DS_IN_REGISTERS": ds_in_registers,
            "DQ_BY_DIMS": by_dims,
            "DQ_ALONE": genes.DQ_ROWS == "one",
            "DQ_BY_WARP": genes.DQ_SUM == "warp",
            "HEADS_FASTEST": genes.BLOCK_ORDER == "heads",
            "FIRST_STORES": genes.DQ_BEGIN == "stored",
            "SECTIONS": genes.BLOCK_ORDER == "sections",
            "CLAIMED": claimed,
            "OWN_KEYS_FIRST": genes.DQ_WHEN == "own_first",
            "CLAIM_PARAMETERS": ", int claim_count" * claimed,
            "CLAIM_COUNT": "claim_count" if claimed else "0",
            "ONE_LAUNCH": genes.LAUNCHES == "one",
            "WHOLE_HEADS": genes.LAUNCHES == "two",
            "ROW_PARAMETERS": ROW_PARAMETERS * (genes.LAUNCHES != "three"),
            "ROW_ARGUMENTS": ROW_ARGUMENTS * (genes.LAUNCHES != "three"),
            "BY_PRODUCTS": genes.GROUP_SHARE == "products",
            "DKV_BY_DIMS": genes.DKV_ROWS == "dims",
            "PAIRED": genes.PAIR,
            "HALF_PARAMETERS": ", const __grid_constant__ TensorMap half_map" * genes.PAIR,
            "HALF_MAP": "half_map" if genes.PAIR else "k_map",
            "CLUSTER_DIMS": f"__cluster_dims__({pair(genes)}, 1, 1)" * genes.PAIR,
            "ROTATED": genes.ROTATE,
            "IN_ORDER": adds_in_order(problem, genes),
            "LSE_GRADIENT": problem.lse,
            "SMEM_BYTES": smem_bytes(problem, genes),
            "DQ_COLUMNS": columns,
            "DQ_ALL_COLUMNS": dq_width(problem, genes),
            "WGMMA_S": "\n".join(
                wgmma_function("wgmma_s", keys or genes.BLOCK_M // dims, dtype, from_registers, b_transposed=False)
                for from_registers in (False, True)
                if steps_of_v or not from_registers
            ),
            "WGMMA_DV": wgmma_function(
                "wgmma_dv",
                keys or problem.head_dim_v // dims,
                dtype,
                p_in_registers,
                True,
                a_transposed=not p_in_registers,
            ),
            "WGMMA_DK": wgmma_function(
                "wgmma_dk",
                keys or problem.head_dim // dims,
                dtype,
                ds_in_registers,
                True,
                a_transposed=not ds_in_registers,
            ),
            "DQ_SHARE": share,
            "WGMMA_DQ": "\n".join(
                wgmma_function("wgmma_dq", each, dtype, False, b_transposed=not by_dims, a_transposed=by_dims)
                for each in (columns, share)
                if each
            ),
        }

    def why_outdated(self, config: KernelConfig, source: str) -> str | None:
        if "DQ_ALL_COLUMNS = (HEAD_DIM" in source:
            return "It is of before the sums of dQ were as wide as head_dims below 64, and takes more memory for them."
        if config.params.get("DQ_SUM") == "bulk":
            return "DQ_SUM=bulk is gone: it sums dQ in shared memory that today's launches leave out."
        if "backward_wgmma_terms" in source and "TERM_PARTS" not in source:
            return "It is of before the blocks of its first launch depended on head_dim, and would leave rows out."
        return super().why_outdated(config, source)

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes = BackwardWgmmaGenes.of(config)
        m, n = genes.BLOCK_M, genes.BLOCK_N
        tiles, sinks = row_blocks(problem, genes.BLOCK_M), "sinks" in parse_grads(problem.grads)
        row_block, in_order = (ROW_THREADS, 1, 1), adds_in_order(problem, genes)
        claimed = genes.SCHEDULE == "claimed"
        progress: KernelArg = Buffer("progress") if in_order or claimed or genes.DQ_BEGIN == "stored" else NULL
        keys, heads, batch = key_blocks(problem, genes), problem.kv_heads, batches(problem)
        blocks, in_parts = math.ceil(keys / pair(genes)) * genes.QUERY_SPLIT, genes.QUERY_SPLIT > 1
        grid = (heads, batch, blocks) if genes.BLOCK_ORDER != "keys" else (blocks, heads, batch)
        ahead = waits_ahead(problem, genes, gpu.sm_count) if in_order else 0
        tiles_of_all, whole = keys * heads * batch, whole_tiles(problem, genes, gpu.sm_count)
        if genes.BLOCK_ORDER == "sections":
            ahead = section_heads(problem, genes, gpu.sm_count)
        if genes.SPLIT == "last":
            grid, ahead = (whole + (tiles_of_all - whole) * genes.QUERY_SPLIT, 1, 1), whole
        grid = (grid[0] * pair(genes), *grid[1:])
        count = math.prod(grid)
        if claimed:
            grid = (min(count, gpu.sm_count * genes.BLOCKS_PER_SM), 1, 1)
        if genes.LAUNCHES == "two":
            grid = (head_blocks(problem, genes, gpu.sm_count), 1, 1)
        together = 1  # by a block list, and where they may not all run at once, blocks wait for earlier ones alone
        if in_order and not ahead and not problem.blocks and (problem.causal or genes.ROTATE):
            together = math.prod(grid) if genes.BLOCK_ORDER != "keys" else blocks
        sums, sum_tiles = (Buffer("key_sums"), keys) if in_parts else (NULL, 0)
        sum_slots = sum_tiles * max(1, KEY_SHARES // problem.group_size)
        if genes.SPLIT == "last":
            sum_tiles, sum_slots = whole, math.ceil((tiles_of_all - whole) * KEY_SHARES / (problem.heads * batch))
        alone = is_alone(problem, genes)
        log_sums, deltas, dq_sums = (NULL if alone else Buffer(name) for name in ("log_sums", "deltas", "dq_sums"))
        dlse: KernelArg = Buffer("dlse") if problem.lse else NULL
        scale = Scalar("float32", problem.softmax_scale)
        sizes = _ints(problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k)
        terms: tuple[KernelArg, ...] = (
            *(Buffer(name) for name in ("o", "do", "lse")),
            dlse,
            *(log_sums, deltas, dq_sums, progress),
            *_ints(problem.heads, problem.seqlen_q),
            *strides_of(problem, "o", "do"),
            *_ints(problem.seqlen_k),
            bias_gradient(problem),
            Scalar("int64", math.prod(problem.term_shapes["bias"]) if "bias" in parse_grads(problem.grads) else 0),
            *passed(variant_given(problem), states_given(problem)),
        )
        by_tiles = sliding_map if problem.varlen else tile_map
        main: tuple[KernelArg, ...] = (
            *(by_tiles(problem, name, rows) for name, rows in zip(("q", "k", "v", "do"), (m, n, n, m), strict=True)),
            *(log_sums, deltas, dq_sums, Buffer("dk"), Buffer("dv")),
            *sizes,
            *strides_of(problem, "dk", "dv"),
            softmax_scale_log2(problem),
            scale,
            progress,
            *_ints(ahead, tiles),
            bias_gradient(problem),
            *bias_gradient_strides(problem),
            *passed(variant_given(problem), states_given(problem)),
            sums,
            *((bias_map(problem, m),) if problem.bias else ()),
            *((tile_map(problem, "k", n, by_chunks=True),) if genes.PAIR else ()),
            *_ints(*(count,) * claimed),
            *row_arguments(problem) * (genes.LAUNCHES != "three"),
        )
        rows: tuple[KernelArg, ...] = (
            *(dq_sums, Buffer("dq")),
            *_ints(problem.heads, problem.seqlen_q),
            *strides_of(problem, "dq"),
            scale,
            *_ints(problem.seqlen_k),
            *(log_sums, deltas, Buffer("dsinks") if sinks else NULL),
            *_ints(batches(problem)),
            *passed(variant_given(problem)),
            *(sums, Buffer("dk"), Buffer("dv")),
            *strides_of(problem, "dk", "dv"),
            *_ints(problem.kv_heads, sum_tiles, sum_slots),
        )
        smem, packs = smem_bytes(problem, genes), pack_launches(problem)
        row_grid = (problem.heads, batch)
        if alone:
            return (KernelLaunch(self.name, grid, (threads(genes), 1, 1), smem, main),)
        last_grid = (tiles * ROW_PARTS + sinks + sum_slots, *row_grid)
        last = KernelLaunch("backward_wgmma_rows", last_grid, row_block, 0, rows, overlaps=True)
        return (
            *packs,
            KernelLaunch(
                "backward_wgmma_terms",
                (tiles * term_parts(problem, genes), *row_grid),
                row_block,
                0,
                terms,
                overlaps=bool(packs),
            ),
            KernelLaunch(
                self.name,
                grid,
                (threads(genes), 1, 1),
                smem,
                main,
                (pair(genes), 1, 1),
                overlaps=True,
                together=together,
            ),
            *(last,) * (genes.LAUNCHES != "two"),
        )

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        return scratch(problem, BackwardWgmmaGenes.of(config), gpu.sm_count)

    def unordered(self, problem: AttentionProblem, config: KernelConfig) -> tuple[str, ...]:
        genes = BackwardWgmmaGenes.of(config)
        alone = key_blocks(problem, genes) == 1 or genes.LAUNCHES == "two"
        any_order = not alone and not adds_in_order(problem, genes)
        return (*(("dq",) if any_order else ()), *(("dbias",) if shares_bias(problem) else ()))

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return *pack_work(problem), *launch_work(problem, BackwardWgmmaGenes.of(config), registers)


ROW_PARAMETERS = (
    ", const Element* o_gmem, const Element* do_gmem, const float* lse_gmem, const float* dlse_gmem, Element* dq_gmem"
    + "".join(f", int64_t {name}_{of}_stride" for name in ("o", "do", "dq") for of in ("batch", "head", "row"))
)
ROW_ARGUMENTS = (
    "o_gmem, do_gmem, lse_gmem, dlse_gmem, nullptr, nullptr, nullptr, dq_gmem, "
    + "".join(f"{{{name}_batch_stride, {name}_head_stride, {name}_row_stride}}, " for name in ("o", "do", "dq"))
    + "heads, seqlen_q, query_tiles, softmax_scale, seqlen_q"
)


def row_arguments(problem: AttentionProblem) -> tuple[KernelArg, ...]:
    """Of `ROW_PARAMETERS`."""
    dlse: KernelArg = Buffer("dlse") if problem.lse else NULL
    return (*map(Buffer, ("o", "do", "lse")), dlse, Buffer("dq"), *strides_of(problem, "o", "do", "dq"))


def _ints(*numbers: int) -> tuple[Scalar, ...]:
    return tuple(Scalar("int32", number) for number in numbers)


MAX_WARPGROUPS = 3
SCORE_STEP = 16
"""Queries of scores that a warp puts into shared memory at a time."""


def why_useless(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> str | None:
    """Genes that do not fit each other."""
    groups, dims = warpgroups(genes), dim_shares(genes)
    if groups > MAX_WARPGROUPS:
        return (
            f"BLOCK_N={genes.BLOCK_N} with DIM_GROUPS={genes.DIM_GROUPS} are {groups} warpgroups, of which there are 3 "
            f"at most."
        )
    if dims > 1 and "registers" in (genes.P_PLACE, genes.DS_PLACE):
        return f"DIM_GROUPS={dims} needs P_PLACE=shared and DS_PLACE=shared: each warpgroup has a part of both."
    if dims > 1 and (
        problem.head_dim % (dims * CHUNK_COLUMNS)
        or problem.head_dim_v % (dims * CHUNK_COLUMNS)
        or genes.BLOCK_M % (dims * SCORE_STEP)
    ):
        return (
            f"DIM_GROUPS={dims} needs head_dims of {dims} times {CHUNK_COLUMNS}, and BLOCK_M in steps of "
            f"{dims * SCORE_STEP}."
        )
    if not dq_columns(problem, genes):
        return (
            f"DQ_ROWS={genes.DQ_ROWS} BLOCK_M={genes.BLOCK_M}: {groups} warpgroups (BLOCK_N, DIM_GROUPS) cannot share "
            f"{genes.BLOCK_M} × {dq_width(problem, genes)} of dQ in whole tiles."
        )
    if genes.PRODUCER == "warp" and genes.DQ_SUM == "warp":
        return "DQ_SUM=warp needs PRODUCER=warpgroup, which has warps to spare."
    if genes.ROTATE and problem.causal:
        return "ROTATE needs mask=full: under a causal mask blocks begin with different queries as it is."
    if genes.BLOCK_ORDER == "sections" and not (problem.causal or problem.window or problem.varlen or problem.blocks):
        return "BLOCK_ORDER=sections is of tiles of keys that take different times: a mask, packed sequences or a list."
    if genes.SCHEDULE == "claimed" and (adds_in_order(problem, genes) or problem.blocks):
        return "SCHEDULE=claimed is of blocks that add in any order, without block lists."
    if genes.SCHEDULE == "claimed" and lacks_room(problem, genes):
        return (
            f"SCHEDULE=claimed puts dK and dV where dS and P lie: BLOCK_M={genes.BLOCK_M} DS_STAGES={genes.DS_STAGES} "
            f"P_PLACE={genes.P_PLACE} leave no room."
        )
    return (
        (why_not_one_launch(problem, genes) if genes.LAUNCHES == "one" else None)
        or (why_not_two_launches(problem, genes) if genes.LAUNCHES == "two" else None)
        or (why_not_paired(problem, genes) if genes.PAIR else None)
        or (why_not_turned(problem, genes) if genes.DKV_ROWS == "dims" else why_not_whole_groups(genes))
        or (why_not_by_products(problem, genes) if genes.GROUP_SHARE == "products" else None)
        or (why_not_one(genes) if genes.DQ_ROWS == "one" else None)
        or why_not_in_order(genes)
    )


def why_not_by_products(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> str | None:
    """GROUP_SHARE=products where there are not two warpgroups, or one needs what the other has."""
    places = {genes.P_PLACE, genes.DS_PLACE}
    if genes.DKV_ROWS == "keys" and ((genes.BLOCK_N, genes.DIM_GROUPS) != (64, 2) or "shared" in places):
        return "GROUP_SHARE=products needs BLOCK_N=64 DIM_GROUPS=2 P_PLACE=registers DS_PLACE=registers."
    if genes.ORDER != "in_turn" or genes.SCHEDULE != "single":
        return "GROUP_SHARE=products needs ORDER=in_turn SCHEDULE=single."
    if needs_both(problem):
        return "GROUP_SHARE=products takes no expression of scores, and makes no gradient of a bias."
    return None


def needs_both(problem: AttentionProblem) -> bool:
    """Whether the warpgroup that has a score must have its gradient."""
    return bool(problem.own_score) or "bias" in parse_grads(problem.grads)


def why_not_turned(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> str | None:
    """DKV_ROWS=dims where the rows of scores are not the queries of one product, or its terms are of keys."""
    found = (genes.GROUP_SHARE, genes.BLOCK_M, genes.DIM_GROUPS, genes.P_PLACE, genes.DS_PLACE)
    if found != ("products", 64, 2, "shared", "shared"):
        return "DKV_ROWS=dims needs GROUP_SHARE=products BLOCK_M=64 DIM_GROUPS=2 P_PLACE=shared DS_PLACE=shared."
    if problem.softcap or problem.bias or problem.blocks or genes.PAIR:
        return "DKV_ROWS=dims takes no soft cap, no bias, no block lists and no pairs."
    return None


def why_not_whole_groups(genes: BackwardWgmmaGenes) -> str | None:
    """DKV_ROWS=keys where a warpgroup has less than its keys."""
    if genes.BLOCK_N % GROUP_KEYS:
        return f"BLOCK_N={genes.BLOCK_N} needs DKV_ROWS=dims: else a warpgroup has {GROUP_KEYS} keys."
    return None


def why_not_paired(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> str | None:
    """PAIR where two blocks do not go through the same tiles of queries, or cannot share dQ."""
    if genes.GROUP_SHARE != "products" or problem.head_dim != 4 * CHUNK_COLUMNS:
        return f"PAIR needs GROUP_SHARE=products, and a head_dim of {4 * CHUNK_COLUMNS}: a warpgroup has 64 of dQ."
    if genes.DQ_ROWS == "queries" and genes.BLOCK_M != CHUNK_COLUMNS:
        return f"PAIR needs DQ_ROWS=dims or BLOCK_M={CHUNK_COLUMNS}: blocks share dimensions of dQ, not queries."
    if problem.varlen or problem.blocks or problem.deterministic:
        return "PAIR takes no packed sequences or block lists, and adds in any order."
    if key_blocks(problem, genes) == 1:
        return f"PAIR needs more than BLOCK_N={genes.BLOCK_N} keys."
    if genes.DQ_BEGIN != "cleared" or genes.ROTATE or genes.LAUNCHES != "three" or genes.QUERY_SPLIT > 1:
        return "PAIR needs DQ_BEGIN=cleared ROTATE=false LAUNCHES=three QUERY_SPLIT=1."
    return None


def why_not_one_launch(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> str | None:
    """LAUNCHES=one where blocks have other than all queries of their keys, or no rows of dQ."""
    if genes.DQ_SUM == "warp" or dq_share(problem, genes):
        return "LAUNCHES=one needs dQ in registers, DQ_SUM=registers, and a part of it for each warpgroup (DQ_ROWS)."
    if genes.QUERY_SPLIT > 1 or genes.SCHEDULE != "single":
        return "LAUNCHES=one needs QUERY_SPLIT=1 and SCHEDULE=single: a block for all queries of a tile of keys."
    if problem.varlen or problem.blocks or problem.grads:
        return "LAUNCHES=one takes no packed sequences or block lists, and no gradients of biases or sinks."
    return None


def why_not_two_launches(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> str | None:
    """LAUNCHES=two where a block does not claim all keys of a head in order, or its threads have other parts of dQ."""
    if genes.DQ_SUM == "warp" or genes.DQ_ROWS == "one" or dq_share(problem, genes):
        return "LAUNCHES=two needs dQ in registers, DQ_SUM=registers, and a part of it for each warpgroup (DQ_ROWS)."
    if warpgroups(genes) == 1:
        return "LAUNCHES=two needs several warpgroups (BLOCK_N, DIM_GROUPS): of one most products wait in turn."
    if genes.SCHEDULE != "claimed" or genes.BLOCK_ORDER != "keys" or genes.QUERY_SPLIT > 1 or genes.ROTATE:
        return "LAUNCHES=two needs SCHEDULE=claimed BLOCK_ORDER=keys QUERY_SPLIT=1 ROTATE=false: a block claims heads."
    if dq_columns(problem, genes) > genes.BLOCK_M // dim_shares(genes):
        return (
            f"LAUNCHES=two BLOCK_M={genes.BLOCK_M} DIM_GROUPS={genes.DIM_GROUPS} leave scores fewer registers than dQ, "
            f"whose sums come there."
        )
    if problem.varlen or problem.grads or may_see_none(problem):
        return (
            "LAUNCHES=two takes no packed sequences, windows, or queries before the first key, and no gradients of "
            "biases or sinks."
        )
    return None


def why_not_one(genes: BackwardWgmmaGenes) -> str | None:
    """DQ_ROWS=one where dQ of a tile is not 64 queries, or a second warpgroup has nothing else to do. Added from
    registers it takes 1.01 to 1.06 of the time that it takes by a warp (six problems)."""
    if warpgroups(genes) != 2 or (genes.BLOCK_M, genes.GROUP_SHARE, genes.DQ_SUM) != (64, "dims", "warp"):
        return "DQ_ROWS=one needs BLOCK_M=64, two warpgroups (BLOCK_N, DIM_GROUPS), GROUP_SHARE=dims and DQ_SUM=warp."
    return "DQ_ROWS=one needs DQ_WHEN=all_there." if genes.DQ_WHEN != "all_there" else None


def why_not_in_order(genes: BackwardWgmmaGenes) -> str | None:
    """DQ_WHEN=own_first where no two warpgroups have keys of their own, or dS has one stage."""
    if genes.DQ_WHEN != "all_there" and (warpgroups(genes) != 2 or genes.DIM_GROUPS > 1 or genes.DS_STAGES == 1):
        return f"DQ_WHEN={genes.DQ_WHEN} needs BLOCK_N=128 DIM_GROUPS=1, the keys of two warpgroups, and DS_STAGES=2."
    return None


def why_not_whole_lists(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> str | None:
    """Tiles that are no parts of a block, and what does not go by a list; what adds in any order."""
    if problem.blocks and (genes.ROTATE or genes.QUERY_SPLIT > 1):
        name = "ROTATE" if genes.ROTATE else f"QUERY_SPLIT={genes.QUERY_SPLIT}"
        return f"{name} needs queries by the mask alone, and here a block list names them."
    in_order = adds_in_order(problem, genes)
    if in_order and genes.ROTATE and genes.QUERY_SPLIT > 1:
        return f"QUERY_SPLIT={genes.QUERY_SPLIT} ROTATE: blocks that add to dQ in order would wait for one another."
    if in_order and genes.BLOCK_ORDER == "sections":
        return f"BLOCK_ORDER={genes.BLOCK_ORDER} is of blocks that add in any order; deterministic=1 asks for others."
    alone = key_blocks(problem, genes) == 1 or genes.LAUNCHES == "two"
    if problem.deterministic and not in_order and not alone:
        return "DQ_SUM=registers adds to dQ in any order; deterministic=1 asks for DQ_SUM=warp."
    return why_not_listed(problem, genes.BLOCK_M, genes.BLOCK_N)


def why_not_stored(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> str | None:
    """DQ_BEGIN=stored where blocks do not wait for the first one, or a list says whether one adds at all."""
    if genes.DQ_SUM != "warp":
        return "DQ_BEGIN=stored needs DQ_SUM=warp, which waits until the first block has stored."
    if problem.blocks:
        return "DQ_BEGIN=stored needs queries by the mask alone, and here a block list names them."
    return None


def why_not_last(problem: AttentionProblem, genes: BackwardWgmmaGenes, gpu: GpuSpec) -> str | None:
    """SPLIT=last where it is not possible, or no other than SPLIT=all, or of no use."""
    if genes.QUERY_SPLIT == 1:
        return "SPLIT=last needs QUERY_SPLIT of 2 or more."
    if problem.varlen or problem.causal or adds_in_order(problem, genes) or problem.blocks:
        return "SPLIT=last needs tiles of keys that take the same time: no causal mask, no packed sequences or lists."
    places, tiles = gpu.sm_count * genes.BLOCKS_PER_SM, key_blocks(problem, genes) * units(problem)
    if tiles < places:
        return f"SPLIT=last splits all {tiles} tiles of keys (BLOCK_N), as SPLIT=all does."
    if genes.BLOCK_ORDER not in ("keys", "heads"):
        return f"SPLIT=last takes BLOCK_ORDER=keys or heads, not {genes.BLOCK_ORDER}."
    rest = tiles % places
    if rounds_of_parts(rest, genes.QUERY_SPLIT, places) >= (rest > 0):
        return (
            f"SPLIT=last QUERY_SPLIT={genes.QUERY_SPLIT}: the last {rest} tiles of keys take no less time in parts on "
            f"{places} places."
        )
    return None


def why_redundant(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> str | None:
    """Configs that do on this problem what a smaller one does."""
    if genes.BLOCK_M > 64 and 2 * problem.seqlen_q <= genes.BLOCK_M:
        return f"BLOCK_M={genes.BLOCK_M} for {problem.seqlen_q} queries leaves half of the tile without work."
    if genes.BLOCK_N > 64 and 2 * problem.seqlen_k <= genes.BLOCK_N:
        return f"BLOCK_N={genes.BLOCK_N} for {problem.seqlen_k} keys leaves half of the block without work."
    tiles = -(-problem.seqlen_q // genes.BLOCK_M) * problem.group_size
    for name, stages in (("Q_STAGES", genes.Q_STAGES), ("DO_STAGES", genes.DO_STAGES), ("DS_STAGES", genes.DS_STAGES)):
        if stages > max(1, tiles):
            return (
                f"{name}={stages} is more than the {tiles} tiles of {genes.BLOCK_M} queries that a block goes through."
            )
    if tiles < genes.QUERY_SPLIT:
        return f"QUERY_SPLIT={genes.QUERY_SPLIT} is more than the {tiles} tiles of {genes.BLOCK_M} queries."
    if genes.BLOCK_ORDER != "keys" and (key_blocks(problem, genes) == 1 or units(problem) == 1):
        return f"BLOCK_ORDER={genes.BLOCK_ORDER} is the order of keys where there is one head, or one tile of keys."
    if genes.LAUNCHES == "one" and not is_alone(problem, genes):
        return f"LAUNCHES=one has three where BLOCK_N={genes.BLOCK_N} keys are not all, or heads share them."
    if genes.ROTATE and (tiles == 1 or key_blocks(problem, genes) == 1):
        return "ROTATE needs several tiles of keys and of queries (BLOCK_M, BLOCK_N)."
    return None


def why_too_big(problem: AttentionProblem, genes: BackwardWgmmaGenes, gpu: GpuSpec) -> str | None:
    """Grid, memory and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    warps, smem = threads(genes) // 32, smem_bytes(problem, genes)
    if genes.BLOCK_ORDER != "keys" and (blocks := key_blocks(problem, genes) * genes.QUERY_SPLIT) > MAX_GRID_YZ:
        return (
            f"BLOCK_ORDER={genes.BLOCK_ORDER} puts {blocks} tiles of keys (BLOCK_N, QUERY_SPLIT) in grid z, which ends "
            f"at {MAX_GRID_YZ}."
        )
    if smem > gpu.smem_per_block:
        return (
            f"The block needs {smem} bytes of shared memory, by BLOCK_M, BLOCK_N, Q_STAGES, DO_STAGES, DS_STAGES and "
            f"DQ_SUM; {gpu.name} gives a block {gpu.smem_per_block}."
        )
    if reason := why_not_resident(gpu, genes.BLOCKS_PER_SM, warps, smem) or why_same_code(genes.BLOCKS_PER_SM, warps):
        return reason
    have, needed = moved_registers(problem, genes)[1] or registers_at_launch(genes), registers_needed(problem, genes)
    if needed > have:
        return (
            f"A thread needs about {needed} registers, by BLOCK_M, BLOCK_N, P_PLACE, DS_PLACE, DQ_ROWS, and PRODUCER="
            f"{genes.PRODUCER} with {producer_warps(genes)} warps leaves it {have}."
        )
    return why_no_memory(problem, scratch(problem, genes, gpu.sm_count), gpu)
