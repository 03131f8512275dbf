"""A correction finds what a card does otherwise than the model says, and does nothing where there is nothing."""

from __future__ import annotations

import random

import pytest

from evoattn.cost.correction import MOST, NONE, Correction, of_row
from evoattn.cost.correction_fit import LEAST_PROBLEMS, Timed, fit
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig


def rows(problems, slow=1.0, noise=0.0, seed=1):
    """Kernels of two genes; those of STAGES=2 take `slow` times what the model says."""
    rng, found = random.Random(seed), []
    for number in range(problems):
        problem = AttentionProblem(1, 1 + number, 1 + number, 64, 64, 64)
        for stages in (1, 2):
            for block in (32, 64, 128):
                config = KernelConfig("flash_mma", {"STAGES": stages, "BLOCK_N": block})
                score = 10.0 * rng.uniform(1, 1.3)
                us = score * (slow if stages == 2 else 1.0) * rng.uniform(1 - noise, 1 + noise) * (1 + number)
                found.append(Timed(problem, config, us, score, {"tensor": rng.random(), "dram": rng.random()}))
    return found


def test_a_gene_that_is_slow_on_the_card_is_found():
    found = fit(rows(60, slow=1.5, noise=0.02))
    assert found.after < 1.02 < found.before
    ratio = found.correction.factors["flash_mma STAGES=2"] - found.correction.factors["flash_mma STAGES=1"]
    assert 0.25 < ratio < 0.42  # the logarithm of 1.5 is 0.41


def test_where_the_model_is_right_nothing_is_corrected():
    found = fit(rows(60))
    assert found.correction is NONE and found.before == found.after == 1.0


@pytest.mark.parametrize("problems", [0, 1, LEAST_PROBLEMS - 1])
def test_few_problems_make_no_correction(problems):
    assert fit(rows(problems, slow=1.5)).correction is NONE


def test_a_correction_is_bounded_and_of_numbers():
    config = KernelConfig("flash_mma", {"STAGES": 2})
    assert Correction({"flash_mma": 9.0}).log(config, {}) == MOST
    assert Correction({"part dram": -0.5}).log(config, {"dram": 1.0, "tensor": 1.0}) == -0.25
    for wrong in ([], {"a": "b"}, {"a": float("nan")}, None):
        with pytest.raises(ValueError, match="no table of numbers"):
            of_row(wrong)
