"""flash_wgmma with SCHEDULE=balanced: who takes which key tiles, in Python and in CUDA, how many blocks a gang has,
and kernels whose blocks and gangs hand results over. What a fixed schedule deals to its blocks, against the loops of
the kernel written out."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from evoattn.families.dealt import DealtTiles, row_blocks
from evoattn.families.flash_wgmma.resources import FlashWgmmaGenes, grid, registers_at_launch, result_bytes, warpgroups
from evoattn.families.gangs import TilesInOrder
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.paths import TEMPLATES
from evoattn.model.problem import AttentionProblem
from evoattn.model.sequences import starts
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from evoattn.ptx import run_launch
from evoattn.samplers.base import ConfigPool
from tests.families.on_interpreter import built, judged
from tests.families.test_flash_wgmma import FAMILY, config
from tests.support.compiles import ptx_kept

H100 = GPUS["h100"]
Piece = tuple[int, int, int]
"""Tile of rows, first and last of its key tiles."""


def shares(tiles: int, key_tiles: int, blocks: int) -> list[list[Piece]]:
    """What each block takes, in its order: whole tiles, then from the last to the first its part of the key tiles of
    the rest."""
    whole = max(0, tiles // blocks - 1)
    left = (tiles - whole * blocks) * key_tiles
    result = []
    for block in range(blocks):
        pieces = [(turn * blocks + block, 0, key_tiles - 1) for turn in range(whole)]
        steps = range(block * left // blocks, (block + 1) * left // blocks)
        cut = [
            (tile, [s % key_tiles for s in group])
            for tile, group in itertools.groupby(steps, lambda step: step // key_tiles)
        ]
        result.append(pieces + [(whole * blocks + tile, group[0], group[-1]) for tile, group in reversed(cut)])
    return result


LAUNCHES = [
    (tiles, key_tiles, blocks)
    for blocks in range(1, 12)
    for tiles in range(blocks, 4 * blocks + 3)
    for key_tiles in (1, 2, 3, 7, 11)
]
LAUNCHES += [
    (2048, 147, 132),
    (1366, 26, 132),
    (133, 1, 132),
    (264, 5, 132),
    (263, 5, 132),
    (265, 5, 132),
    (7000, 32768, 132),
]
GANGS = (2, 5, 7, 3), (3, 4, 5, 7), (4, 3, 11, 2), (7, 1, 3, 5)
"""Blocks of a gang, gangs, tiles of rows of each, key tiles."""


def test_every_key_tile_is_one_blocks_and_all_have_the_same_number():
    for tiles, key_tiles, blocks in LAUNCHES[:-1]:
        taken = shares(tiles, key_tiles, blocks)
        counts = [sum(last - first + 1 for _, first, last in pieces) for pieces in taken]
        assert max(counts) - min(counts) <= 1
        covered = sorted(piece for pieces in taken for piece in pieces)
        assert covered[0][:2] == (0, 0) and covered[-1] == (tiles - 1, covered[-1][1], key_tiles - 1)
        for (tile, _, last), (next_tile, first, _) in itertools.pairwise(covered):
            assert (next_tile, first) == ((tile, last + 1) if last < key_tiles - 1 else (tile + 1, 0))


def test_a_tile_is_two_neighbours_at_most_and_who_gives_has_not_waited_before():
    for tiles, key_tiles, blocks in LAUNCHES[:-1]:
        taken = shares(tiles, key_tiles, blocks)
        for block, pieces in enumerate(taken):
            gives = [i for i, (_, _, last) in enumerate(pieces) if last < key_tiles - 1]
            takes = [i for i, (_, first, _) in enumerate(pieces) if first > 0]
            assert len(gives) <= 1 and len(takes) <= 1 and not set(gives) & set(takes)
            assert not (gives and takes) or gives[0] < takes[0]
            for i in takes:  # the rest of the tile is the block's before
                tile, first, last = pieces[i]
                assert last == key_tiles - 1 and (tile, 0, first - 1) in taken[block - 1] and block > 0
            for i in gives:
                assert pieces[i][1] == 0 and block < blocks - 1


@pytest.mark.slow
def test_cuda_takes_the_same_shares():
    """`KeyShare` of every launch above by itself, and of some gangs, on the interpreter: [gang, blocks, pairs, rounds]
    of (index, range)."""
    header = (TEMPLATES / "flash_wgmma" / "key_share.cuh").read_text()
    source = (
        """constexpr bool IN_PARTS = false;
