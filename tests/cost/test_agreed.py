"""Several fits are asked about a few configs, and each counts as much."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from evoattn.cost.agreed import agreed
from evoattn.cost.cost import scores
from evoattn.cost.fitted import Fitted, load, save
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import load_space

H100, PROBLEM = GPUS["h100"], parse_shape("B=1,H=16,S=1024,D=64")


def test_the_score_is_the_geometric_mean_over_the_fits_that_know_the_family(tmp_path: Path) -> None:
    first = load()
    other = Fitted(first.weights, {"flash_wgmma": first.trees["split_kv"]}, {})
    save(other, tmp_path / "other.npz")
    configs = [load_space(name, H100).starting_configs()[0] for name in ("flash_wgmma", "flash_mma")]
    files = (tmp_path / "other.npz", tmp_path / "missing.npz")
    wgmma, mma = agreed(PROBLEM, configs, H100, files)
    alone, beside = (scores(PROBLEM, configs, H100, fitted) for fitted in (first, load(files[0])))
    assert wgmma == pytest.approx(math.sqrt(alone[0] * beside[0])) and beside[0] != alone[0]
    assert mma == pytest.approx(alone[1])
    assert agreed(PROBLEM, configs, H100, files[1:]) == pytest.approx(alone)
