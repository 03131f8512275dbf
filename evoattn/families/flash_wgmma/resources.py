"""The genes of flash_wgmma, and what they take: registers, shared memory, results that blocks hand over, work."""

import math
from typing import Literal

from evoattn.families.dealt import DealtTiles, batches, row_blocks
from evoattn.families.flash_wgmma import cache
from evoattn.families.gangs import TilesInOrder
from evoattn.families.genes import Genes, gene
from evoattn.families.residency import WARP, register_cap
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, ELEMENT_BYTES, ROW_BYTES, group_slots
from evoattn.families.work import (
    LaunchWork,
    Step,
    bias_bytes,
    blocks_of_sequence,
    bytes_of,
    row_steps,
    tensor_bytes,
    together,
    up_to,
    variant_step,
    visit_share,
)
from evoattn.model.block_list import partial_share
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.symbol import as_one, first, least

TileOrder = Literal["by_head", "heads_4", "heads_8", "heads_16", "all_heads"]
Store = Literal["tensor_map", "rows", "chunks"]


class FlashWgmmaGenes(Genes):
    """The parameters of flash_wgmma."""

    BLOCK_M: int = gene(
        "query rows per block, 64 per consumer warpgroup; 8, of batch_invariant problems: those of one warp's lanes, "
        "half of whose softmax is left out",
        (8, 64, 128, 192, 256),
    )
    BLOCK_N: int = gene("keys per tile", (48, 64, 80, 96, 112, 128))
    STAGES: int = gene("tiles of K and of V in shared memory; those not in use are being copied", (1, 2, 3, 4))
    BLOCKS_PER_SM: int = gene("blocks that registers and shared memory leave room for on one SM", (1, 2, 3))
    PRODUCER: Literal["warp", "warpgroup"] = gene(
        "copies are issued by one warp, or by a warpgroup that gives its registers to the consumers"
    )
    OVERLAP: bool = gene("the softmax of a tile runs during P V of the tile before")
    PING_PONG: bool = gene(
        "warpgroups take turns on the tensor cores, so that the softmax of one overlaps the products of another"
    )
    RESCALE: Literal["always", "lazy_5", "lazy_8", "lazy_after"] = gene(
        "the output is rescaled for every tile (always); if a score exceeded a shift set 5 or 8 powers of two "
        "above the first maximum (lazy_5, lazy_8); or if a sum exceeded a limit (lazy_after)"
    )
    KEY_SPLIT: int = gene(
        "blocks that split the keys of the same rows and add up their outputs: 2 and 4 in a cluster, others "
        "through global memory; of parts as PARTS_MERGE says",
        (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32),
    )
    SCHEDULE: Literal["single", "fixed", "claimed", "balanced"] = gene(
        "single: one block per tile of rows; else one wave of blocks takes the tiles in fixed order (fixed), by a "
        "counter (claimed), or so that the key tiles of the last ones, of packed sequences of all, are shared evenly "
        "(balanced)"
    )
    TILE_ORDER: TileOrder = gene(
        "tiles of one head together, or 4, 8, 16 or all heads in turn; the longest first under a causal mask"
    )
    CAUSAL_SKIP: bool = gene("each warpgroup skips key tiles that the mask hides from all of its rows")
    POLYNOMIAL_EIGHTHS: int = gene(
        "how many of every eight exponentials are computed as a polynomial on the FMA units", (0, 1, 2, 3)
    )
    Q_IN_REGISTERS: bool = gene("Q is read once into registers; otherwise from shared memory for every tile")
    STORE: Store = gene(
        "the output is stored by one bulk copy per warpgroup (tensor_map), by 16-byte stores of each warp's rows "
        "(rows), or by one bulk copy per 64 columns (chunks)"
    )
    PART_TILES: int = gene(
        "tiles of keys, counted from the first key, whose sums are made by themselves and then added up part by "
        "part, by one block or by several with the same bits; 0: none. Of batch_invariant problems",
        (0, 4, 8, 16, 32),
        default=0,
    )
    PARTS_MERGE: Literal["memory", "cluster"] = gene(
        "blocks that share the parts of the same rows add them up through global memory, or in a cluster that has "
        "a block for each part; of PART_TILES",
        default="memory",
    )
    KEYS_AT_ONCE: int = gene(
        "all of up to so many keys at once, with the bits of two tiles of BLOCK_N; 0: no", (0, 80, 96, 112), default=0
    )
    GROUP_ROWS: bool = gene(
        "the query heads that share a K/V head are rows of the same tiles, so that K and V are read once for all",
        default=False,
    )

    @property
    def keys(self) -> int:
        """Of a tile as the template and the cost model have it, which is copied and multiplied at once."""
        return self.KEYS_AT_ONCE or self.BLOCK_N


