"""The shipped fit orders measured kernels, good and bad ones, as the targets of reports/cost_model.md ask."""

import pytest

from evoattn.cost.cost import cost
from evoattn.cost.explanation import ANY_CARD
from evoattn.cost.fitted import load
from evoattn.cost.training.judge import for_all_cards, judge, problem_keys
from evoattn.cost.training.measured import files, is_landscape, read
from evoattn.cost.training.rows import thinned

EACH = 6
"""An eighth of the rows of a landscape's problem that are looked at."""


def assert_good(found):
    """`found`: a `Judgement`, or its fields as the fit keeps them."""
    assert found["spearman"] >= 0.92
    assert found["first"] <= 1.15 and found["best_of_eight"] <= 1.04


@pytest.fixture(scope="module")
def landscapes():
    return read(filter(is_landscape, files()))


@pytest.mark.slow
@pytest.mark.parametrize("any_card", [False, True], ids=["all families", "families of any card"])
def test_kernels_of_landscapes_are_ordered_as_measured(landscapes, any_card):
    rows = thinned((row for row in landscapes if for_all_cards(row) or not any_card), EACH)
    costs = [cost(row.problem, row.config, row.gpu, row.registers, row.spill_bytes) for row in rows]
    found = judge([one.score for one in costs], [row.us for row in rows], problem_keys(rows))
    assert found.problems >= 30
    assert_good(vars(found))
    assert found.worst_spearman >= 0.75 and found.worst_first <= 1.6 and found.fastest_tenth >= 0.6


@pytest.mark.parametrize("card", ["h100", "h200"])
@pytest.mark.parametrize("kind", ["", ANY_CARD], ids=["all families", "families of any card"])
def test_problems_left_out_of_the_fit_were_ordered_well(card, kind):
    assert_good(load().about["left_out"][f"campaign, {card}{kind}"])


def test_landscapes_left_out_of_the_fit_were_ordered_well():
    for kind in ("", ANY_CARD):
        found = load().about["left_out"][f"landscape, h100{kind}"]
        assert_good(found)
        assert found["worst_spearman"] >= 0.75
