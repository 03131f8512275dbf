"""Gangs of a balanced schedule: how many blocks they have, that those keep step, and kernels with gangs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from evoattn.families.flash_wgmma.genes import FlashWgmmaGenes
from evoattn.families.flash_wgmma.registers import warpgroups
from evoattn.families.flash_wgmma.resources import grid, result_bytes
from evoattn.families.gangs import TilesInOrder
from evoattn.model.gpu import GPUS
from evoattn.model.paths import TEMPLATES
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape
from evoattn.ptx import run_launch
from tests.families.on_interpreter import built, judged
from tests.families.test_flash_wgmma import FAMILY, config
from tests.families.test_flash_wgmma_balanced import SMALL, Twice, shares
from tests.support.compiles import ptx_kept

H100 = GPUS["h100"]


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


@pytest.mark.slow
def test_blocks_of_a_gang_take_the_same_key_tiles_of_neighbouring_tiles_of_rows():
    """`KeyShare` on the interpreter: [gang, gangs, rounds] of (index, range)."""
    header = (TEMPLATES / "device" / "schedule" / "key_share.cuh").read_text()
    source = (
        header
        + """
extern "C" __global__ void k(int2* out, int tiles, int key_tiles, int rounds) {
  KeyShare share;
  out += (blockIdx.x * gridDim.y + blockIdx.y) * rounds;
  for (int round = 0; share.next(round, tiles, key_tiles); ++round)
    out[round] = make_int2(share.index, share.range.word);
}"""
    )
    ptx = ptx_kept(source, "sm_90a").ptx
    for gang, gangs, units, key_tiles in ((2, 5, 7, 3), (3, 4, 5, 7), (4, 3, 11, 2), (7, 1, 3, 5)):
        expected, rounds = shares(units, key_tiles, gangs), 3 + units // gangs
        out = np.full((gang, gangs, rounds, 2), -1, np.int32)
        numbers = [np.int32(n) for n in (gang * units, key_tiles, rounds)]
        assert not run_launch(ptx, "k", (gang, gangs, 1), 1, ["out", *numbers], {"out": out}).faults
        for member, block in itertools.product(range(gang), range(gangs)):
            pieces = [(i, word & 0xFFFF, word >> 16 & 0x7FFF) for i, word in out[member, block].tolist() if i >= 0]
            assert pieces == [(unit * gang + member, first, last) for unit, first, last in expected[block]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "sm_count", "gangs", "genes"),
    [
        ((1, 4, 4, 131, 333, 64, "bf16"), 9, (3, 3), {"BLOCK_N": 64, "STORE": "rows"}),
        ((1, 15, 5, 65, 150, 128, "fp16"), 13, (2, 6), {"BLOCK_N": 48, "RESCALE": "lazy_5", "Q_IN_REGISTERS": True}),
        (
            (1, 12, 12, 140, 113, 64, "bf16"),
            17,
            (2, 8),
            {"BLOCK_M": 128, "PRODUCER": "warpgroup", "BLOCK_N": 48, "TILE_ORDER": "heads_4", "PING_PONG": True},
        ),
    ],
)
def test_blocks_of_gangs_hand_their_results_over(sizes, sm_count, gangs, genes):
    """On the interpreter, twice: right answers, no race, and counters that every launch leaves at zero."""
    gpu = replace(H100, sm_count=sm_count, l2_bytes=1000)
    p, c = AttentionProblem(*sizes, lse=True), config(**SMALL | genes)
    assert FAMILY.why_invalid(p, c, gpu) is None
    (launch,) = FAMILY.launches(p, c, gpu)
    assert launch.grid == (gangs[1], gangs[0], 1)
    units = p.heads * p.batch * -(-p.seqlen_q // c["BLOCK_M"]) // gangs[1]
    assert any(first for pieces in shares(units, -(-p.seqlen_k // c["BLOCK_N"]), gangs[0]) for _, first, _ in pieces)
    results = math.prod(gangs) * warpgroups(FlashWgmmaGenes.of(c))
    assert sorted(FAMILY.workspace(p, c, gpu).values()) == [4 * results, results * result_bytes(p)]
    result = judged(replace(built(FAMILY, p, c, gpu), family=Twice(FAMILY)), p, seed=3)
    assert result.passed, result.reason
