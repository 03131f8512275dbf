"""Constants are fitted, problems left out, and kernels chosen that together lose least."""

import numpy as np
import pytest

from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import parse_shape
from evoattn.portfolio.cover import UNSERVED, choose, fit, fit_source, judge, usual
from evoattn.portfolio.work import Tiles, Work, predicted_us, tiles_of, work_of

GPU = GPUS["h100"]


def test_constants_that_made_the_times_are_found():
    rng = np.random.default_rng(0)
    work = rng.uniform(1, 50, (12, 7))
    constants = np.array([2.0, 0.5, 0.1, 0.0, 1.0, 0.03, 0.0])
    us = work @ constants
    assert fit(work, us) == pytest.approx(constants, abs=1e-6)
    assert fit(work, us, usual(work, us)) == pytest.approx(constants, abs=1e-6)


def test_what_few_times_say_nothing_of_is_as_is_usual():
    rng = np.random.default_rng(1)
    family = rng.uniform(1, 50, (200, 3))
    prior = usual(family, family @ np.array([1.0, 2.0, 3.0]))
    work = np.array([[10.0, 0.0, 0.0], [20.0, 0.0, 0.0]])  # its two times hold nothing of the other terms
    constants = fit(work, work @ np.array([4.0, 0.0, 0.0]), prior)
    assert constants[1:] == pytest.approx([2.0, 3.0], rel=0.05)
    assert 3.0 < constants[0] <= 4.0


def test_a_source_is_fitted_over_all_its_variants_but_the_problem_left_out():
    rng = np.random.default_rng(2)
    work = rng.uniform(1, 50, (2, 6, 3))
    constants = np.array([1.0, 2.0, 0.5])
    us = (work @ constants).T
    prior = usual(work.reshape(-1, 3), us.T.reshape(-1))
    wrong = us.copy()
    wrong[3] *= 0.1
    assert fit_source(work, us, prior) == pytest.approx(constants)
    assert fit_source(work, wrong, prior, without=3) == pytest.approx(constants)
    assert fit_source(work, wrong, prior) != pytest.approx(constants, rel=0.1)
    assert fit_source(work, np.full((6, 2), np.nan), prior) is prior.constants


def test_the_chosen_kernels_cover_what_one_cannot():
    us = np.array([[1.0, 3.0, 1.5], [3.0, 1.0, 1.5], [1.0, 3.0, 1.5]])
    columns, judged = choose(us, us, [[0], [1], [2]])
    assert set(columns) == {0, 1} and judged.worst == 1.0
    assert len(choose(us, us, [[0], [1], [2]], most=1)[0]) == 1
    assert judge(np.array([[np.nan, 2.0]]), np.array([[1.0, 2.0]]), [0]).regrets[0] == UNSERVED


def test_variants_of_one_source_come_together():
    us = np.array([[1.0, 2.0, 2.0], [2.0, 1.0, 2.0], [2.0, 2.0, 1.0]])
    units, judged = choose(us, us, [[0, 1], [2]], most=1)
    assert units == [0] and judged.worst == 2.0
    assert set(choose(us, us, [[0, 1], [2]])[0]) == {0, 1}


def test_blocks_and_steps_of_a_config():
    full = parse_shape("B=2,H=8,S=1000,D=64,dtype=bf16,mask=full")
    config = {"BLOCK_M": 128, "BLOCK_N": 64, "SCHEDULE": "single", "KEY_SPLIT": 1, "BLOCKS_PER_SM": 1}
    tiles = tiles_of("flash_wgmma", config, full)
    assert (tiles.blocks, tiles.mean, tiles.longest) == (8 * 16, 16, 16)
    causal = tiles_of("flash_wgmma", config, full.with_(mask="causal_upper_left"))
    assert causal.longest == 16 and 8 < causal.mean < 10
    decode = parse_shape("B=2,H=8,Hkv=2,Sq=1,Sk=5000,D=64,dtype=bf16,mask=full")
    heads_as_rows = config | {"BLOCK_M": 64, "GROUP_ROWS": True}
    assert tiles_of("flash_wgmma", heads_as_rows, decode) == Tiles(2 * 2, 79, 79)
    assert tiles_of("flash_wgmma", heads_as_rows, decode.with_(seqlen_q=20)).blocks == 2 * 2 * 2
    assert tiles_of("flash_wgmma", heads_as_rows, decode.with_(heads=200)).blocks == 2 * 2 * 2
    split = {"BLOCK_M": 8, "BLOCK_N": 64, "SPLITS": 4, "MERGE": "kernel"}
    assert tiles_of("split_kv", split, decode).blocks == 2 * 2 * 4
    seen = tiles_of("split_kv", split, decode.with_(window="127:0"))
    assert (seen.blocks, seen.longest) == (2 * 2 * 2, 1), "128 keys, of which a split takes 64"


def test_more_work_is_more_time():
    config = {"BLOCK_M": 64, "BLOCK_N": 64, "SCHEDULE": "single", "KEY_SPLIT": 1, "BLOCKS_PER_SM": 2}
    constants = (1.0, 0.5, 0.2, 0.1, 1.0, 0.01, 0.01, 2.0, 0.1, 1.0, 1.0, 0.1)
    shape = parse_shape("B=1,H=4,S=512,D=64,dtype=bf16,mask=full")
    times = [
        predicted_us(constants, work_of("flash_wgmma", config, 2, shape.with_(batch=b), GPU)) for b in (1, 4, 16, 64)
    ]
    assert times == sorted(times)
    assert len(constants) == len(Work._fields)


def test_splits_cost_a_merge():
    shape = parse_shape("B=1,H=8,Sq=1,Sk=4096,D=64,dtype=bf16,mask=full")
    config = {"BLOCK_M": 8, "BLOCK_N": 64, "MERGE": "kernel"}
    one, four = (work_of("split_kv", config | {"SPLITS": n}, 2, shape, GPU) for n in (1, 4))
    assert (one.merge, one.splits, one.partial) == (0, 0, 0)
    assert (four.merge, four.splits) == (1, 4)
    assert four.partial == pytest.approx(4 * 8 * (64 + 2) * 4 / GPU.dram_gb_per_s / 1e3)
    assert four.longest < one.longest and four.out == one.out
