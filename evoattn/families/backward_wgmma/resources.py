"""The genes of backward_wgmma, and what they take: threads, shared memory, registers, scratch."""

import math
from functools import lru_cache
from heapq import heapreplace
from typing import Literal

from evoattn.families import backward
from evoattn.families.backward import tile_steps
from evoattn.families.block_list import block_state_bytes
from evoattn.families.dealt import batches, row_blocks
from evoattn.families.genes import Genes, gene
from evoattn.families.mask_blocks import packed_bytes
from evoattn.families.residency import register_cap
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, ROW_BYTES
from evoattn.model.backward import parse_grads
from evoattn.model.problem import AttentionProblem


class BackwardWgmmaGenes(Genes):
    """The parameters of backward_wgmma."""

    BLOCK_M: int = gene("queries per tile", (32, 48, 64, 80, 96, 128))
    BLOCK_N: int = gene("keys per block, 64 per consumer warpgroup; with DKV_ROWS=dims all in each", (64, 96, 128))
    DIM_GROUPS: int = gene(
        "warpgroups that share the same 64 keys, each with a part of the dimensions of dK and dV", (1, 2, 3)
    )
    Q_STAGES: int = gene("tiles of Q in shared memory; those not in use are being copied", (1, 2, 3, 4))
    DO_STAGES: int = gene("tiles of dO in shared memory", (1, 2, 3))
    DS_STAGES: int = gene(
        "tiles of dS in shared memory; with one, warpgroups wait for one another twice a tile", (1, 2)
    )
    BLOCKS_PER_SM: int = gene("blocks that registers and shared memory leave room for on one SM", (1, 2, 3))
    PRODUCER: Literal["warp", "warpgroup"] = gene(
        "copies are issued by one warp, or by a warpgroup that gives its registers to the consumers"
    )
    ORDER: Literal["in_turn", "dv_last"] = gene(
        "dV's product begins before the gradients of the scores are made (in_turn), or behind them, and they have more "
        "registers (dv_last)"
    )
    TERMS_EARLY: bool = gene(
        "a thread's log-sum-exps and deltas go to registers before it waits for a product, or after"
    )
    P_PLACE: Literal["registers", "shared"] = gene("where dV's product reads the probabilities")
    DS_PLACE: Literal["registers", "shared"] = gene("where dK's product reads the gradients of the scores")
    DQ_ROWS: Literal["queries", "dims", "one"] = gene(
        "the rows of dQ's product: 64 queries a warpgroup, which shares dimensions with others; or 64 dimensions of "
        "the transposed dQ; or 64 queries of one warpgroup alone"
    )
    DQ_SUM: Literal["registers", "warp"] = gene(
        "dQ is added to the sums in memory from registers, or from shared memory by bulk copies of a warp of its own"
    )
    BLOCK_ORDER: Literal["keys", "heads", "sections"] = gene(
        "neighbouring blocks take the keys of one head (keys), or the same keys of all heads (heads), or of some "
        "heads, then of the next (sections)"
    )
    ROTATE: bool = gene("blocks of neighbouring keys begin with different queries")
    QUERY_SPLIT: int = gene(
        "blocks that share the queries of the same keys; the launch behind adds up their dK and dV, in order",
        (1, 2, 3, 4, 8),
        default=1,
    )
    SPLIT: Literal["all", "last"] = gene(
        "QUERY_SPLIT is of all tiles of keys, or of those alone that are left over after whole rounds of the SMs",
        default="all",
    )
    DQ_BEGIN: Literal["cleared", "stored"] = gene(
        "the sums of dQ are cleared by the launch before, or the first block that has a part of them stores it",
        default="cleared",
    )
    SCHEDULE: Literal["single", "claimed"] = gene(
        "a block has one tile of keys, or there are as many blocks as run at once, and each claims the next tile "
        "while it still works on the last one",
        default="single",
    )
    LAUNCHES: Literal["three", "one", "two"] = gene(
        "terms of the queries, gradients, and rows of dQ have a launch each; or a block that has all keys of a head "
        "makes them all (one), or goes through tiles of all of them and makes rows of dQ behind the last one (two)",
        default="three",
    )
    DQ_WHEN: Literal["all_there", "own_first"] = gene(
        "dQ's product begins once dS of all keys is there, or with that of the warpgroup's own keys",
        default="all_there",
    )
    GROUP_SHARE: Literal["dims", "products"] = gene(
        "what warpgroups of the same keys share (DIM_GROUPS): the dimensions of dK and dV, or one of two has the "
        "probabilities and dV, the other the gradients of the scores and dK",
        default="dims",
    )
    DKV_ROWS: Literal["keys", "dims"] = gene(
        "with GROUP_SHARE=products, the rows of the products of dK and dV: 64 keys, or 64 dimensions at a time of both "
        "transposed, beside 96 keys or more",
        default="keys",
    )
    PAIR: bool = gene(
        "with GROUP_SHARE=products two blocks of neighbouring keys are a cluster and share dQ: each multiplies half of "
        "its dimensions, of the keys of both, so that half as much is added in memory",
        default=False,
    )


