"""What each launch of backward_wgmma has to do, of which the cost model makes a time."""

import math
from dataclasses import replace

from evoattn.families.backward import key_steps
from evoattn.families.backward_wgmma.resources import (
    GROUP_KEYS,
    SMS_MEASURED,
    BackwardWgmmaGenes,
    adds_in_order,
    dq_columns,
    dq_groups,
    dq_share,
    dq_width,
    is_alone,
    key_blocks,
    key_groups,
    key_sums,
    moved_registers,
    pair,
    query_tiles,
    registers_at_launch,
    registers_needed,
    registers_of,
    scratch,
    section_heads,
    smem_bytes,
    threads,
    units,
    v_steps,
    warpgroups,
    whole_chunks,
)
from evoattn.families.residency import WARP
from evoattn.families.tensor_tiles import CHUNK_COLUMNS
from evoattn.families.work import LAST_PARTS, LaunchWork, Step, bias_bytes, tensor_bytes, together, up_to, variant_step
from evoattn.model.backward import parse_grads
from evoattn.model.problem import AttentionProblem

SCORE_OPERATIONS = 4.0
"""FP32 and conversion instructions per pair: a multiply-add, a difference, a product, two half conversions."""
TURN_SHARE = 0.3
"""Of a block's time, what it waits for others that add to the same dQ before it, where all begin with the same queries:
0.29 and 0.32 on an H100, 16 and 32 blocks a head."""
VALUES_WAIT = 100
"""Clocks of a tile that V saves in registers: of nine problems of head_dim 64 to 96 on an H200 it took 0.945 to
0.976 of the time so, and the model says 0.958 to 0.987."""
LAST_WAIT = 100
"""What SPLIT=last adds to a tile of 64 queries: of five problems it took 1.02 to 1.055 of the time without."""
CLAIMED_WAIT = 100
"""What SCHEDULE=claimed adds to a tile where it leaves no register: of three problems of head_dim 128 with 80 queries a
tile and 4,096 to 6,433 keys it took 1.025 to 1.045 of the time without; of 32 recorded ones of 3,000 keys and more
1.018."""
STEP_WAIT, FIRST_WAIT, ROW_WAIT = 500, 2500, 2000
"""Clocks: of a tile's dependent instructions and barriers; of a block's first loads and last stores; of a block of the
launches for rows. Estimates: nothing was fitted yet."""


