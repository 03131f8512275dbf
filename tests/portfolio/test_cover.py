"""Constants are fitted, problems left out, and kernels chosen that together lose least."""

import numpy as np
import pytest

from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import parse_shape
from evoattn.portfolio.cover import UNSERVED, choose, fit, judge, predictions_left_out
from evoattn.portfolio.work import Work, predicted_us, tiles_of, work_of

GPU = GPUS["h100"]


def test_constants_that_made_the_times_are_found():
    rng = np.random.default_rng(0)
    work = rng.uniform(1, 50, (12, 7))
    constants = np.array([2.0, 0.5, 0.1, 0.0, 1.0, 0.03, 0.0])
    assert fit(work, work @ constants) == pytest.approx(constants, abs=1e-6)
    us = np.column_stack([work @ constants, np.full(12, np.nan)])
    predicted = predictions_left_out([work, work], us)
    assert predicted[:, 0] == pytest.approx(us[:, 0])
    assert np.isnan(predicted[:, 1]).all()


def test_the_chosen_kernels_cover_what_one_cannot():
    us = np.array([[1.0, 3.0, 1.5], [3.0, 1.0, 1.5], [1.0, 3.0, 1.5]])
    columns, judged = choose(us, us, ["a", "b", "c"])
    assert set(columns) == {0, 1} and judged.worst == 1.0
    columns, judged = choose(us, us, ["a", "b", "c"], most=1)
    assert columns == [0] or judged.geomean < 1.6
    assert judge(np.array([[np.nan, 2.0]]), np.array([[1.0, 2.0]]), [0]).regrets[0] == UNSERVED


def test_variants_of_one_source_take_one_place():
    us = np.array([[1.0, 2.0, 2.0], [2.0, 1.0, 2.0], [2.0, 2.0, 1.0]])
    columns, judged = choose(us, us, ["same", "same", "other"], most=1)
    assert set(columns) <= {0, 1} and judged.worst == 2.0
    assert set(choose(us, us, ["same", "same", "same"], most=1)[0]) == {0, 1, 2}


def test_blocks_and_steps_of_a_config():
    full = parse_shape("B=2,H=8,S=1000,D=64,dtype=bf16,mask=full")
    config = {"BLOCK_M": 128, "BLOCK_N": 64, "SCHEDULE": "single", "KEY_SPLIT": 1, "BLOCKS_PER_SM": 1}
    tiles = tiles_of("flash_wgmma", config, full)
    assert (tiles.blocks, tiles.mean, tiles.longest) == (8 * 16, 16, 16)
    causal = tiles_of("flash_wgmma", config, full.with_(mask="causal_upper_left"))
    assert causal.longest == 16 and 8 < causal.mean < 10
    decode = parse_shape("B=2,H=8,Hkv=2,Sq=1,Sk=5000,D=64,dtype=bf16,mask=full")
    split = {"BLOCK_M": 8, "BLOCK_N": 64, "SPLITS": 4, "MERGE": "kernel"}
    assert tiles_of("split_kv", split, decode).blocks == 2 * 2 * 4


def test_more_work_is_more_time():
    config = {"BLOCK_M": 64, "BLOCK_N": 64, "SCHEDULE": "single", "KEY_SPLIT": 1, "BLOCKS_PER_SM": 2}
    constants = (1.0, 0.5, 0.2, 0.1, 1.0, 0.01, 0.01)
    shape = parse_shape("B=1,H=4,S=512,D=64,dtype=bf16,mask=full")
    times = [
        predicted_us(constants, work_of("flash_wgmma", config, 2, shape.with_(batch=b), GPU)) for b in (1, 4, 16, 64)
    ]
    assert times == sorted(times)
    assert len(constants) == len(Work.__dataclass_fields__)
