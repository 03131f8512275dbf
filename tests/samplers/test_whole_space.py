"""`scripts/whole_space.py`: what stands for a GPU, and how a sampler is asked."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from whole_space import Imagined, ThinkingAhead

from evoattn.cost.fitted import DATA
from evoattn.model.paths import ROOT
from evoattn.model.records import Proposal
from evoattn.samplers.landscape import load


@pytest.fixture(scope="module")
def imagined() -> tuple[Imagined, list]:
    whole = next(one for one in load(ROOT / "docs" / "landscapes" / "h100-b.jsonl.gz") if "full" in one.name)
    some = [c for c in whole.configs if c.family in ("flash_mma", "flash_scalar")]
    learned, left_out = some[::2], [c for c in some[1::2] if c.best_us]
    return Imagined(replace(whole, configs=tuple(learned)), DATA), left_out


def test_a_config_that_was_left_out_takes_about_what_was_recorded(imagined):
    land, left_out = imagined
    errors = [abs(land.config(c.family, c.params).best_us / c.best_us - 1) for c in left_out[:100]]
    assert median(errors) < 0.2  # of half of a small landscape
    assert land.config(left_out[0].family, left_out[0].params) is land.config(left_out[0].family, left_out[0].params)
    assert {land.why_invalid(c.family, c.params) for c in left_out[:20]} == {None}


class Counting:
    def __init__(self, most: int = 1000) -> None:
        self.asked: list[int] = []
        self.left = most

    def ask(self, n: int) -> list[Proposal]:
        self.asked.append(n)
        given, self.left = min(n, self.left), self.left - min(n, self.left)
        return [Proposal("flat", {}) for _ in range(given)]


@pytest.mark.parametrize("boards", [1, 4])
def test_proposals_are_asked_for_as_a_search_does(boards):
    counting = Counting()
    ahead = ThinkingAhead(counting, boards)
    assert len(ahead.ask(40)) == 40
    assert counting.asked[0] == 16 * boards and set(counting.asked[1:]) <= {8 * boards}


def test_a_sampler_that_has_no_more_ends_the_search():
    ahead = ThinkingAhead(Counting(20), 1)
    assert [len(ahead.ask(15)) for _ in range(3)] == [15, 5, 0]
