"""Picks on cards that nobody measured are as good by the cost model as any known config."""

import pytest

from benchmarks.cards import picks
from benchmarks.cards.picks import CARDS, MOST, Judged, compiled, judged, summary
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.portfolio.workload import draw

DECODE = parse_shape("B=54,H=2,Hkv=1,Sq=4,Sk=1152,D=256,dtype=bf16,mask=causal_lower_right")
"""On Blackwell the choice without tensor copies scored twice the best."""


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.sampled(4)
def test_a_pick_scores_at_most_a_little_more_than_the_best_known_config(card):
    for problem in [*draw(8100, 5), DECODE]:
        row = judged(problem, GPUS[card])
        assert row and row.ratio <= MOST, f"{problem.describe()}: {row.picked} for {row.best}"
        assert not registry.lookup(row.picked.family).why_impossible(problem, row.picked, GPUS[card])
        assert load_space(row.picked.family, GPUS[card]).has(row.picked.params)


@pytest.mark.slow
def test_what_does_not_compile_or_is_no_pick_is_a_miss():
    gpu, problem = GPUS["l4"], parse_shape("B=1,H=2,S=64,D=64")
    right = judged(problem, gpu)
    (whole,) = compiled([right], gpu)
    assert not whole.failure and not whole.misses
    wrong = Judged(problem, right.picked, right.best, 1.03)
    assert wrong.misses and Judged(problem, None, right.best, float("inf")).misses
    assert "| 1.030 | 1 | 0 | 0 |" in summary("l4", [wrong])


def test_problems_are_those_of_seeds_that_nothing_was_made_from():
    assert all(100 <= seed < 9000 for seed in picks.SEEDS)
