"""Waves add up their waits, busy units add up over the blocks of an SM, memory counts what L2 does not hold."""

from dataclasses import replace

import pytest

from evoattn.cost.physics import launch_terms
from evoattn.families.gangs import TilesInOrder
from evoattn.families.work import LaunchWork, Step, bank_conflicts
from evoattn.model.gpu import GPUS

H100 = GPUS["h100"]
WORK = LaunchWork("k", 1, 128, 4, 0, 128, Step(waits=100.0), 3.0, 3.0, Step(waits=1000.0))
RESIDENT = H100.blocks_resident(WORK.registers, WORK.threads, WORK.smem_bytes)


def terms(gpu=H100, **changes):
    return launch_terms(replace(WORK, **changes), gpu)


def test_blocks_that_fit_at_once_wait_together_and_those_that_do_not_wait_in_turn():
    wave = H100.sm_count * RESIDENT
    for waves, blocks in ((1, 1), (1, wave), (2, wave + 1), (3, 3 * wave)):
        found = terms(blocks=blocks)
        assert (found.chain, found.ends) == (waves * 300, waves * 1000), (waves, blocks)


@pytest.mark.parametrize(("size", "most"), [(1, 132), (2, 66), (4, 30), (8, 14)])
def test_clusters_leave_some_sms_idle(size, most):
    for resident in (1, 2):
        smem = H100.smem_per_sm // (resident + 1)
        found = [
            terms(blocks=clusters * size, cluster=size, smem_bytes=smem)
            for clusters in (most * resident, most * resident + 1)
        ]
        assert [t.chain for t in found] == [300, 600] and found[0].resident == resident
        assert found[0].waves == 1 < found[1].waves


def test_a_persistent_block_waits_once_beside_its_tiles():
    wave = H100.sm_count * RESIDENT
    assert terms(blocks=3 * wave, schedule="fixed", once_waits=500.0).ends == 3 * 1000 + 500


def test_a_block_that_fits_on_no_sm_has_no_time():
    assert terms(smem_bytes=H100.smem_per_sm + 1) is None


def test_busy_units_follow_the_rates_of_the_card_and_add_up_over_the_blocks_of_an_sm():
    step = Step(tensor_flops=4096.0, fp32=1280, special=160, instructions=40, shared_bytes=1280, loaded_bytes=280)
    one = terms(step=step, blocks=H100.sm_count).units
    assert one == {
        "tensor": pytest.approx(3 / H100.mma_sync_share),
        **dict.fromkeys(("fp32", "special", "issue", "shared", "l2"), 30),
    }
    assert terms(step=step, blocks=2 * H100.sm_count).units == {name: 2 * clocks for name, clocks in one.items()}
    assert terms(step=step, tensor="wgmma").tensor == 3, "wgmma has the whole rate"
    assert terms(GPUS["l4"], step=step, blocks=58).tensor == pytest.approx(3 * 4096 / 1024)


def test_warps_that_do_not_divide_over_the_schedulers_leave_some_idle():
    step = Step(special=160)
    assert terms(step=step, warps=1, threads=32).special == 4 * terms(step=step).special
    assert terms(step=step, warps=5).special == pytest.approx(8 / 5 * terms(step=step).special)


def test_a_longest_block_that_begins_first_ends_earlier():
    uneven = {"steps": 4.0, "most_steps": 8.0, "blocks": 20 * H100.sm_count * RESIDENT}
    assert terms(**uneven).chain > terms(**uneven, longest_first=True).chain > 20 * 4 * 100
    assert terms(**uneven, schedule="balanced").chain == 20 * 4 * 100
    few = uneven | {"blocks": H100.sm_count}
    assert terms(**few).chain == 8 * 100


def test_memory_counts_what_l2_does_not_hold():
    assert terms(read_bytes=0.5 * H100.l2_bytes).dram_bytes == 0
    assert terms(read_bytes=4.0 * H100.l2_bytes).dram_bytes == 4.0 * H100.l2_bytes
    assert terms(read_bytes=1.0 * H100.l2_bytes, write_bytes=1.0 * H100.l2_bytes).dram_bytes == 2.0 * H100.l2_bytes


