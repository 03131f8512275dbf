"""What a choice by scores loses among the kernels that were timed."""

from dataclasses import replace

import numpy as np
import pytest

from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig

pytest.importorskip("sklearn")
pytest.importorskip("scipy")

from evoattn.portfolio.emphasis import kind_of
from evoattn.portfolio.pick import class_kernels
from evoattn.portfolio.refine import A_GENE
from scripts.cost.choices import LEAST, choices, table
from scripts.cost.measured import Row

H100, PROBLEM = GPUS["h100"], parse_shape("B=7,H=16,Sq=1,Sk=448,D=80")
CONFIGS = class_kernels(PROBLEM, H100)[:LEAST]
ROWS = [Row(H100, PROBLEM, c, 128, 0, 10.0 + i, "campaign") for i, c in enumerate(CONFIGS)]
US = np.array([row.us for row in ROWS])


def test_the_kernel_of_least_score_is_chosen():
    scores = US.copy()
    scores[1] = 9.5
    (found,) = choices(ROWS, scores, {PROBLEM}, H100)
    assert found.lost == pytest.approx(1.1)
    lines = list(table({"t": [found]}))
    assert lines[0] == "| t, all | 1 | 1.100 | 1.100 | 1.100 |" and len(lines) == 4
    assert f"| t, {kind_of(PROBLEM)} | 1 | 1.100 | 1.100 | 1.100 |" in lines


def test_a_gene_that_no_kernel_of_the_class_has_counts_against_a_kernel():
    near = CONFIGS[0]
    other = KernelConfig(near.family, near.params | dict.fromkeys(list(near.params)[:4], "new"))
    rows = [*ROWS, Row(H100, PROBLEM, other, 128, 0, 20.0, "campaign")]
    scores = np.append(US, 10.0 * (1 - A_GENE))
    assert choices(rows, scores, {PROBLEM}, H100)[0].lost == 1.0
    assert choices(rows, np.append(US, 10.0 * (1 - 5 * A_GENE)), {PROBLEM}, H100)[0].lost == pytest.approx(2.0)


def test_problems_of_few_kernels_and_without_a_score_are_left_out():
    assert choices(ROWS[1:], US[1:], {PROBLEM}, H100) == []
    assert choices(ROWS, US, set(), H100) == [] and choices(ROWS, US, {PROBLEM}, GPUS["h200"]) == []
    assert choices(ROWS, np.append(np.nan, US[1:]), {PROBLEM}, H100) == []
    assert choices([replace(row, source="landscape") for row in ROWS], US, {PROBLEM}, H100) == []
