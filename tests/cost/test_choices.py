"""What a choice by several fits loses among the kernels that were timed."""

import math
from dataclasses import replace

import numpy as np
import pytest

from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape

pytest.importorskip("sklearn")
pytest.importorskip("scipy")

from evoattn.portfolio.pick import class_kernels
from scripts.cost.choices import LEAST, choices, table
from scripts.cost.measured import Row

H100, PROBLEM = GPUS["h100"], parse_shape("B=7,H=16,Sq=1,Sk=448,D=80")
CONFIGS = class_kernels(PROBLEM, H100)[:LEAST]
ROWS = [Row(H100, PROBLEM, c, 128, 0, 10.0 + i, "campaign") for i, c in enumerate(CONFIGS)]
US = np.array([row.us for row in ROWS])


def test_the_mean_of_fits_chooses():
    """One fit takes the second kernel for the fastest, another the third, and both agree on the first."""
    scores = np.stack([US, US])
    scores[0, 1], scores[1, 2] = 9.5, 9.5
    (found,) = choices(ROWS, scores, {PROBLEM}, H100)
    assert [found.lost(fits) for fits in ([0], [1], [0, 1])] == pytest.approx([1.1, 1.2, 1.0])
    lines = list(table({"t": [found]}, {"first": [0], "both": [0, 1]}))
    assert lines[0].startswith("| first | t, all | 1 | 1.1000 |") and len(lines) == 1 + 4
    assert "| both | t, brief decoding | 1 | 1.0000 | 1.000 | 1.000 |" in lines


def test_problems_of_few_kernels_and_rows_that_a_fit_lacks_are_left_out():
    scores = np.stack([US, US])
    assert choices(ROWS[1:], scores[:, 1:], {PROBLEM}, H100) == []
    assert choices(ROWS, scores, set(), H100) == [] and choices(ROWS, scores, {PROBLEM}, GPUS["h200"]) == []
    scores[1, 0] = math.nan
    assert choices(ROWS, scores, {PROBLEM}, H100) == []
    assert choices([replace(row, source="landscape") for row in ROWS], np.stack([US]), {PROBLEM}, H100) == []