WARPGROUP = 128
WARPGROUP_ROWS = 64
PRODUCER_REGISTERS = {1: 40, 2: 24, 3: 32, 4: 24}
"""Per thread of the producer warpgroup after setmaxnreg, by consumer warpgroups (reports/sources.md)."""
MAX_CONSUMER_REGISTERS = 240
FIXED_REGISTERS = 28
"""Addresses, counters, row sums and shifts beside the operands of wgmma.

With the terms of `registers_needed` fitted to 1,050 random configs near the limit, compiled by ptxas 13.0; 94 of them
spilled, and none of those that these terms accept."""
PERSISTENT_REGISTERS = 4
UNEVEN_ROWS_REGISTERS = 13
"""Replaces PERSISTENT_REGISTERS when STORE=rows and head_dim is no multiple of 64: half of 38 such configs spilled with
4, and five still with 9."""
WIDE_HEAD_DIM = 128
"""Above it ptxas keeps more addresses and moves parts of O: 5 registers for each 32 columns, and more where a loop goes
over tiles."""
WIDE_PERSISTENT_REGISTERS = 12
"""With 4, two of 330 kernels of head_dim 136 to 256 spilled, both with SCHEDULE=claimed and without OVERLAP."""
WIDE_ROWS_REGISTERS = 32
"""Replaces WIDE_PERSISTENT_REGISTERS when STORE=rows, where with 26 one of 107 kernels still spilled."""
MERGE_REGISTERS = 32
"""Of a balanced schedule, beside its own O and that of another block, which ptxas reads in one go: with less, tight
configs of head_dim 112 (30) and 184 to 256 (60) spilled, of some 800 that were compiled."""
WIDE_MERGE_REGISTERS = 60
LAZY_AFTER_REGISTERS = 16
"""For the product that brings lost scores back, and one more for 16 columns of a row; found as FIXED_REGISTERS."""
LAZY_ROWS_REGISTERS = 4
"""Of batch_invariant problems, whose raised rows have other code, in place of those of the columns, under a causal mask
and where a loop over tiles stores rows: of 27 configs with less left 19 spilled, of 22 others two, 4 bytes each."""
TWO_HEADS_REGISTERS = 12
"""Of GROUP_ROWS with slopes, a bias or an expression, which a thread's two rows may have of two heads: of 16 configs
with up to 12 to spare two spilled, with 0 and with 8."""
AHEAD_ROWS_REGISTERS = 16
"""That must be left to begin a tile of rows ahead with STORE=rows: of 109 configs with less 61 spilled, of 16 with as
many none."""
AHEAD_MERGE_REGISTERS = 16
"""The same of a balanced schedule, whose merge then has S beside it: all eleven that had fewer spilled, of ten others
one, by rows."""
REGISTERS_UNDER_WGMMA = 26
"""Registers that ptxas keeps below and above the operands of one wgmma: with fewer at launch it refuses (C7602)."""


def warpgroups(genes: FlashWgmmaGenes) -> int:
    """Consumer warpgroups."""
    return math.ceil(genes.BLOCK_M / WARPGROUP_ROWS)


def multiplied_rows(genes: FlashWgmmaGenes) -> int:
    """Rows of the products and of Q in shared memory: those of a tile, or more."""
    return WARPGROUP_ROWS * warpgroups(genes)


def producer_warps(genes: FlashWgmmaGenes) -> int:
    return 4 if genes.PRODUCER == "warpgroup" else 1


def threads(genes: FlashWgmmaGenes) -> int:
    """Threads per block."""
    return WARPGROUP * warpgroups(genes) + 32 * producer_warps(genes)