def test_later_rows_of_blocks_find_k_and_v_in_l2_unless_all_heads_are_begun_in_turn():
    large = {"read_bytes": 4.0 * H100.l2_bytes, "sweep_bytes": 4.0 * H100.l2_bytes, "sweepers": 64.0, "visits": 64.0}
    blocks = 64 * 4 * RESIDENT * H100.sm_count
    by_head, by_row = (terms(**large, blocks=blocks, heads_in_turn=turn) for turn in (1.0, blocks / 64))
    assert by_head.dram_bytes == 4.0 * H100.l2_bytes
    assert by_row.dram_bytes == 64 * by_head.dram_bytes
    assert by_row.least_dram_bytes == by_head.dram_bytes, "what no order of the blocks saves"


def test_query_heads_that_follow_one_another_share_what_one_of_them_read():
    """Eight query heads of each K/V head, in turn, in eight rows of blocks."""
    large = {"read_bytes": 4.0 * H100.l2_bytes, "sweep_bytes": 4.0 * H100.l2_bytes, "sweepers": 64.0, "visits": 8.0}
    blocks = 64 * 4 * RESIDENT * H100.sm_count
    found = terms(**large, blocks=blocks, heads_in_turn=blocks / 64)
    assert found.dram_bytes == 8 * 4.0 * H100.l2_bytes
    windowed = terms(**large, blocks=blocks, heads_in_turn=blocks / 64, visit_share=1 / 8)
    assert windowed.dram_bytes == windowed.least_dram_bytes, "each row of blocks takes keys of its own"


def test_what_other_launches_move_drives_a_launch_s_bytes_out_of_l2_but_not_what_was_just_written():
    half = {"read_bytes": 0.5 * H100.l2_bytes, "scratch_bytes": 0.125 * H100.l2_bytes}
    assert terms(**half).dram_bytes == 0
    assert terms(**half, others_bytes=H100.l2_bytes).dram_bytes == 0.375 * H100.l2_bytes


def test_bank_conflicts():
    assert bank_conflicts(8, 128, 16) == 8, "eight lanes, all in the same four banks"
    assert bank_conflicts(8, 144, 16) == 1, "a padding of 16 bytes"
    assert bank_conflicts(32, 4, 4) == 1 and bank_conflicts(32, 8, 4) == 2 and bank_conflicts(1, 128, 4) == 1


def test_a_balanced_schedule_reads_keys_once_for_a_gang_and_again_for_each_tile_without():
    keys, tiles = 3 * H100.l2_bytes, H100.sm_count * RESIDENT * 3 // 2
    many = {"schedule": "balanced", "blocks": tiles, "sweepers": 4.0}
    assert terms(**many, order=TilesInOrder(tiles, keys, 4)).dram_bytes == 0, "a gang of four"
    assert terms(**many, order=TilesInOrder(tiles, keys, 1)).dram_bytes == 3 * keys
    assert terms(**many, order=TilesInOrder(tiles, H100.l2_bytes // 2, 1)).dram_bytes == 0


def test_places_that_gangs_leave_empty_do_nothing():
    slots, size = H100.sm_count * RESIDENT, 13
    assert slots % size
    order = TilesInOrder(slots // size * size * 3, 10**12, size)
    balanced = {"schedule": "balanced", "blocks": order.count}
    assert terms(**balanced).chain < terms(**balanced, order=order).chain == pytest.approx(3 * 300)


def test_tiles_that_run_at_once_have_no_gangs():
    tiles = H100.sm_count * RESIDENT
    order = TilesInOrder(tiles, 10**12, tiles)
    assert order.gang(tiles, H100.l2_bytes) == 1 < order.gang(tiles - 1, H100.l2_bytes)
    assert terms(schedule="balanced", blocks=tiles, order=order).chain == pytest.approx(3 * 100 * tiles / (tiles - 1))