WARPGROUP, GROUP_KEYS = 128, 64
PRODUCER_REGISTERS = {1: 40, 2: 24, 3: 32}
"""Per thread of the producer warpgroup after setmaxnreg, by consumer warpgroups, as in flash_wgmma."""
LISTED_REGISTERS = 32
"""The least of a producer that goes through a block list, if the consumers can spare so many. Six configs compiled by
ptxas 13.0: with 24 each spills some 80 bytes."""
MAX_CONSUMER_REGISTERS = 240
FIXED_REGISTERS = {"in_turn": 8, "dv_last": 12}
"""Addresses, counters and terms of queries beside the arrays of `Fragments`, by ORDER: with in_turn S and dP are not
both alive where most is. Fitted to 80 random configs compiled by ptxas 13.0."""
BIAS_GRADIENT_REGISTERS, SLOPE_REGISTERS = 32, 8
"""Of places and bounds: of a bias's gradient where scores have factors, and of slopes. That gradient without factors
takes none, nor does a bias by itself. Read off 24 configs compiled by ptxas 13.0."""
LISTED_TERMS_REGISTERS = 20
"""Of a block list beside TERMS_EARLY and DS_PLACE=shared. Of 33 configs compiled by ptxas 13.0 these five spill or have
products wait in turn, and took 1.12 to 1.27 times as long as the best on an H100."""
SHARE_REGISTERS = 8
"""Where warpgroups share dimensions of dQ that are left over. Nine configs of head_dims 160 and 192, compiled by ptxas
13.0: two spill, and these alone do not fit with it."""
MOVED_REGISTERS = 8
"""Where one warpgroup alone has what the producer's gives up. Of 22 configs of 64 keys compiled by ptxas 13.0 products
wait in turn (C7512) in the 12 that do not fit with it, and in no other."""
LATE_REGISTERS = 16
"""With dV last and PRODUCER=warpgroup, of dS in registers and in one stage for dQ by dims, and with one launch of terms
that are read late. Of 24 configs products wait in turn in the 18 that do not fit with it, and in no other. One of the
first, which a fit had chosen, took 1.37 times as long as FlashAttention 4 at `D=96`; beside those of one launch early
terms take 0.93 to 0.99 of the time (eight pairs)."""


OWN_SUMS_REGISTERS = 20
"""Of places of sums of dQ and of its rows, LAUNCHES=two. Of some 90 configs of two warpgroups compiled by ptxas 13.0
products wait in turn (C7512) in 12, none of which fits with it."""
LEAST_COLUMNS = 8
"""Of a product by wgmma."""
SPARE_REGISTERS = {"registers": 8, "shared": 24}
"""What V in registers has to leave, by P_PLACE: of 47 picks two that leave 8 and 16 spill, with P in shared memory."""


