"""Two studies side by side."""

import io
import json

import pytest
from rich.console import Console

from evoattn.model.errors import WrongUse
from evoattn.model.records import TrialState
from evoattn.report import summarise
from evoattn.report.page import comparison_html
from evoattn.report.table import compare, comparison_json, print_comparison
from tests.report.report_studies import EVIL, add, make_study


@pytest.fixture
def studies(storage):
    """Two measured ones, of 20 and 30 µs, and an estimated one."""
    found = [make_study(storage, name="one"), make_study(storage, name=EVIL)]
    for study, us in zip(found, (20.0, 30.0), strict=True):
        add(storage, study, TrialState.COMPLETE, us=[("final", us)], A=us > 25)
    estimated = make_study(storage, offline=True, name="estimated")
    add(storage, estimated, TrialState.ESTIMATED, cost=5.0, A=True)
    return [summarise(storage, study, course=False) for study in (*found, estimated)]


def test_two_studies_of_one_problem_stand_side_by_side(studies):
    found = compare(*studies[:2])
    assert "1.5 times" in found.verdict
    assert ("median µs", "20.00", "30.00") in found.rows and ("A", "false", "true") in found.rows
    assert json.loads(comparison_json(found))["verdict"] == found.verdict
    console = Console(width=120, record=True, file=io.StringIO())
    print_comparison(found, console)
    assert "30.00" in (shown := console.export_text()) and "\x1b" not in shown
    page = comparison_html(found)
    assert "<b>30.00</b>" in page and "<script" not in page


def test_a_time_is_not_compared_with_an_estimate(studies):
    with pytest.raises(WrongUse, match="one is measured, the other estimated: they cannot be compared"):
        compare(studies[0], studies[2])
