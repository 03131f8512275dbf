"""Campaigns in columns are read as they were written."""

import numpy as np
import pytest

from evoattn.cost import measurements
from evoattn.cost.measurements import Campaign
from evoattn.model.space import config_id


def kernel(block, times, rough=()):
    params = {"BLOCK_M": block}
    about = {"family": "flash_mma", "params": params, "id": config_id("flash_mma", params), "origin": "seed"}
    return about | {"state": "right", "registers": 90, "spill_bytes": 0, "times": times, "rough": list(rough)}


def made(name, us=5.25):
    kernels = [kernel(16, {"0": us, "1": 70000.125}, [1]), kernel(32, {}, [0])]
    final = {"kernels": [kernels[1]["id"]], "us": [[1 / 3], [None]], "peers": {"cudnn": [2.0, None]}}
    problems = [{"batch": 1}, {"batch": 2}]
    group = {"group": "16 d64 full", "problems": problems, "kernels": kernels, "final": final}
    bare = {"group": "32 d64 full", "problems": [], "kernels": [], "final": None}
    return Campaign(name, {"device": "a card", "saved": "2026-11-23"}, [group, bare])


def test_what_is_read_is_what_was_written(tmp_path):
    path = tmp_path / "card.npz"
    measurements.append(path, [made("b"), made("a")])
    assert measurements.read(path) == (made("a"), made("b")) and measurements.names(path) == ["a", "b"]
    with np.load(path, allow_pickle=False) as stored:
        assert stored["time ns"].max() == 70000125


def test_a_campaign_of_the_same_name_is_replaced(tmp_path):
    path = tmp_path / "card.npz"
    measurements.append(path, [made("a"), made("b")])
    measurements.append(path, [made("a", us=9.0)])
    assert measurements.campaign(path, "a") == made("a", us=9.0)
    assert measurements.campaign(path, "b") == made("b")
    with pytest.raises(KeyError):
        measurements.campaign(path, "c")