def key_groups(genes: BackwardWgmmaGenes) -> int:
    """Groups of 64 keys of a block, the last of which may have less."""
    return math.ceil(genes.BLOCK_N / GROUP_KEYS)


def warpgroups(genes: BackwardWgmmaGenes) -> int:
    """Consumer warpgroups."""
    return (1 if genes.DKV_ROWS == "dims" else key_groups(genes)) * genes.DIM_GROUPS


def producer_warps(genes: BackwardWgmmaGenes) -> int:
    return 4 if genes.PRODUCER == "warpgroup" else 1


def threads(genes: BackwardWgmmaGenes) -> int:
    """Threads per block of the main launch."""
    return WARPGROUP * warpgroups(genes) + 32 * producer_warps(genes)


def registers_at_launch(genes: BackwardWgmmaGenes) -> int:
    """Registers per thread under the launch bounds."""
    return register_cap(threads(genes) // 32, genes.BLOCKS_PER_SM)


def moved_registers(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> tuple[int, int]:
    """(producer's, consumers') registers per thread after setmaxnreg, (0, 0) without: as in flash_wgmma."""
    if genes.PRODUCER != "warpgroup":
        return 0, 0
    consumers, launch = warpgroups(genes), (registers_at_launch(genes) + 1) // 8 * 8
    producer = PRODUCER_REGISTERS[consumers]
    if problem.blocks and genes.DS_PLACE == "shared":  # else ptxas has products wait in turn (C7512)
        producer = max(producer, LISTED_REGISTERS)
    consumer = ((consumers + 1) * launch - producer) // consumers // 8 * 8
    return producer, min(consumer, MAX_CONSUMER_REGISTERS)


def dim_shares(genes: BackwardWgmmaGenes) -> int:
    """Warpgroups that share the dimensions of dK and dV."""
    return genes.DIM_GROUPS if genes.GROUP_SHARE == "dims" else 1


def pair(genes: BackwardWgmmaGenes) -> int:
    """Blocks that share dQ."""
    return 1 + genes.PAIR


def whole_chunks(dim: int) -> int:
    """Columns up to whole 64-column chunks."""
    return math.ceil(dim / CHUNK_COLUMNS) * CHUNK_COLUMNS


def dq_groups(genes: BackwardWgmmaGenes) -> int:
    """Warpgroups of a block that share dQ of a tile of queries."""
    return 1 if genes.DQ_ROWS == "one" else warpgroups(genes)


def dq_width(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> int:
    """Columns of dQ in its sums."""
    small = genes.DQ_ROWS == "one" or (problem.head_dim < CHUNK_COLUMNS and genes.DQ_ROWS == "queries")
    return problem.head_dim if small else whole_chunks(problem.head_dim)


def dq_columns(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> int:
    """Columns of a warpgroup's part of dQ, or, DQ_ROWS=dims, queries; 0 where the warpgroups cannot share dQ. Of one
    chunk parts may be narrower than that."""
    columns, groups = dq_width(problem, genes), dq_groups(genes) * pair(genes)
    if genes.DQ_ROWS == "dims":
        return genes.BLOCK_M if columns == CHUNK_COLUMNS * groups or dq_share(problem, genes) else 0
    rows = genes.BLOCK_M // GROUP_KEYS
    if genes.BLOCK_M % GROUP_KEYS or groups % rows:
        return 0
    parts = groups // rows
    step = CHUNK_COLUMNS if columns > CHUNK_COLUMNS and parts > 1 else LEAST_COLUMNS
    return columns // parts if columns % (parts * step) == 0 else 0


def dq_share(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> int:
    """Queries of a warpgroup of the 64 dimensions that are left over where each has 64 of its own, DQ_ROWS=dims; else
    0."""
    groups, queries = warpgroups(genes), genes.BLOCK_M
    left_over = whole_chunks(problem.head_dim) == CHUNK_COLUMNS * (groups + 1)
    if genes.DQ_ROWS == "dims" and groups > 1 and left_over and queries % (8 * groups) == 0:
        return queries // groups
    return 0


def registers_needed(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> int:
    """Estimate of the registers per consumer thread below which ptxas spills: dK and dV, S and dP of a tile, what is
    rounded, and dQ in the place of dP."""
    by_dims = genes.DKV_ROWS == "dims"
    scores = genes.BLOCK_N // 2 if by_dims else genes.BLOCK_M // dim_shares(genes) // 2
    dq = (dq_columns(problem, genes) + dq_share(problem, genes)) // 2
    by_products = genes.GROUP_SHARE == "products"
    kept = (problem.head_dim + problem.head_dim_v) // genes.DIM_GROUPS // 2
    most = max(problem.head_dim, problem.head_dim_v)
    kept = most // 2 if by_products else kept
    kept = whole_chunks(most) // 2 * genes.BLOCK_N // GROUP_KEYS if by_dims else kept
    rounded = (scores // 2) * ((genes.P_PLACE == "registers") + (genes.DS_PLACE == "registers"))
    wanted = parse_grads(problem.grads)
    at_once = genes.P_PLACE == "registers" and "bias" not in wanted  # factors of the scores' gradients
    if problem.own_score or (problem.softcap and (problem.alibi or problem.bias or not at_once)):
        kept += scores
    kept += SHARE_REGISTERS * bool(dq_share(problem, genes))
    kept += LISTED_TERMS_REGISTERS * (bool(problem.blocks) and genes.TERMS_EARLY and genes.DS_PLACE == "shared")
    of_bias = "bias" in wanted and bool(problem.softcap or problem.own_score)
    kept += SLOPE_REGISTERS * problem.alibi + BIAS_GRADIENT_REGISTERS * of_bias
    kept += MOVED_REGISTERS * (genes.PRODUCER == "warpgroup" and warpgroups(genes) == 1)
    if genes.ORDER == "dv_last":
        p = scores // 2 * (genes.P_PLACE == "registers")
        alive = max(2 * scores + p, rounded + dq)
        one_stage = (genes.DQ_ROWS, genes.DS_PLACE, genes.DS_STAGES) == ("dims", "registers", 1)
        late = one_stage if genes.LAUNCHES != "one" else not genes.TERMS_EARLY
        kept += LATE_REGISTERS * (late and genes.PRODUCER == "warpgroup")
    elif by_dims:
        alive = max(scores, dq)
    elif by_products:
        alive = max(2 * scores, dq) + scores // 2
    else:
        alive = scores + max(scores, dq) + rounded
    if genes.LAUNCHES == "two":  # dQ beside its sums
        alive = max(alive + OWN_SUMS_REGISTERS * (genes.ORDER == "in_turn"), rounded + 2 * dq + OWN_SUMS_REGISTERS)
    return kept + alive + FIXED_REGISTERS[genes.ORDER]


MOST_IN_PART = 128
"""The largest head_dim of which a part of V lies in registers."""


def v_steps(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> int:
    """Steps of 16 dimensions of V that products read from registers, which hold them as long as a block has its keys:
    as many as there is room for. With up to 64 queries a tile a product from shared memory reads as long as it
    multiplies, or longer. A part of V takes 0.975 to 1.003 of the time of none (four problems of head_dim 128, 0.986 in
    the mean); with ORDER=in_turn, and at head_dim 160, products wait in turn beside it (C7512). K in registers, too,
    takes 1.005 to 1.018 of the time (three problems of head_dim 64)."""
    have = registers_of(problem, genes)
    left = have - registers_needed(problem, genes) - SPARE_REGISTERS[genes.P_PLACE]
    few = genes.GROUP_SHARE == "dims" and genes.BLOCK_M <= GROUP_KEYS
    few = few and (genes.LAUNCHES != "two" or problem.head_dim <= CHUNK_COLUMNS)
    steps, room = math.ceil(problem.head_dim_v / 16), max(0, left // 4)
    some = room * (genes.ORDER == "dv_last" and genes.PRODUCER == "warpgroup" and problem.head_dim <= MOST_IN_PART)
    return (steps if steps <= room else some) * few


def registers_of(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> int:
    """Registers per consumer thread."""
    return moved_registers(problem, genes)[1] or registers_at_launch(genes)


def smem_bytes(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> int:
    """Dynamic shared memory of a block: see `templates/backward_wgmma/shared_layout.cuh`."""
    rows = whole_chunks(problem.head_dim) * problem.element_bytes
    value_rows = whole_chunks(problem.head_dim_v) * problem.element_bytes
    scores = key_groups(genes) * genes.BLOCK_M * ROW_BYTES
    tiles = genes.BLOCK_N * (rows + value_rows)
    tiles += genes.BLOCK_M * (genes.Q_STAGES * rows + genes.DO_STAGES * value_rows)
    by_products = genes.GROUP_SHARE == "products"
    tiles += scores * genes.DS_STAGES * (1 + (genes.P_PLACE == "shared" and not by_products) + genes.PAIR)
    tiles += scores * by_products  # P
    tiles += genes.BLOCK_N * rows // 2 * genes.PAIR
    tiles += genes.Q_STAGES * genes.BLOCK_M * genes.BLOCK_N * problem.element_bytes * bool(problem.bias)
    columns = dq_columns(problem, genes) + dq_share(problem, genes)
    sums = 64 * columns * 4 * dq_groups(genes) if genes.DQ_SUM == "warp" else 0
    terms = 4 * genes.BLOCK_M * (genes.Q_STAGES + genes.DO_STAGES)
    barriers = 2 + 2 * genes.Q_STAGES + 2 * genes.DO_STAGES + 2 * dq_groups(genes) * (genes.DQ_SUM == "warp")
    told = genes.Q_STAGES * bool(problem.blocks)  # which tile of queries the producer brought
    terms += 8 * TERM_QUERIES * (genes.LAUNCHES == "one")
    claims, own = 2 * (genes.SCHEDULE == "claimed"), 2 * warpgroups(genes) * (genes.DQ_WHEN != "all_there")
    paired = 2 * genes.DS_STAGES * genes.PAIR
    return tiles + sums + terms + 8 * (barriers + told + claims + own + paired)


TERM_QUERIES = 512
"""The most queries of a block with LAUNCHES=one, whose terms lie in shared memory."""


def is_alone(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> bool:
    """Whether the main launch is the only one, LAUNCHES=one: a block has all keys of its head and room for the terms of
    the queries, and each tile of queries sees some key. One block for all heads of a group took 1.4 to 4 times as long
    as blocks that share them, on an H100."""
    if genes.LAUNCHES != "one" or problem.grads or may_see_none(problem):
        return False
    queries = row_blocks(problem, genes.BLOCK_M) * genes.BLOCK_M
    return key_blocks(problem, genes) == problem.group_size == 1 and queries <= TERM_QUERIES


def may_see_none(problem: AttentionProblem) -> bool:
    """Whether queries may see no key, whose dQ no block with keys would write."""
    lower_right = problem.causal and problem.masking.ends_lower_right
    return bool(problem.window) or (lower_right and problem.seqlen_q > problem.seqlen_k)


def head_blocks(problem: AttentionProblem, genes: BackwardWgmmaGenes, sms: int) -> int:
    """Blocks with LAUNCHES=two, each with sums of dQ of a head's rows, or of those of the heads of its group."""
    return min(units(problem), sms * genes.BLOCKS_PER_SM)


def adds_in_order(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> bool:
    """Whether blocks add to dQ one after another, for the same bits in every run. Without DQ_SUM=warp one block has all
    keys. It is the same at all lengths, as one compiled kernel serves many."""
    return problem.deterministic and genes.DQ_SUM == "warp"


def lacks_room(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> bool:
    """Whether dK or dV does not fit where dS and P lie, which SCHEDULE=claimed needs; of parts neither goes there."""
    rows = WARPGROUP * max(whole_chunks(dim // dim_shares(genes)) for dim in (problem.head_dim, problem.head_dim_v))
    scores = key_groups(genes) * genes.BLOCK_M * ROW_BYTES * genes.DS_STAGES * (1 + (genes.P_PLACE == "shared"))
    return rows * warpgroups(genes) > scores and (genes.QUERY_SPLIT == 1 or genes.SPLIT == "last")


ROW_THREADS = 256
"""Of a block of the launches that make the terms of the queries and the rows of dQ."""
MOST_PARTS, ROWS_AT_ONCE = 4, 2
"""Blocks of the launch for terms that share a tile of queries, and rows that a thread has on their way at once."""


def term_parts(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> int:
    """Blocks of the launch for terms that share a tile of queries: so many that a thread has `ROWS_AT_ONCE` rows, where
    tiles are large enough, and `MOST_PARTS` at most. Where it had one, at head_dim 64, an SM took 0.67 µs for each
    block, whatever its bytes, and the launch 1.25 times as long as FlashAttention 4's (an H200)."""
    pieces = math.ceil(problem.head_dim_v / 8)  # of 16 bytes, a row
    lanes = min(32, max(4, 1 << (pieces - 1).bit_length()))  # that share a row: see `row_terms.cuh`
    return max(1, min(MOST_PARTS, math.ceil(genes.BLOCK_M * lanes / (ROW_THREADS * ROWS_AT_ONCE))))


def query_tiles(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> int:
    """Tiles of queries of all heads and batches."""
    return row_blocks(problem, genes.BLOCK_M) * problem.heads * batches(problem)


def key_blocks(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> int:
    """Tiles of keys of a K/V head, or slots of packed sequences."""
    return backward.key_blocks(problem, genes.BLOCK_N)


def whole_tiles(problem: AttentionProblem, genes: BackwardWgmmaGenes, sms: int) -> int:
    """Tiles of keys whose queries are not split: none, or with SPLIT=last those of whole rounds of the GPU's places."""
    places = sms * genes.BLOCKS_PER_SM
    return key_blocks(problem, genes) * units(problem) // places * places * (genes.SPLIT == "last")


SMS_MEASURED = 132
"""Of an H100 and an H200, of which the cost model has times."""
SECTION_ROUNDS = (1, 2, 4)
"""Blocks of a section over the places for blocks that the GPU has, of the sizes that are looked at."""
BLOCK_STEPS = 1.5
"""Of a block's ends, in steps of its loop."""
MOST_SIMULATED = 3000
"""Blocks: of more the first size of section is taken, as the last ones matter less."""
L2_FOR_SECTIONS, BEYOND_L2, LARGER_SECTION = 80 << 20, 0.06, 0.01
"""Bytes of Q, dO and sums of dQ of a section's heads from which it takes so much more time for each doubling, and what
a doubling costs below: 4 to 7 % on an H100, of three problems with grouped heads, and 1 to 3 % of three without."""


def section_heads(problem: AttentionProblem, genes: BackwardWgmmaGenes, sms: int) -> int:
    """K/V heads whose blocks begin in turn: with BLOCK_ORDER=sections as many as let all places end at the same time,
    by a simulation, of those that L2 has room for."""
    if genes.BLOCK_ORDER != "sections":
        return units(problem) if genes.BLOCK_ORDER == "heads" else 1
    columns = problem.element_bytes * (problem.head_dim + problem.head_dim_v) + 4 * dq_width(problem, genes)
    keys = genes.BLOCK_N * pair(genes)
    steps = tile_steps(problem.masking, problem.seqlen_q, problem.seqlen_k, genes.BLOCK_M, keys)
    if problem.varlen or problem.blocks:
        steps = (1,) * key_blocks(problem, genes)
    steps = tuple(count for count in steps for _ in range(genes.QUERY_SPLIT))
    places = max(1, sms * genes.BLOCKS_PER_SM // pair(genes))
    head_bytes = problem.group_size * problem.seqlen_q * columns
    return _section_heads(units(problem), steps, places, head_bytes)


@lru_cache(maxsize=1024)
def _section_heads(units: int, steps: tuple[int, ...], places: int, head_bytes: int) -> int:
    sizes = [max(1, min(units, int(rounds * places / len(steps) + 0.15))) for rounds in SECTION_ROUNDS]
    if units * len(steps) > MOST_SIMULATED:
        return sizes[0]

    def time_of(heads: int) -> float:
        first = units % heads
        counts = [first] * (first > 0) + [heads] * (units // heads)
        ends = [0.0] * places
        for count in counts:
            for step in steps:
                for _ in range(count):
                    heapreplace(ends, ends[0] + step + BLOCK_STEPS)
        beyond = math.log2(max(1.0, heads * head_bytes / L2_FOR_SECTIONS))
        return max(ends) * (1 + BEYOND_L2 * beyond + LARGER_SECTION * math.log2(heads / sizes[0]))

    return min(dict.fromkeys(sizes), key=time_of)


def rounds_of_parts(tiles: int, parts: int, places: int) -> float:
    """Time of a tile that blocks take for so many tiles in so many parts each, on places that one block has at once."""
    return math.ceil(tiles * parts / places) / parts


def scratch(problem: AttentionProblem, genes: BackwardWgmmaGenes, sms: int) -> dict[str, int]:
    """Bytes of the terms of the queries, of dQ in float32, and of what blocks leave of dK and dV; of what is made of a
    block list; of words by which blocks wait for one another."""
    if is_alone(problem, genes):
        return {}
    terms = 4 * genes.BLOCK_M * query_tiles(problem, genes)
    found = {"log_sums": terms, "deltas": terms, "dq_sums": terms * dq_width(problem, genes)}
    if genes.LAUNCHES == "two":
        found["dq_sums"] = found["dq_sums"] // units(problem) * head_blocks(problem, genes, sms)
    split = key_blocks(problem, genes) * units(problem) - whole_tiles(problem, genes, sms)
    found |= {"key_sums": key_sums(problem, genes, split)} if genes.QUERY_SPLIT > 1 else {}
    found |= block_state_bytes(problem) | packed_bytes(problem)
    of_tiles = query_tiles(problem, genes) * (adds_in_order(problem, genes) or genes.DQ_BEGIN == "stored")
    words = of_tiles + (genes.SCHEDULE == "claimed")
    return found | ({"progress": 4 * words} if words else {})


def key_sums(problem: AttentionProblem, genes: BackwardWgmmaGenes, tiles: int) -> int:
    """Bytes of dK and dV of all parts of so many tiles in float32, QUERY_SPLIT > 1; else 0."""
    blocks = tiles * genes.QUERY_SPLIT
    dims = problem.head_dim, problem.head_dim_v
    columns = sum(map(whole_chunks, dims) if genes.DKV_ROWS == "dims" else dims)
    return 4 * blocks * genes.BLOCK_N * columns * (genes.QUERY_SPLIT > 1)


def units(problem: AttentionProblem) -> int:
    """K/V heads of all batches."""
    return problem.kv_heads * batches(problem)


LAUNCHES_AT_ONCE = 4
"""Of deterministic gradients, on streams of their own. Of each, blocks of one head may wait for blocks that have yet to
begin; so many of them leave room for all blocks of a head of one more."""


def waits_ahead(problem: AttentionProblem, genes: BackwardWgmmaGenes, sms: int) -> int:
    """1 where blocks that add to the same dQ in order may not all run at once on so many SMs, so that each must wait
    for those alone that begin before it; else 0. Blocks begin in order, with BLOCK_ORDER=keys head by head."""
    blocks = math.ceil(problem.seqlen_k / genes.BLOCK_N) * genes.QUERY_SPLIT
    if genes.BLOCK_ORDER != "keys":
        blocks *= units(problem)
    return min(1, blocks // (sms * genes.BLOCKS_PER_SM // LAUNCHES_AT_ONCE + 1))