def launch_work(problem: AttentionProblem, genes: BackwardWgmmaGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The terms of the queries, the main launch, the rows of dQ; or fewer (LAUNCHES)."""
    mean, most, count = key_steps(problem, genes.BLOCK_M, genes.BLOCK_N)  # of one head
    groups, queries, keys = warpgroups(genes), genes.BLOCK_M, genes.BLOCK_N
    width, value_width = up_to(problem.head_dim, 16), up_to(problem.head_dim_v, 16)
    pairs, columns, size = queries * keys, dq_width(problem, genes), problem.element_bytes
    tile_bytes = queries * (whole_chunks(problem.head_dim) + whole_chunks(problem.head_dim_v)) * size
    of_v = min(1.0, 16 * v_steps(problem, genes) / value_width)  # of V that registers hold
    own_keys = keys * (width + value_width * (1 - of_v)) * size  # K and V as A operands
    parts = [part for part in (dq_columns(problem, genes), dq_share(problem, genes)) if part]
    dq_reads = dq_groups(genes) * sum(64 * keys + part * keys for part in parts) * size * pair(genes)
    turned = genes.DKV_ROWS == "dims"
    of_dk, of_dv = (whole_chunks(dim) // CHUNK_COLUMNS if turned else genes.DIM_GROUPS for dim in (width, value_width))
    scores = pairs * size * (pair(genes) + of_dk * (genes.DS_PLACE == "shared"))
    probabilities = pairs * size * (1 - turned + of_dv) * (genes.P_PLACE == "shared")
    probabilities += pairs * size * 2 * (genes.GROUP_SHARE == "products")
    sums = queries * columns * 4 // pair(genes)
    shared = (
        own_keys
        + 2 * tile_bytes * (1 if turned else key_groups(genes))
        + tile_bytes * (not turned)
        + dq_reads
        + scores
        + probabilities
    )
    shared += 2 * sums * (genes.DQ_SUM == "warp")
    step = Step(
        tensor_flops=2.0 * pairs * (2 * width + 2 * value_width + columns),
        fp32=pairs * SCORE_OPERATIONS,
        special=float(pairs),
        instructions=pairs * (SCORE_OPERATIONS + 1) / WARP + 60 * 4 * groups,
        shared_bytes=shared,
        loaded_bytes=tile_bytes + 2.0 * sums + 8.0 * pairs * ("bias" in parse_grads(problem.grads)),
        waits=STEP_WAIT - VALUES_WAIT * of_v + LAST_WAIT * (genes.SPLIT == "last" and queries <= GROUP_KEYS),
    )
    if genes.SCHEDULE == "claimed" and registers_needed(problem, genes) >= registers_of(problem, genes):
        step = replace(step, waits=step.waits + CLAIMED_WAIT)
    extra = variant_step(problem, pairs)
    split = genes.QUERY_SPLIT if genes.SPLIT == "all" else 1
    in_order = adds_in_order(problem, genes)
    turns = TURN_SHARE * (in_order and not problem.causal and not genes.ROTATE)
    blocks = count * units(problem) * split
    ends = Step(
        instructions=keys * (width + value_width) / WARP * 1.5 + 60 * groups * 4,
        shared_bytes=2.0 * keys * (width + value_width) * size,
        loaded_bytes=2.0 * keys * (width + value_width) * size * (1.0 if split == 1 else 1.5),
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
        mean * problem.group_size / split * (1 + turns),
        float(math.ceil(most * problem.group_size / split)),
        ends,
        tensor="wgmma",
        longest_first=(problem.causal or bool(problem.blocks)) and genes.BLOCK_ORDER != "keys" and not in_order,
        in_flight_bytes=float(tile_bytes * (min(genes.Q_STAGES, genes.DO_STAGES) - 1)),
        read_bytes=tensor_bytes(problem, "q", "k", "v", "o") + bias_bytes(problem),
        write_bytes=_key_sums(problem, genes) or tensor_bytes(problem, "k", "v"),
        sweep_bytes=tensor_bytes(problem, "q", "o"),
        sweepers=float(count),
        visits=float(count),
        heads_in_turn=float(section_heads(problem, genes, SMS_MEASURED)),
        cluster=pair(genes),
        overlaps=True,
        schedule=genes.SCHEDULE if most > mean else "single",  # of equal tiles whole rounds are claimed
        genes=_numbers(problem, genes),
    )
    if genes.LAUNCHES == "two":
        return _rows(problem, genes, "terms"), _of_heads(problem, genes, main, count)
    if is_alone(problem, genes):
        return (replace(main, overlaps=False, read_bytes=tensor_bytes(problem, "q", "k", "v", "o", "o")),)
    return _rows(problem, genes, "terms"), main, _rows(problem, genes, "rows")


def _of_heads(problem: AttentionProblem, genes: BackwardWgmmaGenes, main: LaunchWork, tiles: int) -> LaunchWork:
    """The main launch where a block has all `tiles` tiles of keys of a head, and makes rows of dQ: of a tile of queries
    the first sum is stored, the last one only read."""
    rows = query_tiles(problem, genes) / units(problem)
    visits = max(1.0, main.steps * tiles / rows)
    sums = 2.0 * _sum_bytes(problem, genes)
    step = replace(main.step, loaded_bytes=main.step.loaded_bytes - sums / visits)
    ends = together(main.ends, times=float(tiles))
    ends = replace(ends, loaded_bytes=ends.loaded_bytes + tensor_bytes(problem, "q") / units(problem))
    return replace(
        main,
        blocks=units(problem),
        step=step,
        steps=main.steps * tiles,
        most_steps=main.steps * tiles,
        ends=ends,
        write_bytes=main.write_bytes + tensor_bytes(problem, "q"),
        sweepers=1.0,
        visits=1.0,
        heads_in_turn=1.0,
        schedule="single",
    )


def _rows(problem: AttentionProblem, genes: BackwardWgmmaGenes, which: str) -> LaunchWork:
    """The launch that makes terms of the queries and clears the sums, or that makes rows of dQ out of these."""
    tiles = query_tiles(problem, genes)
    sums, moved = _sum_bytes(problem, genes), _row_bytes(problem, genes, which)
    if which == "terms" and (genes.DQ_BEGIN == "stored" or genes.LAUNCHES == "two"):
        sums, moved = 0.0, moved - sums
    reads = moved - sums if which == "terms" else sums
    of_keys = _key_sums(problem, genes) if which == "rows" else 0
    to_keys = tensor_bytes(problem, "k", "v") if of_keys else 0.0
    moved += (of_keys + to_keys) / tiles
    return LaunchWork(
        f"backward_wgmma_{which}",
        tiles,
        256,
        8,
        0,
        32,
        Step(instructions=moved / 16 / WARP * 6, loaded_bytes=moved, waits=100),
        1.0,
        1.0,
        Step(waits=ROW_WAIT),
        read_bytes=reads * tiles + of_keys,
        write_bytes=(moved - reads) * tiles - of_keys,
        scratch_bytes=reads * tiles + of_keys if which == "rows" else 0.0,
        overlaps=which == "rows",
    )


def _key_sums(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> int:
    """Bytes of `key_sums` of all tiles; those of SPLIT=last are few."""
    return key_sums(problem, genes, key_blocks(problem, genes) * units(problem)) * (genes.SPLIT == "all")


def _sum_bytes(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> float:
    """Of dQ of a tile of queries, in float32."""
    return 4.0 * genes.BLOCK_M * dq_width(problem, genes)


def _row_bytes(problem: AttentionProblem, genes: BackwardWgmmaGenes, which: str) -> float:
    """Read and written of a tile of queries, to make their terms and clear their sums, or to make their rows."""
    columns = 2 * problem.head_dim_v if which == "terms" else problem.head_dim
    tensors = problem.element_bytes * genes.BLOCK_M * columns
    return tensors + _sum_bytes(problem, genes)


def _log_own_sums(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> float:
    """LAUNCHES=two: log2 of the MiB of sums of dQ that all blocks have at once, which L2 holds or not; else 0."""
    if genes.LAUNCHES != "two":
        return 0.0
    return math.log2(1 + scratch(problem, genes, SMS_MEASURED)["dq_sums"] / 2**20)


def _numbers(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> dict[str, float]:
    """What else may matter: `LaunchWork.genes`."""
    return {
        "warpgroups": warpgroups(genes),
        "dim groups": genes.DIM_GROUPS,
        "stages": genes.Q_STAGES,
        "do stages": genes.DO_STAGES,
        "ds stages": genes.DS_STAGES,
        "asked blocks": genes.BLOCKS_PER_SM,
        "query split": genes.QUERY_SPLIT if genes.SPLIT == "all" else 1,
        LAST_PARTS: genes.QUERY_SPLIT if genes.SPLIT == "last" else 1,
        "producer group": genes.PRODUCER == "warpgroup",
        "dv last": genes.ORDER == "dv_last",
        "p registers": genes.P_PLACE == "registers",
        "ds registers": genes.DS_PLACE == "registers",
        "dq by dims": genes.DQ_ROWS == "dims",
        "dq by warp": genes.DQ_SUM == "warp",
        "bias gradient": "bias" in parse_grads(problem.grads),
        "by products": genes.GROUP_SHARE == "products",
        "dkv by dims": genes.DKV_ROWS == "dims",
        "paired": genes.PAIR,
        "dq stored": genes.DQ_BEGIN == "stored",
        "sections": genes.BLOCK_ORDER == "sections",
        "terms early": genes.TERMS_EARLY,
        "rotated": genes.ROTATE,
        "claimed": genes.SCHEDULE == "claimed",
        "log own sums": _log_own_sums(problem, genes),
        "own keys first": genes.DQ_WHEN == "own_first",
        "consumer registers": moved_registers(problem, genes)[1] or registers_at_launch(genes),
    }
