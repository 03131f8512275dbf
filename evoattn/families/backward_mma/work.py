"""What the kernels of backward_mma do: see `evoattn.families.work`."""

from __future__ import annotations

import math

from evoattn.families.backward import key_steps
from evoattn.families.backward_mma.genes import BackwardMmaGenes
from evoattn.families.backward_mma.resources import (
    ROW_THREADS,
    adds_dq,
    block_warps,
    pass_registers_needed,
    pass_smem_bytes,
    registers_needed,
    scratch_bytes,
    smem_bytes,
)
from evoattn.families.residency import WARP, register_cap
from evoattn.families.row_blocks import batches, row_blocks
from evoattn.families.work import (
    LaunchWork,
    Step,
    bias_bytes,
    blocks_of_sequence,
    row_steps,
    tensor_bytes,
    together,
    up_to,
    variant_step,
    visit_share,
)
from evoattn.model.problem import AttentionProblem

MMA_FLOPS, MMA_WAIT, LDMATRIX_WAIT, BARRIER_WAIT = 4096, 18, 24, 30
"""As in flash_mma."""
SCORE_OPERATIONS = 4.0
"""FP32 and conversion instructions for each score and lane: a multiply-add, a difference, a product, two half
conversions."""
ROW_WAIT, FIRST_WAIT = 1200, 1400
"""Clocks: of a block of rows' loads and sums; of a block's first loads and last stores."""


