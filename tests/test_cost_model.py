"""The cost model's arithmetic: waves add up their latency, busy units add up over the blocks of an SM."""

from dataclasses import replace

import pytest

from evoattn.evaluation.cost_model import (
    BLOCK_CLOCKS,
    BUSY,
    CHAIN,
    LAUNCH_CLOCKS,
    Work,
    chain_clocks,
    relative_cost,
    unit_clocks,
)
from evoattn.model.gpu import GPUS
from evoattn.ptx import Counters

H100 = GPUS["h100"]
EMPTY = Work(Counters(), Counters(), tiles=1.0, most_tiles=1, blocks=1, threads=128, smem_bytes=0, registers=32)
RESIDENT = H100.blocks_resident(EMPTY.registers, EMPTY.threads, EMPTY.smem_bytes)


def test_blocks_that_fit_at_once_wait_together_and_those_that_do_not_wait_in_turn():
    wave = H100.sm_count * RESIDENT
    for waves, blocks in ((1, 1), (1, wave), (2, wave + 1), (3, 3 * wave)):
        cost = relative_cost(replace(EMPTY, blocks=blocks), H100)
        assert cost == pytest.approx(waves * BLOCK_CLOCKS + LAUNCH_CLOCKS), (waves, blocks)


def test_a_block_that_fits_on_no_sm_has_no_cost():
    assert relative_cost(replace(EMPTY, smem_bytes=H100.smem_per_sm + 1), H100) is None


def test_busy_units_cost_every_block_and_the_longest_block_ends_the_last_wave():
    tile = Counters(special=10.0, shared_wavefronts=20.0, barriers=2.0)
    work = replace(EMPTY, tile=tile, tiles=3.0, most_tiles=5, blocks=2 * H100.sm_count)
    warps = work.threads / 32
    busy = 3 * sum(BUSY[unit] * clocks for unit, clocks in unit_clocks(tile, H100).items())
    longest = 5 * sum(CHAIN[name] * clocks for name, clocks in chain_clocks(tile, warps, H100).items())
    assert relative_cost(work, H100) == pytest.approx(2 * busy + longest + BLOCK_CLOCKS + LAUNCH_CLOCKS)


def test_unit_clocks_follow_the_rates_of_the_gpu():
    counts = Counters(fp32=64.0, special=32.0, int_ops=8.0, issue_slots=40.0, shared_wavefronts=5.0, barriers=3.0)
    clocks = unit_clocks(counts, H100)
    assert clocks == {
        "issue": 10.0,
        "fp32": 64 * 32 / H100.fp32_lanes,
        "int": 4.0,
        "special": 32 * 32 / H100.exp2_per_clock,
        "shared": 5.0,
        "barriers": 3.0,
    }
