"""Budgets as people write them."""

import pytest

from evoattn.engine.budget import Budget, BudgetError, Clock, parse_budget, reserve_of


@pytest.mark.parametrize(
    "text, budget",
    [
        ("90s", Budget(seconds=90)),
        ("30m", Budget(seconds=1800)),
        ("2h", Budget(seconds=7200)),
        ("1.5h", Budget(seconds=5400)),
        ("500trials", Budget(trials=500)),
        ("2 h", Budget(seconds=7200)),
        (" 5 trials ", Budget(trials=5)),
    ],
)
def test_budgets(text, budget):
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["", "2", "h", "-5s", "0s", "0trials", "1d", "nan s", "1e3s", "²s", 90])
def test_what_is_no_budget_is_one_sentence(text):
    with pytest.raises(BudgetError, match="90s"):
        parse_budget(text)


def test_time_runs_from_the_start_of_the_clock_and_leaves_the_reserve():
    now = [100.0]
    clock, short = (Clock(Budget(seconds=s), reserve=3, now=lambda: now[0]) for s in (60, 4))
    now[0] += 1000
    assert not clock.spent(0)
    clock.start(), short.start()
    for seconds, spent in ((1.9, (False, False)), (2.1, (False, True)), (56.9, (False, True)), (57.1, (True, True))):
        now[0] = 1100 + seconds
        assert (clock.spent(10**6), short.spent(0)) == spent
    assert Clock(Budget(trials=3)).spent(3) and not Clock(Budget(trials=3)).spent(2)


@pytest.mark.parametrize("seconds, kept", [(20, 5), (60, 5), (200, 10), (900, 45), (3600, 45)])
def test_part_of_a_time_budget_is_kept_for_the_final(seconds, kept):
    assert reserve_of(Budget(seconds=seconds)) == pytest.approx(kept) and reserve_of(Budget(trials=9)) == 0.0