def registers_at_launch(genes: FlashWgmmaGenes) -> int:
    """Registers per thread under the launch bounds."""
    return register_cap(threads(genes) // 32, genes.BLOCKS_PER_SM)


def moved_registers(genes: FlashWgmmaGenes, converts: bool = False) -> tuple[int, int]:
    """(producer's, consumers') registers per thread after setmaxnreg, (0, 0) without.

    A block owns what it had at launch: W·c + p <= (W + 1)·launch, or an increase would wait forever
    (reports/sources.md)."""
    if genes.PRODUCER != "warpgroup":
        return 0, 0
    consumers, launch = warpgroups(genes), (registers_at_launch(genes) + 1) // 8 * 8
    producer = (cache.CONVERTER_REGISTERS if converts else PRODUCER_REGISTERS)[consumers]
    consumer = min(((consumers + 1) * launch - producer) // consumers // 8 * 8, MAX_CONSUMER_REGISTERS)
    return (0, 0) if converts and consumer <= launch else (producer, consumer)  # the warpgroup is there to convert


def _persistent_registers(value_dim: int, by_rows: bool) -> int:
    """What a loop over tiles of rows keeps, with `by_rows` its addresses of the rows of O."""
    if value_dim > WIDE_HEAD_DIM:
        return WIDE_ROWS_REGISTERS if by_rows else WIDE_PERSISTENT_REGISTERS
    return UNEVEN_ROWS_REGISTERS if by_rows and value_dim % 64 else PERSISTENT_REGISTERS


def registers_needed(problem: AttentionProblem, genes: FlashWgmmaGenes) -> int:
    """Estimate of the registers per consumer thread below which ptxas spills or serializes wgmma: of S, P, O, Q if it
    stays, and what the other genes keep beside them."""
    block_n, wide = genes.keys, max(0, problem.head_dim - WIDE_HEAD_DIM, problem.head_dim_v - WIDE_HEAD_DIM)
    operands = block_n // 2 + block_n // 4 + problem.head_dim_v // 2 + cache.scale_registers(problem)
    if genes.Q_IN_REGISTERS:
        operands += 4 * cache.key_product(problem)[0]
    others = FIXED_REGISTERS + math.ceil(wide * 5 / 32)
    if genes.SCHEDULE != "single":
        others += _persistent_registers(problem.head_dim_v, genes.STORE == "rows")
    if genes.RESCALE == "lazy_after" and problem.batch_invariant:
        by_rows = is_persistent(genes) and genes.STORE == "rows"
        others += LAZY_AFTER_REGISTERS + LAZY_ROWS_REGISTERS * (problem.causal or by_rows)
    elif genes.RESCALE == "lazy_after":
        others += LAZY_AFTER_REGISTERS + problem.head_dim // 16 + wide // 8
    if genes.GROUP_ROWS and (problem.alibi or problem.bias or problem.score):
        others += TWO_HEADS_REGISTERS
    if problem.bias:  # one register for two keys of two rows, loaded beside the product
        others += block_n // 4
    merges = genes.SCHEDULE == "balanced" and not genes.PART_TILES
    return max(operands + others, _merge_registers(problem.head_dim_v) if merges else 0)


def keeps_parts(genes: FlashWgmmaGenes) -> bool:
    """Whether a block adds up several parts of the keys of its rows."""
    return genes.PART_TILES > 0 and genes.KEY_SPLIT == 1


WIDEST_IN_SHARED = 160
"""The most columns of V whose sums of parts shared memory has room for, of 128 rows beside two tiles of keys."""


def parts_in_global(problem: AttentionProblem, genes: FlashWgmmaGenes) -> bool:
    """Whether a block adds up its parts in global memory, in place of shared memory."""
    return keeps_parts(genes) and problem.head_dim_v > WIDEST_IN_SHARED


def _merge_registers(value_dim: int) -> int:
    return value_dim + (WIDE_MERGE_REGISTERS if value_dim > WIDE_HEAD_DIM else MERGE_REGISTERS)


def begins_ahead(problem: AttentionProblem, genes: FlashWgmmaGenes) -> bool:
    """Whether a tile of rows begins beside the last product of the one before (`AHEAD` in the template).

    Q must come before its turn, which it does where the last one has gone into registers; the ring must hold V of that
    product and of the keys that are skipped; and there must be registers for two tiles of rows at once, which three
    blocks per SM leave too few of (64×48 tiles of head_dim 64 spilled 16 bytes)."""
    skipped = math.ceil((genes.BLOCK_M - WARPGROUP_ROWS) / genes.keys) if genes.CAUSAL_SKIP else 0
    if genes.SCHEDULE == "single" or not (genes.OVERLAP and genes.Q_IN_REGISTERS):
        return False
    if skipped >= genes.STAGES or genes.BLOCKS_PER_SM > 2:
        return False
    registers = moved_registers(genes, bool(problem.kv))[1] or registers_at_launch(genes)
    merging = _merge_registers(problem.head_dim_v) + genes.keys // 2 + AHEAD_MERGE_REGISTERS
    if genes.SCHEDULE == "balanced" and not genes.PART_TILES and merging > registers:
        return False
    wanted = AHEAD_ROWS_REGISTERS if genes.STORE == "rows" else 0
    if genes.RESCALE == "lazy_after":  # 128×112 tiles spilled with 4 to spare, 192×80 of head_dim 64 not with 0
        wanted += max(0, problem.head_dim - 64) // 8
    return registers_needed(problem, genes) + wanted <= registers


def widest_wgmma(problem: AttentionProblem, genes: FlashWgmmaGenes) -> int:
    """Registers per thread that the widest wgmma needs at launch."""
    return max(genes.keys // 2 + 4 * genes.Q_IN_REGISTERS, problem.head_dim_v // 2 + 4) + REGISTERS_UNDER_WGMMA


IN_CLUSTER, PARTS_IN_CLUSTER = (2, 4), (2, 3, 4, 6, 8)
"""Values of KEY_SPLIT whose blocks are a cluster where shared memory holds their results; of parts, each of whose
blocks adds up some columns."""
SMEM_PER_SM, SMEM_RESERVED = 228 * 1024, 1024
"""Bytes of shared memory of an SM of sm_90, and of them those that a block takes for the system."""
HEADS_IN_TURN = {"by_head": 1, "heads_4": 4, "heads_8": 8, "heads_16": 16, "all_heads": 0}
L2_LINE = 128
O_CHUNK_PLACES = 2
"""64-column output buffers per warpgroup, with STORE=chunks."""
ORDERED_BATCHES = 32
"""Words by which a claimed schedule keeps the order of so many batches with keys in use, those with most first."""
TILE_WORDS, SEQUENCE_TILE_WORDS = 4, 8
"""Words that describe the next tile of rows: row block, head, batch, key tiles; also where its sequence lies."""


def is_persistent(genes: FlashWgmmaGenes) -> bool:
    return genes.SCHEDULE != "single"


def shares_sequences(problem: AttentionProblem, genes: FlashWgmmaGenes) -> bool:
    """Whether blocks share the key tiles of packed sequences evenly (`sequence_share.cuh`)."""
    return bool(problem.varlen) and genes.SCHEDULE == "balanced"


def chunks_of(dim: int) -> int:
    """64-column chunks of a row."""
    return math.ceil(dim / CHUNK_COLUMNS)


def cluster_blocks(problem: AttentionProblem, genes: FlashWgmmaGenes) -> int:
    """Blocks of a cluster: those of KEY_SPLIT, if they are few and their results fit beside the tiles of a block."""
    split = genes.KEY_SPLIT
    few = (PARTS_IN_CLUSTER if genes.PARTS_MERGE == "cluster" else ()) if genes.PART_TILES else IN_CLUSTER
    if split not in few:
        return 1
    needed = _tile_bytes(problem, genes) + _handed_over_bytes(problem, genes, split) + SMEM_RESERVED
    return split if genes.BLOCKS_PER_SM * needed <= SMEM_PER_SM else 1


def merges_in_memory(problem: AttentionProblem, genes: FlashWgmmaGenes) -> bool:
    """Whether the blocks of KEY_SPLIT add up their results in global memory."""
    return cluster_blocks(problem, genes) < genes.KEY_SPLIT


def parts(problem: AttentionProblem, genes: FlashWgmmaGenes) -> int:
    """Of all keys, those whose sums are made by themselves."""
    tiles = math.ceil(problem.seqlen_k / genes.keys)
    return parts_of(tiles, genes) if genes.PART_TILES else 1


def parts_of(tiles: int, genes: FlashWgmmaGenes) -> int:
    """Parts of so many tiles of keys: `KeyParts` of the template."""
    return math.ceil(tiles / genes.PART_TILES)


def merge_words(problem: AttentionProblem, genes: FlashWgmmaGenes) -> int:
    """Words by which blocks of a tile of rows say that results are there, for each part of its columns."""
    return warpgroups(genes) * min(genes.KEY_SPLIT, problem.head_dim_v // 8)


def result_bytes(problem: AttentionProblem) -> int:
    """What a warpgroup hands to another one, of each thread: O before the division, two shifts and sums."""
    return WARPGROUP * (problem.head_dim_v // 2 + 4) * 4


def smem_bytes(problem: AttentionProblem, genes: FlashWgmmaGenes) -> int:
    """Dynamic shared memory of a block: its tiles, and results of the other blocks of its cluster."""
    return _tile_bytes(problem, genes) + _handed_over_bytes(problem, genes, cluster_blocks(problem, genes))


def _handed_over_bytes(problem: AttentionProblem, genes: FlashWgmmaGenes, blocks: int) -> int:
    """Of results that a block of a cluster takes from the others; of parts the columns that it adds up, its own too."""
    if genes.PART_TILES and blocks > 1:
        return blocks * warpgroups(genes) * (1 + math.ceil(problem.head_dim_v / 8 / blocks)) * WARPGROUP * 16
    return (blocks - 1) * warpgroups(genes) * result_bytes(problem)


def _tile_bytes(problem: AttentionProblem, genes: FlashWgmmaGenes) -> int:
    """Q, the rings of K and V, O or some chunks of it if the next Q loads before O has left, barriers, what the
    producer says of two tiles, and the order of batches."""
    chunks, value_chunks = chunks_of(problem.head_dim), chunks_of(problem.head_dim_v)
    o_chunks = (O_CHUNK_PLACES if genes.STORE == "chunks" else value_chunks) if is_persistent(genes) else 0
    o_row_bytes = o_chunks * ROW_BYTES
    if keeps_parts(genes) and not parts_in_global(problem, genes):  # O takes their place
        o_row_bytes = max(value_chunks * ROW_BYTES, 4 * problem.head_dim_v)
    tile_words = SEQUENCE_TILE_WORDS if problem.varlen or problem.seqused else TILE_WORDS
    q_bytes = multiplied_rows(genes) * ROW_BYTES * (chunks if o_row_bytes else max(chunks, value_chunks))
    barriers = 8 * (2 * warpgroups(genes) + 4 * genes.STAGES + 1)
    order = ORDERED_BATCHES if problem.seqused and genes.SCHEDULE == "claimed" else 0
    scales = warpgroups(genes) * cache.scale_bytes(problem, genes.keys)
    stages = genes.STAGES * cache.stage_bytes(problem, genes.keys)
    return q_bytes + stages + o_row_bytes * multiplied_rows(genes) + scales + barriers + (2 * tile_words + order) * 4


FEW_ROWS = 8
"""BLOCK_M of tiles of which a lane has one row, not two."""


def rows_of_tiles(problem: AttentionProblem, genes: FlashWgmmaGenes) -> int:
    """Rows of which tiles are made: queries, with GROUP_ROWS those of the heads of a group."""
    return problem.seqlen_q * (group_slots(problem) if genes.GROUP_ROWS else 1)


def row_tiles(problem: AttentionProblem, genes: FlashWgmmaGenes) -> tuple[int, int]:
    """(tiles of rows, heads of all batches that have so many each): heads of Q, or of K and V with GROUP_ROWS."""
    if genes.GROUP_ROWS:
        return row_blocks(problem, genes.BLOCK_M, group_slots(problem)), problem.kv_heads * batches(problem)
    return row_blocks(problem, genes.BLOCK_M), problem.heads * batches(problem)


@as_one
def tiles_in_order(problem: AttentionProblem, genes: FlashWgmmaGenes) -> TilesInOrder:
    """The tiles of rows. Tiles next to one another share keys where they are of one head, or of a group of heads;
    where a line of L2 has rows of K of several heads, the lines."""
    rows, heads = row_tiles(problem, genes)
    turn, own = HEADS_IN_TURN[genes.TILE_ORDER], heads // batches(problem)
    _, head_stride, row_stride, _ = problem.strides("k")
    row_bytes = problem.head_dim * problem.element_bytes
    lines = problem.kv_heads > 1 and head_stride < row_stride and row_bytes % L2_LINE > 0
    near = own if lines else own // problem.kv_heads
    if turn > 1:  # the least common multiple
        near = first((near, turn * near, near), lambda n: n % turn == 0, turn * near)
    return TilesInOrder(rows * heads, bytes_of(problem, "k", "v"), rows * near if turn else near, max(1, turn))


def gang_size(problem: AttentionProblem, genes: FlashWgmmaGenes, gpu: GpuSpec) -> int:
    """Blocks that keep step; 1 but for a balanced schedule."""
    if genes.SCHEDULE != "balanced" or problem.varlen:
        return 1
    return tiles_in_order(problem, genes).gang(gpu.sm_count * genes.BLOCKS_PER_SM, gpu.l2_bytes)


@as_one
def grid(problem: AttentionProblem, genes: FlashWgmmaGenes, gpu: GpuSpec) -> tuple[int, int, int]:
    """Blocks: one wave if they are persistent, else KEY_SPLIT per tile of rows, in the dimensions that `block_tile.cuh`
    reads.

    Blocks of a balanced schedule are (those of a gang, gangs) and fewer than the tiles of rows, so that even a small
    problem has tiles that two blocks share."""
    rows, heads = row_tiles(problem, genes)
    if is_persistent(genes):
        tiles, slots = rows * heads, gpu.sm_count * genes.BLOCKS_PER_SM
        if shares_sequences(problem, genes):
            return slots, 1, 1  # also for few tiles, whose keys are shared
        if genes.SCHEDULE != "balanced":
            return min(tiles, slots), 1, 1
        gang = gang_size(problem, genes, gpu)
        return gang, max(1, least(tiles - 1, slots // gang)), 1
    turn, split = HEADS_IN_TURN[genes.TILE_ORDER], genes.KEY_SPLIT
    if turn == 0:
        return heads // batches(problem) * split, batches(problem), rows
    if turn == 1:
        return rows * split, heads // batches(problem), batches(problem)
    return turn * split, rows, math.ceil(heads / turn)


SOFTMAX_WAIT, FIRST_WAIT, CLUSTER_WAIT, MEMORY_WAIT = 170, 1300, 1500, 4000
"""Clocks: of a tile's dependent instructions; of a block's first loads and last stores; of a merge in a cluster; of one
in global memory, which was not measured."""
PART_WAIT, LEFT_WAIT, FEW_LEFT_WAIT = 500, 5000, 1000
"""Clocks: of a part whose sum is added to that of those before; of one that a block leaves in global memory; the same
of few rows, with which first choices of 27 problems take 1.004 of the best of 4 to 9 timed on an H200 (2026-11-29)."""
BEGIN_WAIT, ONCE_WAITS = 400, {"single": 0, "fixed": 600, "claimed": 900, "balanced": 5000}
"""Clocks: of a block that begins where another ended; of a persistent block, once, by SCHEDULE: its first tile's place,
a counter in memory, and results that blocks exchange there. Estimates, from what the other terms left of times of an
H200."""
SHARE_WAITS, SHARE_PACE = 11000, 1.1
"""Of blocks that share packed sequences: clocks for which each waits once, for lengths, its share and results of
others, and by what its steps take longer, as tiles of rows that share keys are begun at times apart. Of some eight
kernels for each of 96 steps with prompts, on H100s and an H200, the model's choice takes 1.076 times the best one's
time so, 1.100 with a pace of 1.2, 1.070 with 1.0."""
TURNS_PACE, WAVE_PACE = 1.05, 1.1
"""By what an engine's step with prompts takes longer where heads take turns, as its single tokens, which may have the
most keys, come last then; and where one wave of blocks takes all tiles of rows. Of some eight kernels for each of 137
steps of three draws on H100s the model's choice takes 1.043 times the best one's time so, 1.054 without."""
COPY_WAIT = 90
"""Clocks of a copy of 64 columns of the keys of a tile that one page holds: with pages of 16 keys, or tiles that are no
multiples of a page, kernels of an H200 took up to twice as long."""
PREDICATE_WAIT = 1500
"""Clocks of a PARTIAL tile of keys: its place in a list, bits or tables are read before it. Of 180 times on H100s at 45
problems over lists what should take least takes 1.025 times the best with head_dim 64 and 1.017 with 128; 1.034 and
1.070 without a wait, 1.028 and 1.036 with 1,000."""
SCORE_OPERATIONS = {"always": 4.5, "lazy_5": 4.0, "lazy_8": 4.0, "lazy_after": 3.5}


def launch_work(problem: AttentionProblem, genes: FlashWgmmaGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The one launch. A step's `waits` leave out the products: they are in `tensor_flops`."""
    rows, keys, groups, scores = genes.BLOCK_M, genes.keys, warpgroups(genes), multiplied_rows(genes) * genes.keys
    mean, most, count = row_steps(problem, rows, keys, group_slots(problem) if genes.GROUP_ROWS else 1)
    own = blocks_of_sequence(problem, count)
    _, heads = row_tiles(problem, genes)
    split, tiles, sharers = genes.KEY_SPLIT, count * heads, heads // (problem.kv_heads * batches(problem))
    copies = keys // math.gcd(keys, problem.page) * _widths(problem) / 64 if problem.page else 0.0
    # Blocks that share tiles of rows evenly are counted as one for each tile of keys.
    shares, pace = mean if shares_sequences(problem, genes) else 1.0, _pace(problem, genes)
    keys_lie = problem.batch_invariant and genes.RESCALE == "lazy_after" and genes.STAGES > 1  # till no row is raised
    coming = (genes.STAGES - 1) * problem.head_dim_v + (genes.STAGES - keys_lie) * problem.head_dim
    return (
        LaunchWork(
            "flash_wgmma",
            max(2, round(tiles * shares)) if shares != 1.0 else tiles * split,
            threads(genes),
            4 * groups,
            smem_bytes(problem, genes),
            registers or registers_at_launch(genes),
            together(variant_step(problem, scores), _step(problem, genes, groups, copies), _asked(problem)),
            mean / shares * pace / (min(split, parts_of(math.ceil(mean), genes)) if genes.PART_TILES else split),
            pace * (1 if shares_sequences(problem, genes) else _most_tiles(genes, most)),
            together(_ends(problem, genes, groups), times=1 / shares),
            tensor="wgmma",
            schedule=genes.SCHEDULE,
            once_waits=SHARE_WAITS if shares_sequences(problem, genes) else ONCE_WAITS[genes.SCHEDULE],
            longest_first=(problem.causal or bool(problem.blocks))
            and not (problem.varlen and problem.page)  # where single tokens may have the most keys
            and (is_persistent(genes) or HEADS_IN_TURN[genes.TILE_ORDER] != 1),
            in_flight_bytes=coming * keys * problem.element_of("k").bytes,
            read_bytes=tensor_bytes(problem, "q", "k", "v") + bias_bytes(problem),
            write_bytes=tensor_bytes(problem, "o"),
            sweep_bytes=tensor_bytes(problem, "k", "v"),
            sweepers=own * sharers * split * shares,
            visits=own,
            visit_share=visit_share(problem, mean, keys),
            heads_in_turn=(HEADS_IN_TURN[genes.TILE_ORDER] or heads) / sharers,
            order=tiles_in_order(problem, genes) if genes.SCHEDULE == "balanced" and not problem.varlen else None,
            dealt=_dealt(problem, genes) if genes.SCHEDULE == "fixed" else None,
            cluster=cluster_blocks(problem, genes),
            genes=_numbers(problem, genes, groups, copies, tiles),
        ),
    )


def _pace(problem: AttentionProblem, genes: FlashWgmmaGenes) -> float:
    """By what a block's steps take longer."""
    if shares_sequences(problem, genes):
        return SHARE_PACE
    if not (problem.varlen and problem.page and problem.seqlen_q > 1):
        return 1.0
    return (TURNS_PACE if HEADS_IN_TURN[genes.TILE_ORDER] != 1 else 1.0) * (WAVE_PACE if is_persistent(genes) else 1.0)


def _most_tiles(genes: FlashWgmmaGenes, most: int) -> int:
    """Of the tiles of keys of a tile of rows, those of the block that has most."""
    if not genes.PART_TILES:
        return math.ceil(most / genes.KEY_SPLIT)
    own = [0] * genes.KEY_SPLIT
    for begin in range(0, most, genes.PART_TILES):
        own[begin // genes.PART_TILES % genes.KEY_SPLIT] += min(genes.PART_TILES, most - begin)
    return max(own)


def _dealt(problem: AttentionProblem, genes: FlashWgmmaGenes) -> DealtTiles | None:
    if not (problem.varlen or problem.seqused or problem.blocks):
        return None
    heads, slots = row_tiles(problem, genes)[1], group_slots(problem) if genes.GROUP_ROWS else 1
    return DealtTiles(problem, genes.BLOCK_M, genes.keys, slots, heads, HEADS_IN_TURN[genes.TILE_ORDER])


def _widths(problem: AttentionProblem) -> int:
    """Columns of K, in whole steps of the products, and of V."""
    return up_to(problem.head_dim, 16) + problem.head_dim_v


def _asked(problem: AttentionProblem) -> Step:
    """What a block waits for in a tile of keys of which a predicate says what is seen."""
    return Step(waits=PREDICATE_WAIT * partial_share(*problem.block_mask)) if problem.shown else Step()


def _step(problem: AttentionProblem, genes: FlashWgmmaGenes, groups: int, copies: float) -> Step:
    """A block's work on a tile of keys, but for a variant's own."""
    rows, keys, value_dim = multiplied_rows(genes), genes.keys, problem.head_dim_v
    scores, polynomial, size = rows * keys, genes.POLYNOMIAL_EIGHTHS / 8, problem.element_bytes
    computed = scores / (2 if genes.BLOCK_M == FEW_ROWS else 1)
    rescaled = rows * value_dim if genes.RESCALE == "always" else 0
    lanes = computed * (SCORE_OPERATIONS[genes.RESCALE] + 5 * polynomial) + rescaled
    tile_bytes = keys * (up_to(problem.head_dim, 64) + up_to(value_dim, 64)) * size
    reads = groups * tile_bytes + (0 if genes.Q_IN_REGISTERS else rows * up_to(problem.head_dim, 16) * size)
    loaded, made = keys * (problem.head_dim + value_dim) * problem.element_of("k").bytes, keys * cache.made(problem)
    return Step(
        2.0 * scores * _widths(problem),
        lanes,
        computed * (1 - polynomial) + rescaled / 64,
        lanes / WARP + computed * (1 - polynomial) / WARP + 20 * 4 * groups + made / cache.CONVERTED_AN_INSTRUCTION,
        reads + (loaded + 3.0 * made if problem.kv else tile_bytes),  # what is made is read, and written in 16 bits
        loaded,
        SOFTMAX_WAIT + (40 if genes.PING_PONG else 0) + COPY_WAIT * copies,
    )


def _ends(problem: AttentionProblem, genes: FlashWgmmaGenes, groups: int) -> Step:
    """A block's first loads, last stores and merges."""
    rows, value_dim, split = genes.BLOCK_M, problem.head_dim_v, genes.KEY_SPLIT
    in_memory = merges_in_memory(problem, genes)
    results, added = (max(split, parts(problem, genes)), 0) if split > 1 else (1, parts(problem, genes) - 1)
    merges = 2 * (results - 1) / split * groups * result_bytes(problem)  # all but one are written, and read
    merge_wait = MEMORY_WAIT if in_memory else CLUSTER_WAIT if split > 1 else 0
    if in_memory and genes.PART_TILES:
        merge_wait += (FEW_LEFT_WAIT if rows == FEW_ROWS else LEFT_WAIT) * math.ceil(results / split)
    return Step(
        instructions=rows * value_dim / WARP * (1.5 + 3 * added) + 60 * groups * 4,
        shared_bytes=2.0 * rows * value_dim * ELEMENT_BYTES + (0 if in_memory else merges),
        loaded_bytes=rows * (problem.head_dim + value_dim) * ELEMENT_BYTES
        + merges
        + (8.0 * added * rows * value_dim if parts_in_global(problem, genes) else 0),
        waits=FIRST_WAIT + merge_wait + added * PART_WAIT + (0 if is_persistent(genes) else BEGIN_WAIT),
    )


def _numbers(
    problem: AttentionProblem, genes: FlashWgmmaGenes, groups: int, copies: float, tiles: int
) -> dict[str, float]:
    """What else may matter: `LaunchWork.genes`."""
    rows = multiplied_rows(genes)
    key_tiles = math.ceil(problem.seqlen_k / genes.keys)
    most_tiles = math.ceil(key_tiles / genes.KEY_SPLIT)
    have = moved_registers(genes, bool(problem.kv))[1] or registers_at_launch(genes)
    return {
        "warpgroups": groups,
        "stages": genes.STAGES,
        "asked blocks": genes.BLOCKS_PER_SM,
        "producer group": genes.PRODUCER == "warpgroup",
        "overlapped": genes.OVERLAP,
        "ping pong": genes.PING_PONG,
        "rescale": ("always", "lazy_5", "lazy_8", "lazy_after").index(genes.RESCALE),
        "key split": genes.KEY_SPLIT,
        "cluster": cluster_blocks(problem, genes),
        "merges in memory": merges_in_memory(problem, genes),
        "key tiles": key_tiles,
        "most key tiles": most_tiles,
        "idle key tiles": genes.KEY_SPLIT * most_tiles - key_tiles,
        "schedule": ("single", "fixed", "claimed", "balanced").index(genes.SCHEDULE),
        "heads in turn": HEADS_IN_TURN[genes.TILE_ORDER] or 64,
        "causal skip": genes.CAUSAL_SKIP,
        "skipped": genes.CAUSAL_SKIP * (rows - WARPGROUP_ROWS) / genes.keys if problem.causal else 0,
        "polynomial": genes.POLYNOMIAL_EIGHTHS,
        "q registers": genes.Q_IN_REGISTERS,
        "store": ("tensor_map", "rows", "chunks").index(genes.STORE),
        "begins ahead": begins_ahead(problem, genes),
        "spare registers": have - registers_needed(problem, genes),
        "wide rows": problem.head_dim_v % 64 != 0,
        "copies": copies,
        "grouped rows": genes.GROUP_ROWS,
        "filled rows": math.prod(problem.shape("o")[:3]) / (tiles * rows),
        "empty tiles": math.prod(row_tiles(problem, genes)) / tiles - 1 if problem.varlen else 0.0,
    }