def launch_work(problem: AttentionProblem, genes: BackwardMmaGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The rows' terms, the blocks of keys, and the launch that ends dQ."""
    last = _converted(problem, genes) if adds_dq(genes) else _query_pass(problem, genes, registers)
    return _row_terms(problem, genes), _key_blocks(problem, genes, registers), last


def _row_terms(problem: AttentionProblem, genes: BackwardMmaGenes) -> LaunchWork:
    """The launch that reads O and dO, and zeroes sums."""
    tiles = row_blocks(problem, genes.BLOCK_M) * problem.heads * batches(problem)
    read, written = 4.0 * problem.head_dim_v * genes.BLOCK_M, scratch_bytes(problem, genes)
    return LaunchWork(
        "backward_mma_rows",
        tiles,
        ROW_THREADS,
        ROW_THREADS // WARP,
        0,
        32,
        Step(),
        0.0,
        0.0,
        Step(
            instructions=(read * 1.5 + sum(written.values()) / tiles) / 16 + 8 * 60,
            loaded_bytes=read + sum(written.values()) / tiles,
            waits=ROW_WAIT,
        ),
        in_flight_bytes=read,
        read_bytes=2 * tensor_bytes(problem, "o"),
        write_bytes=float(sum(written.values())),
    )


def _key_blocks(problem: AttentionProblem, genes: BackwardMmaGenes, registers: int) -> LaunchWork:
    """The launch that makes dK and dV, and adds to dQ."""
    rows, keys, warps, added = genes.BLOCK_M, genes.BLOCK_N, block_warps(genes), adds_dq(genes)
    dim, value_dim, pairs = up_to(problem.head_dim, 16), up_to(problem.head_dim_v, 16), rows * keys
    shared_p = genes.QUERY_WARPS > 1
    flops = 2.0 * pairs * ((2 + added) * dim + 2 * value_dim)
    parts = rows // genes.QUERY_WARPS // genes.PART * genes.QUERY_WARPS
    # Fragments: K and V for every part, Q and dO as columns by every warp of keys, twice.
    own = parts * keys * (dim * (genes.KV_PLACE != "registers") + value_dim * (genes.KV_PLACE == "shared")) * 2
    columns = 2 * genes.WARPS * rows * (dim + value_dim) * 2
    scores = pairs * 2 * ((1 + shared_p) + 2 * shared_p * genes.QUERY_WARPS) if shared_p or added else 0
    dq_columns = warps // genes.DQ_WARPS
    dq_reads = (dq_columns * pairs + genes.DQ_WARPS * keys * dim) * 2 * added
    copied = rows * (dim + value_dim) * 2
    fragments = own + columns + dq_reads
    sums = rows * dim * 4.0 * added
    lanes = pairs * SCORE_OPERATIONS
    issued = flops / MMA_FLOPS + lanes / WARP + pairs / WARP + fragments / 512 + 3 * copied / 512 + scores / 128
    issued += sums / 16 / WARP * 2 + 30 * warps
    waits = (dim + value_dim) / 16 * MMA_WAIT + 4 * LDMATRIX_WAIT + (1 + (added or shared_p)) * BARRIER_WAIT + 80
    mean, most, count = key_steps(problem, rows, keys)
    split, group = genes.QUERY_SPLIT, problem.group_size
    heads = problem.kv_heads * batches(problem)
    own_bytes = keys * (dim + value_dim) * 2.0
    ends = Step(
        instructions=keys * (dim + value_dim) / WARP * 1.5 + 60 * warps,
        shared_bytes=2 * own_bytes,
        loaded_bytes=own_bytes * (1 + (2 if split > 1 else 1)),
        waits=FIRST_WAIT,
    )
    return LaunchWork(
        "backward_mma",
        count * heads * split,
        WARP * warps,
        warps,
        smem_bytes(problem, genes),
        registers or min(registers_needed(problem, genes), register_cap(warps, genes.BLOCKS_PER_SM)),
        together(
            Step(flops, lanes, float(pairs), issued, fragments + copied + scores, copied + 2 * sums, waits),
            variant_step(problem, pairs, packs=False),
        ),
        mean * group / split,
        math.ceil(most * group / split),
        ends,
        longest_first=problem.causal and genes.BLOCK_ORDER == "heads",
        in_flight_bytes=float((genes.STAGES - 1) * rows * (problem.head_dim + problem.head_dim_v) * 2),
        read_bytes=tensor_bytes(problem, "q", "k", "v", "o") + bias_bytes(problem),
        write_bytes=tensor_bytes(problem, "k", "v"),
        sweep_bytes=tensor_bytes(problem, "q", "o"),
        sweepers=float(count),
        visits=float(count),
        visit_share=min(1.0, mean * rows / max(1, problem.seqlen_q)),
        heads_in_turn=heads if genes.BLOCK_ORDER == "heads" else 1.0,
        genes={
            "keys per warp": keys / genes.WARPS,
            "query warps": genes.QUERY_WARPS,
            "causal skip": genes.CAUSAL_SKIP,
            "part": genes.PART,
            "stages": genes.STAGES,
            "padded": genes.SMEM_LAYOUT == "padded",
            "kv place": ("shared", "v_registers", "registers").index(genes.KV_PLACE),
            "dq added": added,
            "dq warps": genes.DQ_WARPS,
            "query split": split,
            "heads first": genes.BLOCK_ORDER == "heads",
            "asked blocks": genes.BLOCKS_PER_SM,
        },
    )


def _query_pass(problem: AttentionProblem, genes: BackwardMmaGenes, registers: int) -> LaunchWork:
    """The launch that computes dQ by itself."""
    rows, keys, warps = genes.PASS_M, genes.PASS_N, genes.PASS_WARPS
    dim, value_dim, pairs = up_to(problem.head_dim, 16), up_to(problem.head_dim_v, 16), rows * keys
    flops = 2.0 * pairs * (2 * dim + value_dim)
    copied = keys * (dim + value_dim) * 2
    fragments = rows * (dim + value_dim) * 2 + warps * keys * (2 * dim + value_dim) * 2
    lanes = pairs * SCORE_OPERATIONS
    issued = flops / MMA_FLOPS + lanes / WARP + pairs / WARP + fragments / 512 + 3 * copied / 512 + 20 * warps
    waits = (dim + value_dim) / 16 * MMA_WAIT + 3 * LDMATRIX_WAIT + BARRIER_WAIT + 60
    mean, most, count = row_steps(problem, rows, keys)
    own = blocks_of_sequence(problem, count)
    return LaunchWork(
        "backward_mma_queries",
        count * problem.heads * batches(problem),
        WARP * warps,
        warps,
        pass_smem_bytes(problem, genes),
        registers or min(pass_registers_needed(problem, genes), register_cap(warps, 1)),
        together(
            Step(flops, lanes, float(pairs), issued, fragments + copied, copied, waits),
            variant_step(problem, pairs, packs=False),
        ),
        mean,
        most,
        Step(
            instructions=rows * dim / WARP * 1.5 + 60 * warps,
            shared_bytes=rows * dim * 4.0,
            loaded_bytes=rows * (2 * dim + value_dim) * 2.0,
            waits=FIRST_WAIT,
        ),
        longest_first=problem.causal and genes.BLOCK_ORDER == "heads",
        in_flight_bytes=float((genes.PASS_STAGES - 1) * keys * (problem.head_dim + problem.head_dim_v) * 2),
        read_bytes=tensor_bytes(problem, "q", "k", "v", "o") + bias_bytes(problem),
        write_bytes=tensor_bytes(problem, "q"),
        sweep_bytes=tensor_bytes(problem, "k", "v"),
        sweepers=own * problem.group_size,
        visits=own,
        visit_share=visit_share(problem, mean, keys),
        heads_in_turn=problem.kv_heads * batches(problem) if genes.BLOCK_ORDER == "heads" else 1.0,
        genes={"rows per warp": rows / warps, "stages": genes.PASS_STAGES},
    )


def _converted(problem: AttentionProblem, genes: BackwardMmaGenes) -> LaunchWork:
    """The launch that makes rows of the sums of dQ, and of dK and dV where there are any."""
    sums = float(scratch_bytes(problem, genes)["sums"])
    tiles = row_blocks(problem, genes.BLOCK_M) * problem.heads * batches(problem)
    moved = sums * 1.5 / tiles
    return LaunchWork(
        "backward_mma_queries",
        tiles,
        ROW_THREADS,
        ROW_THREADS // WARP,
        0,
        40,
        Step(),
        0.0,
        0.0,
        Step(instructions=moved / 16 / WARP * 8 + 8 * 40, loaded_bytes=moved, waits=ROW_WAIT),
        in_flight_bytes=ROW_THREADS * 64.0,
        read_bytes=sums,
        write_bytes=sums / 2,
        scratch_bytes=sums,
    )
