"""A group of the portfolio's file is made of measured and of imagined problems."""

from dataclasses import replace

import numpy as np
import pytest

from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.portfolio.engine.kernel import Kernel
from evoattn.portfolio.fit import Table, View
from evoattn.portfolio.measured import Imagined, Measured, imagine, one_speed, usual_of_plain, without_stumbles
from scripts.portfolio_build import UNTIMED, build_group, covers, left_out_regrets, presumed, said

FEW, MANY = 3, 40
CONSTANTS = np.array([[1.0, 4.0], [4.0, 1.0]])
"""The first kernel is the faster one where the first term counts for more."""


def measured(few=FEW, imagined_few=10):
    """`many` problems that the first kernel suits, and `few` that the second does."""
    rng = np.random.default_rng(0)
    suits_second = np.array([False] * MANY + [True] * few + [True] * imagined_few + [False] * 10)
    large, small = rng.uniform(5, 20, len(suits_second)), rng.uniform(1, 4, len(suits_second))
    work = np.stack([np.where(suits_second, small, large), np.where(suits_second, large, small)], axis=1)
    work = np.stack([work, work])
    us = np.einsum("kpt,kt->pk", work, CONSTANTS)
    scaled, count = rng.normal(size=(len(us), 3)), MANY + few
    sizes = ["few" if second else "many" for second in suits_second]
    kernels = [Kernel("flash_mma", {"BLOCK_M": m}) for m in (64, 128)]
    table = Table(us[:count], work[:, :count], scaled[:count], ["flash_mma"] * 2, [[0], [1]])
    others = Imagined(sizes[count:], work[:, count:], scaled[count:], np.ones((len(us) - count, 2), dtype=bool))
    return Measured(kernels, [1, 2], sizes[:count], table, np.ones((count, 2), dtype=bool), others)


def test_each_class_has_the_kernel_that_suits_it():
    m = measured()
    row = build_group(m, left_out_regrets(m))
    resident = {
        size: row["kernels"][row["classes"][size]["kernels"][0]]["resident"] for size in ("few", "many")
    }  # which kernel it is
    assert resident == {"many": 1, "few": 2}
    assert row["classes"]["few"]["problems"] == FEW and row["classes"]["many"]["problems"] == MANY
    assert row["classes"]["many"]["regret"] == pytest.approx(1.0, abs=0.01)
    assert len(row["points"]) and len(row["kernels"][0]["errors"][0]) == len(row["points"])


def test_a_kind_that_nobody_measured_has_its_kernel_by_imagined_problems():
    m = measured(few=0)
    assert 1 in covers(m, m.timed)[1]["few"]


def test_a_kernel_that_is_younger_than_a_table_counts_as_predicted_but_never_as_the_best():
    m = measured()
    m.table.us[0] = [np.nan, 5.0]
    known = np.array([[4.0, 5.0]])
    assert presumed(m, [0], known)[0] == pytest.approx([5.0 * np.exp(UNTIMED), 5.0])
    known = np.array([[7.0, 5.0]])
    assert presumed(m, [0], known)[0] == pytest.approx([7.0 * np.exp(UNTIMED), 5.0])
    m.served[0, 0] = False
    assert np.isnan(presumed(m, [0], known)[0, 0]) and presumed(m, [0], known)[0, 1] == 5.0


def test_a_pick_that_was_not_timed_is_not_judged():
    m = measured()
    assert not np.isnan(left_out_regrets(m)).any()
    m.table.us[0, 0] = np.nan  # which suits it
    assert np.isnan(left_out_regrets(m)[0])


def test_a_group_in_which_no_left_out_choice_was_timed_is_built_and_says_so():
    m = measured()
    unknown = np.full(len(m.timed), np.nan)
    assert "no choice was timed" in said("16 d64 full", unknown)
    classes = build_group(m, unknown)["classes"]
    assert all(row["regret"] is None and row["worst"] is None and row["kernels"] for row in classes.values())
    unknown[:] = 1.25
    assert "1.25" in said("16 d64 full", unknown)


def test_problems_that_were_measured_are_not_imagined():
    problems = [parse_shape(f"B={b},H=8,S=1024,D=64,dtype=bf16,mask=full") for b in range(1, 9)]
    config = {"BLOCK_M": 64, "BLOCK_N": 64, "WARPS": 4, "KEY_WARPS": 1, "STAGES": 2, "SCHEDULE": "split"}
    kernel = Kernel("flash_mma", config | dict(SMEM_LAYOUT="swizzled", Q_PLACE="registers", RESCALE="always"))
    kernel.params |= dict(ROW_SUM="shuffle", O_STORE="direct", BLOCK_ORDER="heads", BLOCKS_PER_SM=1)
    found = imagine(problems, set(problems[:3]), [kernel], [2], GPUS["h200"])
    assert len(found.sizes) == 5 == found.work.shape[1]


def test_times_of_another_card_are_brought_to_the_first_ones_speed():
    rng = np.random.default_rng(1)
    work = rng.uniform(1, 9, (2, 40, 2))
    us = np.einsum("kpt,kt->pk", work, CONSTANTS)
    slow = us.copy()
    slow[30:] *= 1.25
    assert one_speed(slow, work, ["h200"] * 30 + ["h100"] * 10) == pytest.approx(us, rel=1e-6)
    few = slow[1:], work[:, 1:], ["h200"] * 29 + ["h100"] * 10
    assert one_speed(*few) == pytest.approx(slow[1:]), "too few to tell"


def test_a_time_that_no_other_of_its_kernel_is_like_is_none():
    rng = np.random.default_rng(1)
    work = rng.uniform(1, 9, (2, 12, 2))
    us = np.einsum("kpt,kt->pk", work, CONSTANTS)
    us[3, 1] = np.nan
    late = us.copy()
    late[5, 0] *= 40
    found = without_stumbles(late, work)
    assert np.isnan(found[5, 0]) and np.isnan(found[3, 1]) and np.isnan(found).sum() == 2
    late[5, 0] /= 10
    assert without_stumbles(late, work) == pytest.approx(late, nan_ok=True), "a slow one is"


def test_a_choice_is_judged_by_what_it_sees():
    m = measured()
    m = replace(m, sizes=["many"] * len(m.sizes), imagined=replace(m.imagined, sizes=["many"] * len(m.imagined.sizes)))
    seen = View(m.table.work[:, :, ::-1], m.table.scaled)  # which mistakes each problem for one of the other kind
    blind = replace(m, table=replace(m.table, seen=[seen]))
    assert left_out_regrets(m) == pytest.approx(np.ones(MANY + FEW))
    assert left_out_regrets(blind).max() > 1.5


def test_what_is_usual_is_of_both_masks_and_of_a_head_dim():
    few, many = measured(few=1), measured(few=20)
    found = usual_of_plain({"16 d64 full": few, "16 d64 causal": many, "16 d128 full": few})
    assert set(found) == {"16 d64", "16 d128"} and set(found["16 d64"]) == {"flash_mma"}
    assert found["16 d64"]["flash_mma"].constants != pytest.approx(found["16 d128"]["flash_mma"].constants, rel=1e-3)