struct KeyParts {
  static __device__ int of(int tile) { return tile; }
  static __device__ int first_tile(int part) { return part; }
};
"""
        + header
        + """
extern "C" __global__ void k(int2* out, const int2* sizes, int pairs, int rounds) {
  const int i = threadIdx.x;
  if (i >= pairs) return;
  KeyShare share;
  out += ((blockIdx.x * gridDim.y + blockIdx.y) * pairs + i) * rounds;
  for (int round = 0; share.next(round, sizes[i].x, sizes[i].y); ++round)
    out[round] = make_int2(share.index, share.range.word);
}"""
    )
    ptx = ptx_kept(source, "sm_90a").ptx
    alone = [(1, blocks, list(group)) for blocks, group in itertools.groupby(LAUNCHES, lambda launch: launch[2])]
    gangs = [(gang, blocks, [(tiles, keys, blocks)]) for gang, blocks, tiles, keys in GANGS]
    for gang, blocks, group in alone + gangs:
        rounds = 3 + max(tiles // blocks for tiles, _, _ in group)
        out = np.full((gang, blocks, len(group), rounds, 2), -1, np.int32)
        sizes = np.array([(gang * tiles, key_tiles) for tiles, key_tiles, _ in group], np.int32)
        numbers = [np.int32(len(group)), np.int32(rounds)]
        given = {"out": out, "sizes": sizes}
        assert not run_launch(ptx, "k", (gang, blocks, 1), 256, ["out", "sizes", *numbers], given).faults
        for i, (tiles, key_tiles, _) in enumerate(group):
            expected = shares(tiles, key_tiles, blocks) if key_tiles < 1000 else None
            for member, block in itertools.product(range(gang), range(blocks)):
                taken = [(n, w & 0xFFFF, w >> 16 & 0x7FFF, w < 0) for n, w in out[member, block, i].tolist() if n >= 0]
                if expected is None:  # so many key tiles that a word and 31 bits of steps are nearly full
                    count = sum(last - first + 1 for _, first, last, _ in taken)
                    assert count - tiles * key_tiles // blocks in (0, 1)
                else:
                    of_gang = [(n * gang + member, first, last) for n, first, last in expected[block]]
                    assert taken == [(*piece, piece[2] < key_tiles - 1) for piece in of_gang], (group[i], block)


class Twice:
    """The family, but every call launches its kernel twice: the second one starts from what the first one left."""

    def __init__(self, family) -> None:
        self.family = family

    def workspace(self, problem, config, gpu):
        return self.family.workspace(problem, config, gpu)

    def launches(self, problem, config, gpu):
        return self.family.launches(problem, config, gpu) * 2

    def unordered(self, problem, config):
        return self.family.unordered(problem, config)


SMALL = {"SCHEDULE": "balanced", "BLOCKS_PER_SM": 1, "STAGES": 1}
TWO, SEVERAL = {"BLOCK_M": 128, "PRODUCER": "warpgroup"}, {"BLOCK_M": 192, "PRODUCER": "warpgroup"}


ROWS, HELD, TURNS = {"STORE": "rows"}, {"Q_IN_REGISTERS": True}, TWO | {"PING_PONG": True}
HANDED_OVER = [  # sizes, inputs, SMs, blocks of a gang and gangs, genes
    ((1, 3, 1, 131, 333, 64, "bf16"), "plain", 4, (1, 4), ROWS | {"BLOCK_N": 64, "OVERLAP": False}),
    ((2, 2, 2, 65, 150, 128, "fp16"), "rising_maximum", 5, (1, 5), ROWS | HELD | {"RESCALE": "lazy_5"}),
    ((1, 2, 1, 259, 200, 64, "fp16"), "large_logits", 4, (1, 4), {**TURNS, "STAGES": 2, "RESCALE": "lazy_8"}),
    (
        (1, 3, 3, 200, 130, 128, "bf16"),
        "large_logits",
        5,
        (1, 5),
        {**TWO, **HELD, "RESCALE": "lazy_after", "TILE_ORDER": "all_heads"},
    ),
    (
        (1, 6, 2, 193, 113, 64, "bf16"),
        "plain",
        10,
        (1, 10),
        {**SEVERAL, **ROWS, "RESCALE": "lazy_after", "PING_PONG": True},
    ),
    ((1, 4, 4, 131, 333, 64, "bf16"), "plain", 9, (3, 3), ROWS | {"BLOCK_N": 64}),
    ((1, 15, 5, 65, 150, 128, "fp16"), "plain", 13, (6, 2), HELD | {"RESCALE": "lazy_5"}),
    ((1, 12, 12, 140, 113, 64, "bf16"), "plain", 17, (8, 2), TURNS | {"TILE_ORDER": "heads_4"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "kind", "sm_count", "blocks", "genes"), HANDED_OVER)
@pytest.mark.sampled(2)
def test_blocks_hand_their_results_over(sizes, kind, sm_count, blocks, genes):
    """On the interpreter, launch after launch: right answers and log-sum-exps, no race, and counters that every launch
    leaves at zero. Blocks of the fifth case are more than run together."""
    gang, gangs = blocks
    gpu = replace(H100, sm_count=sm_count, l2_bytes=H100.l2_bytes if gang == 1 else 1000)
    p, c = AttentionProblem(*sizes, lse=True), config(**SMALL | {"BLOCK_N": 48} | genes)
    assert FAMILY.why_invalid(p, c, gpu) is None
    (launch,) = FAMILY.launches(p, c, gpu)
    assert launch.grid == (gang, gangs, 1)
    units = p.heads * p.batch * -(-p.seqlen_q // c["BLOCK_M"]) // gang
    assert any(first for taken in shares(units, -(-p.seqlen_k // c["BLOCK_N"]), gangs) for _, first, _ in taken)
    results = gang * gangs * warpgroups(FlashWgmmaGenes.of(c))
    assert sorted(FAMILY.workspace(p, c, gpu).values()) == [4 * results, results * result_bytes(p)]
    result = judged(replace(built(FAMILY, p, c, gpu), family=Twice(FAMILY)), p, kind, seed=3)
    assert result.passed, result.reason


@pytest.mark.slow
@pytest.mark.parametrize("sm_count", [1, 3, 14, 16, 60, 78, 114, 132])
@pytest.mark.sampled(3)
def test_all_blocks_that_may_wait_are_resident(sm_count):
    """Whatever the number of SMs (114 of an H100 PCIe, 14 to 60 of its MIG slices): a persistent grid fits on them at
    once."""
    gpu, space = replace(H100, sm_count=sm_count), load_space("flash_wgmma", H100)
    space = space.restricted({"SCHEDULE": ("balanced", "fixed", "claimed")})
    seen = set()
    for head_dim in (64, 96, 128, 256):
        p = AttentionProblem(1, 7, 7, 4000, 3000, head_dim)
        pool = ConfigPool(
            {"flash_wgmma": space},
            lambda name, params, p=p: FAMILY.why_invalid(p, KernelConfig(name, params), gpu),
            random.Random(sm_count),
        )
        for _ in range(16):
            c = KernelConfig(*pool.draw())
            (launch,) = FAMILY.launches(p, c, gpu)
            resident = H100.blocks_resident(
                registers_at_launch(FlashWgmmaGenes.of(c)), launch.threads, launch.smem_bytes
            )
            assert 0 < math.prod(launch.grid) <= sm_count * resident, c.describe()
            seen.add((c["SCHEDULE"], c["BLOCKS_PER_SM"]))
    assert sm_count == 1 or {("balanced", 1), ("balanced", 2)} <= seen  # of one SM all waves are whole


PACKED = parse_shape(
    "B=5,H=8/2,Sq=70,Sk=500,D=64,dtype=bf16,mask=causal_lower_right,layout=bshd,page=16,lse=1,"
    "varlen=1+70+1+0+3/500+70+300+100+64"
)
SHARED = {"SCHEDULE": "balanced", "BLOCK_N": 64, "BLOCKS_PER_SM": 1, "STORE": "rows", "GROUP_ROWS": True}
SEQUENCES = {
    "pages": (13, {}, {}),
    "a window, begun ahead": (9, {"window": "99:0"}, {"Q_IN_REGISTERS": True, "RESCALE": "lazy_5"}),
    "two warpgroups, no pages": (6, {"page": 0}, TWO | {"RESCALE": "lazy_after"}),
    "all keys, heads of their own": (5, {"mask": "full", "page": 0, "kv_heads": 8}, {"GROUP_ROWS": False}),
}


def of_sequences(name: str, *edits) -> str:
    """What the interpreter finds in the kernel with these edits, launched twice; empty for a right one."""
    sm_count, changes, genes = SEQUENCES[name]
    gpu, p, c = replace(H100, sm_count=sm_count), PACKED.with_(**changes), config(**SHARED | genes)
    assert FAMILY.why_impossible(p, c, gpu) is None
    result = judged(replace(built(FAMILY, p, c, gpu, *edits), family=Twice(FAMILY)), p, seed=3)
    return "" if result.passed else result.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.sampled(2)
def test_blocks_share_the_keys_of_packed_sequences(name):
    assert of_sequences(name) == ""


REFUSED_OF = [
    (AttentionProblem(1, 8, 4, 64 * 66, 4000, 64), {"SCHEDULE": "balanced"}, "whole waves"),
    (
        AttentionProblem(1, 32, 4, 4000, 48 * 32768 + 1, 64),
        {"SCHEDULE": "balanced", "BLOCK_N": 48},
        "at most 32768 tiles",
    ),
    (PACKED, SHARED | TWO | {"CAUSAL_SKIP": True}, "passes over"),
    (PACKED.with_(batch=1, seqlen_q=1 << 19, seqlen_k=1 << 19, varlen=f"sum:{1 << 19}"), SHARED, "32768"),
]


def grid_of(shape: str, gpu=H100, **genes) -> tuple[int, int]:
    c = config(**{"SCHEDULE": "balanced", "BLOCKS_PER_SM": 1, "BLOCK_M": 128, "PRODUCER": "warpgroup"} | genes)
    gang, gangs, one = grid(parse_shape(shape), FlashWgmmaGenes.of(c), gpu)
    assert one == 1
    return gangs, gang


FEW_ROWS = "B=5,H=12,Sq=494,Sk=6272,D=96,dtype=bf16"  # 289 MB of K and V


def test_a_gang_has_a_block_for_each_tile_of_rows_that_shares_keys():
    assert grid_of(FEW_ROWS) == (33, 4)
    assert grid_of(FEW_ROWS, BLOCK_M=192) == (44, 3)
    assert grid_of(FEW_ROWS, TILE_ORDER="heads_4") == (8, 16)
    assert grid_of(FEW_ROWS, TILE_ORDER="all_heads") == (132, 1), "no two neighbours share keys"
    assert grid_of("B=18,H=16/2,Sq=1,Sk=61043,D=128", BLOCK_M=64) == (16, 8), "the heads of a group"
    assert grid_of("B=18,H=16/2,Sq=1,Sk=61043,D=128", BLOCK_M=64, GROUP_ROWS=True) == (35, 1)


def test_heads_whose_rows_share_lines_of_memory_are_a_gang():
    shape = "B=7,H=32,Sq=1,Sk=12864,D=80,layout={}"
    assert grid_of(shape.format("bshd")) == (4, 32)
    assert grid_of(shape.format("bhsd")) == (132, 1)
    assert grid_of(shape.format("bshd").replace("D=80", "D=64")) == (132, 1)


def test_there_are_no_gangs_where_l2_holds_the_keys():
    assert grid_of(FEW_ROWS.replace("6272", "448")) == (132, 1)
    assert grid_of(FEW_ROWS, replace(H100, l2_bytes=10**9)) == (132, 1)
    long = "B=4,H=16,S=16384,D=128"  # of 537 MB only what the last tiles of rows read
    assert grid_of(long) == (132, 1)
    behind = TilesInOrder(144, 112 * 10**6, 3)  # tiles that share keys begin 1/12 of a pass after one another
    assert behind.bytes_between(132) == 112 * 10**6 // 6 and behind.gang(132, H100.l2_bytes) == 1


def test_a_gang_leaves_few_places_empty():
    for slots, count, sharing, turn in itertools.product(
        (78, 114, 132, 264), (150, 300, 336, 1000), range(1, 90), (1, 4)
    ):
        order = TilesInOrder(count, 10**12, sharing, turn)
        gang = order.gang(slots, H100.l2_bytes)
        assert gang * (slots // gang) >= slots * 5 / 6 and count % gang == sharing % gang == 0
        assert gang == 1 or (count > slots and gang % turn == 0 and gang > turn)
    assert TilesInOrder(4 * 67, 10**12, 67).gang(132, H100.l2_bytes) == 1, "one gang of 67"
    assert [TilesInOrder(8 * n, 10**12, 8).gang(132, H100.l2_bytes) for n in (22, 190)] == [8, 4], "of 132 places four"
    assert TilesInOrder(4 * 84, 10**12, 84).gang(132, H100.l2_bytes) == 42


def tile_at(index, blocks, heads, turn, last_first):
    """`tile_at` of templates/device/schedule/tile_order.cuh: (row block, head)."""
    size = turn or heads
    first = index // (size * blocks) * size
    inside, taking = index - first * blocks, min(size, heads - first)
    return (blocks - 1 - inside // taking if last_first else inside // taking), first + inside % taking


def steps_of(problem, rows, keys, per_query, row_block, batch):
    """Tiles of keys of a tile of rows; None where there is none."""
    seqlen_q, seqlen_k = problem.sequences[batch]
    if problem.varlen:
        begins = starts(tuple(queries for queries, _ in problem.sequences))
        slots = [begin // rows + i for i, begin in enumerate(begins[:-1])]
        batch = max(i for i, slot in enumerate(slots) if slot <= row_block)
        seqlen_q, seqlen_k = problem.sequences[batch]
        row_block -= slots[batch]
    begin, end = row_block * rows // per_query, min(-(-(row_block + 1) * rows // per_query), seqlen_q)
    if begin >= seqlen_q:
        return None
    seen = problem.masking.band(seqlen_q, seqlen_k).keys(begin, end)
    return -(-seen.stop // keys) - seen.start // keys if seen else 0


SHAPES = {
    "packed, whole tiles": "B=4,H=16,S=1024,D=80,dtype=bf16,layout=bshd,varlen=1024:1024",
    "packed, causal": "B=7,H=6,S=900,D=64,dtype=bf16,layout=bshd,mask=causal_lower_right,varlen=1:900",
    "packed, a window": "B=5,H=9,S=1500,D=64,dtype=bf16,mask=causal_upper_left,window=200:0,varlen=log:20:1500",
    "keys in use": "B=9,H=8,Sq=300,Sk=4000,D=64,dtype=bf16,mask=causal_lower_right,seqused=300:4000",
    "keys in use, all keys": "B=40,H=8,Sq=130,Sk=2000,D=64,dtype=bf16,seqused=0:2000",
}


@pytest.mark.parametrize("turn", [0, 1, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_get_what_the_kernel_takes(name, turn):
    problem, rows, keys, blocks = parse_shape(SHAPES[name]), 128, 80, 24
    batches = 1 if problem.varlen else problem.batch
    heads, count = problem.heads * batches, row_blocks(problem, rows)
    got, tiles = [0] * blocks, [0] * blocks
    for index in range(count * heads):
        turn_of, place = divmod(index, blocks)
        block = blocks - 1 - place if problem.causal and turn_of % 2 else place
        row_block, head = tile_at(index, count, heads, turn, problem.causal)
        steps = steps_of(problem, rows, keys, 1, row_block, head * batches // heads)
        if steps is not None:
            got[block], tiles[block] = got[block] + steps, tiles[block] + 1
    found = DealtTiles(problem, rows, keys, 1, heads, turn).to(blocks, blocks // 2)
    assert found.steps == max(got) and found.tiles in {t for g, t in zip(got, tiles) if g == max(got)}
    assert found.steps_of_sm == max(got[i] + got[i + blocks // 2] for i in range(blocks // 2))


def test_one_tile_for_a_block_needs_no_dealing():
    problem = parse_shape(SHAPES["packed, whole tiles"])
    assert DealtTiles(problem, 128, 64, 1, 16, 0).to(1000, 100) is None


def test_rows_of_lists_have_no_order():
    """Of 24 heads with 64 tiles of rows each, most of which see twice the mean, some block of 132 gets much more than
    the mean in either order; where rows are alike none does."""
    problem = parse_shape("B=1,H=24,S=8192,D=128,dtype=bf16,blocks=128x128:1/32/64")
    mean = 24 * 64 * 33 / 132
    assert all(1.1 * mean < DealtTiles(problem, 128, 128, 1, 24, turn).to(132, 132).steps < 2 * mean for turn in (1, 0))
    even = parse_shape("B=1,H=24,S=8192,D=128,dtype=bf16,blocks=128x128:1/32/33")
    assert DealtTiles(even, 128, 64, 1, 24, 1).to(132, 132).steps == 12 * 66
