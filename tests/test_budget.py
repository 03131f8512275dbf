"""Budgets as people write them."""

import pytest

from evoattn.budget import Budget, BudgetError, parse_budget


@pytest.mark.parametrize("text, budget", [
    ("90s", Budget(seconds=90)), ("30m", Budget(seconds=1800)), ("2h", Budget(seconds=7200)), ("1.5h", Budget(seconds=5400)), ("500trials", Budget(trials=500)),
])
def test_budgets(text, budget):
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["", "2", "h", "-5s", "0s", "0trials", "5 trials", "1d", "nan s", "1e3s", "²s"])
def test_what_is_no_budget_is_one_sentence(text):
    with pytest.raises(BudgetError, match="90s"):
        parse_budget(text)
