"""What the kernels of backward_wgmma do: see `evoattn.families.work`."""

from __future__ import annotations

import math

from evoattn.families.backward import key_steps
from evoattn.families.backward_wgmma.genes import BackwardWgmmaGenes
from evoattn.families.backward_wgmma.resources import (
    dq_columns,
    lead,
    moved_registers,
    query_tiles,
    registers_at_launch,
    smem_bytes,
    threads,
    units,
    warpgroups,
    whole_chunks,
)
from evoattn.families.residency import WARP
from evoattn.families.work import LaunchWork, Step, bias_bytes, tensor_bytes, up_to, variant_step
from evoattn.model.problem import AttentionProblem

SCORE_OPERATIONS = 4.0
"""FP32 and conversion instructions per pair: a multiply-add, a difference, a product, two half conversions."""
NOMINAL_SMS = 132
"""Of an H100, of which a card's own number matters little: which heads' rows are made by launches."""
ORDERS = ("in_turn", "dp_first", "sums_first", "softmax_first")
STEP_WAIT, FIRST_WAIT, ROW_WAIT = 500, 2500, 2000
"""Clocks: of a tile's dependent instructions and barriers; of a block's first loads and last stores; of a block of the
launches for rows. Estimates: nothing was fitted yet."""


def launch_work(
    problem: AttentionProblem, genes: BackwardWgmmaGenes, registers: int
) -> tuple[LaunchWork, LaunchWork, LaunchWork]:
    """The terms of the queries, the main launch, the rows of dQ."""
    mean, most, count = key_steps(problem, genes.BLOCK_M, genes.BLOCK_N)  # of one head
    groups, queries, keys = warpgroups(genes), genes.BLOCK_M, genes.BLOCK_N
    width, value_width = up_to(problem.head_dim, 16), up_to(problem.head_dim_v, 16)
    pairs, columns = queries * keys, whole_chunks(problem.head_dim)
    tile_bytes = queries * (whole_chunks(problem.head_dim) + whole_chunks(problem.head_dim_v)) * 2
    own_keys = keys * (width + value_width) * 2  # K and V as A operands
    part = dq_columns(problem, genes)
    dq_reads = groups * (64 * keys + part * keys) * 2
    scores = pairs * 2 * (1 + genes.DIM_GROUPS * (genes.DS_PLACE == "shared"))
    probabilities = pairs * 2 * (1 + genes.DIM_GROUPS) * (genes.P_PLACE == "shared")
    sums = queries * columns * 4
    shared = own_keys + 2 * tile_bytes * groups / genes.DIM_GROUPS + tile_bytes + dq_reads + scores + probabilities
    shared += 2 * sums * (genes.DQ_SUM != "registers")
    step = Step(
        tensor_flops=2.0 * pairs * (2 * width + 2 * value_width + columns),
        fp32=pairs * SCORE_OPERATIONS,
        special=float(pairs),
        instructions=pairs * (SCORE_OPERATIONS + 1) / WARP + 60 * 4 * groups,
        shared_bytes=shared,
        loaded_bytes=tile_bytes + 2.0 * sums,
        waits=STEP_WAIT * (1.0 if genes.ORDER == "in_turn" else 0.6),
    )
    extra = variant_step(problem, pairs, packs=False)
    blocks = count * units(problem)
    row_bytes = sum(_row_bytes(problem, genes, which) for which in ("terms", "rows"))
    inside = (1 - _outside(problem, genes)) * row_bytes * query_tiles(problem, genes) / blocks
    ends = Step(
        instructions=keys * (width + value_width) / WARP * 1.5 + 60 * groups * 4,
        shared_bytes=2.0 * keys * (width + value_width) * 2,
        loaded_bytes=2.0 * keys * (width + value_width) * 2 + inside,
        waits=FIRST_WAIT,
    )
    main = LaunchWork(
        "backward_wgmma",
        blocks,
        threads(genes),
        4 * groups,
        smem_bytes(problem, genes),
        registers or registers_at_launch(genes),
        Step(*(a + b for a, b in zip(vars(step).values(), vars(extra).values(), strict=True))),
        mean * problem.group_size,
        most * problem.group_size,
        ends,
        tensor="wgmma",
        longest_first=problem.causal and genes.BLOCK_ORDER == "heads",
        in_flight_bytes=float(tile_bytes * (min(genes.Q_STAGES, genes.DO_STAGES) - 1)),
        read_bytes=tensor_bytes(problem, "q", "k", "v", "o") + bias_bytes(problem),
        write_bytes=tensor_bytes(problem, "k", "v"),
        sweep_bytes=tensor_bytes(problem, "q", "o"),
        sweepers=float(count),
        visits=float(count),
        heads_in_turn=units(problem) if genes.BLOCK_ORDER == "heads" else 1.0,
        overlaps=True,
        genes=_numbers(problem, genes),
    )
    return _rows(problem, genes, "terms"), main, _rows(problem, genes, "rows")


def _rows(problem: AttentionProblem, genes: BackwardWgmmaGenes, which: str) -> LaunchWork:
    """The launch that makes terms of the queries and clears the sums, or that makes rows of dQ out of these."""
    tiles = query_tiles(problem, genes) * _outside(problem, genes)
    sums, moved = _sum_bytes(problem, genes), _row_bytes(problem, genes, which)
    reads = moved - sums if which == "terms" else sums
    return LaunchWork(
        f"backward_wgmma_{which}",
        math.ceil(tiles),
        256,
        8,
        0,
        32,
        Step(instructions=moved / 16 / WARP * 6, loaded_bytes=moved, waits=100),
        1.0,
        1.0,
        Step(waits=ROW_WAIT),
        read_bytes=reads * tiles,
        write_bytes=(moved - reads) * tiles,
        scratch_bytes=reads * tiles if which == "rows" else 0.0,
        overlaps=which == "rows",
    )


def _outside(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> float:
    """The share of the rows that launches of their own make."""
    return lead(problem, genes, NOMINAL_SMS) / units(problem) or 1.0


def _sum_bytes(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> float:
    """Of dQ of a tile of queries, in float32."""
    return 4.0 * genes.BLOCK_M * whole_chunks(problem.head_dim)


def _row_bytes(problem: AttentionProblem, genes: BackwardWgmmaGenes, which: str) -> float:
    """Read and written of a tile of queries, to make their terms and clear their sums, or to make their rows."""
    tensors = 2.0 * genes.BLOCK_M * (2 * problem.head_dim_v if which == "terms" else problem.head_dim)
    return tensors + _sum_bytes(problem, genes)


def _numbers(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> dict[str, float]:
    """What else may matter: `LaunchWork.genes`."""
    return {
        "warpgroups": warpgroups(genes),
        "dim groups": genes.DIM_GROUPS,
        "stages": genes.Q_STAGES,
        "do stages": genes.DO_STAGES,
        "ds stages": genes.DS_STAGES,
        "asked blocks": genes.BLOCKS_PER_SM,
        "producer group": genes.PRODUCER == "warpgroup",
        "order": ORDERS.index(genes.ORDER),
        "p registers": genes.P_PLACE == "registers",
        "ds registers": genes.DS_PLACE == "registers",
        "dq by dims": genes.DQ_ROWS == "dims",
        "dq by bulk": genes.DQ_SUM == "bulk",
        "dq by warp": genes.DQ_SUM == "warp",
        "rows inside": genes.ROW_WORK == "spare_warps",
        "staggered": genes.STAGGER,
        "rotated": genes.ROTATE,
        "consumer registers": moved_registers(genes)[1] or registers_at_launch(genes),
    }
