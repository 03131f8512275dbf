"""flash_wgmma with SCHEDULE=balanced: who takes which key tiles, in Python and in CUDA, and kernels whose blocks hand
results over."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from evoattn.families.flash_wgmma.genes import FlashWgmmaGenes
from evoattn.families.flash_wgmma.registers import registers_at_launch
from evoattn.families.flash_wgmma.resources import grid
from evoattn.model.gpu import GPUS
from evoattn.model.paths import TEMPLATES
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, load_space
from evoattn.ptx import run_launch
from evoattn.samplers.pool import ConfigPool
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
    """`KeyShare` of every launch above by itself, on the interpreter: [pairs, rounds] of (index, range) a block."""
    header = (TEMPLATES / "device" / "schedule" / "key_share.cuh").read_text()
    source = (
        header
        + """
// out [blocks, pairs, rounds]
extern "C" __global__ void k(int2* out, const int2* sizes, int pairs, int rounds) {
  const int i = threadIdx.x;
  if (i >= pairs) return;
  KeyShare share;
  out += (blockIdx.y * pairs + i) * rounds;
  for (int round = 0; share.next(round, sizes[i].x, sizes[i].y); ++round)
    out[round] = make_int2(share.index, share.range.word);
}"""
    )
    ptx = ptx_kept(source, "sm_90a").ptx
    for blocks, group in itertools.groupby(LAUNCHES, lambda launch: launch[2]):
        group = list(group)
        taken = [shares(*launch) if launch[1] < 1000 else None for launch in group]
        rounds = 2 + max(tiles // blocks for tiles, _, _ in group)
        out, sizes = (
            np.full((blocks, len(group), rounds, 2), -1, np.int32),
            np.array([launch[:2] for launch in group], np.int32),
        )
        numbers = [np.int32(len(group)), np.int32(rounds)]
        execution = run_launch(ptx, "k", (1, blocks, 1), 256, ["out", "sizes", *numbers], {"out": out, "sizes": sizes})
        assert not execution.faults
        for i, (launch, expected) in enumerate(zip(group, taken)):
            for block in range(blocks):
                pieces = [
                    (index, word & 0xFFFF, word >> 16 & 0x7FFF, word < 0)
                    for index, word in out[block, i].tolist()
                    if index >= 0
                ]
                key_tiles = launch[1]
                if expected is None:  # so many key tiles that a word and 31 bits of steps are nearly full
                    assert sum(last - first + 1 for _, first, last, _ in pieces) in (
                        launch[0] * key_tiles // blocks + n for n in (0, 1)
                    )
                else:
                    assert pieces == [(*piece, piece[2] < key_tiles - 1) for piece in expected[block]], (launch, block)


class Twice:
    """The family, but every call launches its kernel twice: the second one starts from what the first one left."""

    def __init__(self, family) -> None:
        self.family = family

    def workspace(self, problem, config, gpu):
        return self.family.workspace(problem, config, gpu)

    def launches(self, problem, config, gpu):
        return self.family.launches(problem, config, gpu) * 2


SMALL = {"SCHEDULE": "balanced", "BLOCKS_PER_SM": 1, "STAGES": 1}
TWO, SEVERAL = {"BLOCK_M": 128, "PRODUCER": "warpgroup"}, {"BLOCK_M": 192, "PRODUCER": "warpgroup"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "kind", "sm_count", "genes"),
    [
        ((1, 3, 1, 131, 333, 64, "bf16"), "plain", 4, {"BLOCK_N": 64, "OVERLAP": False, "STORE": "rows"}),
        (
            (2, 2, 2, 65, 150, 128, "fp16"),
            "rising_maximum",
            5,
            {"BLOCK_N": 48, "RESCALE": "lazy_5", "Q_IN_REGISTERS": True, "STORE": "rows"},
        ),
        (
            (1, 2, 1, 259, 200, 64, "fp16"),
            "large_logits",
            4,
            {**TWO, "BLOCK_N": 48, "STAGES": 2, "RESCALE": "lazy_8", "PING_PONG": True},
        ),
        (
            (1, 3, 3, 200, 130, 128, "bf16"),
            "large_logits",
            5,
            {**TWO, "BLOCK_N": 48, "RESCALE": "lazy_after", "Q_IN_REGISTERS": True, "TILE_ORDER": "all_heads"},
        ),
        (
            (1, 6, 2, 193, 113, 64, "bf16"),
            "plain",
            10,
            {**SEVERAL, "BLOCK_N": 48, "PING_PONG": True, "RESCALE": "lazy_after", "STORE": "rows"},
        ),
    ],
)
def test_blocks_hand_their_results_over(sizes, kind, sm_count, genes):
    """On the interpreter, launch after launch: right answers and log-sum-exps, no race, and counters that every launch
    leaves at zero. The blocks of the last case are more than run together."""
    gpu = replace(H100, sm_count=sm_count)
    p, c = AttentionProblem(*sizes, lse=True), config(**SMALL | genes)
    blocks, tiles = grid(p, FlashWgmmaGenes.of(c), gpu)[1], p.heads * p.batch * -(-p.seqlen_q // c["BLOCK_M"])
    key_tiles = -(-p.seqlen_k // c["BLOCK_N"])
    cut = [piece for pieces in shares(tiles, key_tiles, blocks) for piece in pieces if piece[1] > 0]
    assert cut and FAMILY.why_invalid(p, c, gpu) is None
    result = judged(replace(built(FAMILY, p, c, gpu), family=Twice(FAMILY)), p, kind, seed=3)
    assert result.passed, result.reason


@pytest.mark.slow
@pytest.mark.parametrize("sm_count", [1, 3, 14, 16, 60, 78, 114, 132])
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
        for _ in range(40):
            c = KernelConfig(*pool.draw())
            (launch,) = FAMILY.launches(p, c, gpu)
            resident = H100.blocks_resident(
                registers_at_launch(FlashWgmmaGenes.of(c)), launch.threads, launch.smem_bytes
            )
            assert 0 < math.prod(launch.grid) <= sm_count * resident, c.describe()
            seen.add((c["SCHEDULE"], c["BLOCKS_PER_SM"]))
    assert sm_count == 1 or {("balanced", 1), ("balanced", 2)} <= seen  # of one SM all waves are whole


@pytest.mark.parametrize(
    ("genes", "sizes", "word"),
    [
        ({}, {"mask": "causal_upper_left"}, "mask=full"),
        ({}, {"seqlen_q": 64 * 66, "heads": 8}, "whole waves"),
        ({}, {"heads": 4, "kv_heads": 4}, "one wave"),
        ({"KEY_SPLIT": 2}, {}, "single"),
        ({"BLOCK_N": 48}, {"seqlen_k": 48 * 32768 + 1}, "at most 32768 tiles"),
        ({}, {}, None),
        ({"BLOCK_N": 48, "BLOCKS_PER_SM": 1, "STAGES": 1}, {"head_dim": 192}, None),
        ({"BLOCK_N": 48, "BLOCKS_PER_SM": 1, "STAGES": 1}, {"head_dim": 256}, "registers"),
    ],
)
def test_refusals_of_a_balanced_schedule(genes, sizes, word):
    p = AttentionProblem(
        **{"batch": 1, "heads": 32, "kv_heads": 4, "seqlen_q": 4000, "seqlen_k": 4000, "head_dim": 64} | sizes
    )
    reason = FAMILY.why_invalid(p, config(SCHEDULE="balanced", **genes), H100)
    assert reason is None if word is None else word in reason
