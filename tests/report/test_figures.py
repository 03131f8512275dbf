"""The data that the page draws."""

import math

import pytest

from evoattn.model.records import Timing, TrialState
from evoattn.report import summarise
from evoattn.report.page import ceilings, family_colours, figures
from tests.report.report_studies import add, make_study, timing


def test_the_best_family_has_the_first_colour(timed):
    summary = summarise(*timed)
    colours = family_colours(summary)
    assert colours[summary.winner.row.family] == "c0" and set(colours) == set(summary.families)
    assert len(set(colours.values())) == len(colours)


def test_progress_draws_each_candidate_in_its_family(timed):
    storage, study = timed
    summary = summarise(storage, study)
    drawn = figures(summary)["progress"]
    trials = {trial.number: trial for trial in storage.iter_trials(study)}
    assert [trials[n].family for n in drawn["trial"]] == drawn["family"]
    assert [trials[n].timing.median_us for n in drawn["trial"]] == drawn["value"]
    improved = [n for n, better in zip(drawn["trial"], drawn["improved"], strict=True) if better]
    assert improved == [step.found.trial for step in summary.improvements]
    assert drawn["low"] < min(drawn["value"]) and [p["name"] for p in drawn["peers"]] == ["SDPA cudnn", "SDPA flash"]


def test_a_few_slow_candidates_do_not_flatten_the_progress(storage):
    study = make_study(storage)
    for n, us in enumerate([10.0, 11.0] * 15 + [5000.0]):
        add(storage, study, TrialState.COMPLETE, us=[("screen", us)], A=n)
    drawn = figures(summarise(storage, study))["progress"]
    assert drawn["high"] == pytest.approx(12.1) and max(drawn["value"]) == 5000.0


@pytest.mark.slow
def test_slices_are_of_every_right_trial_and_in_the_order_of_importance(measured):
    slices = figures(summarise(*measured))["slices"]["flash_scalar"]
    assert [parameter["name"] for parameter in slices] == ["A", "B"]
    assert slices[0]["share"] > slices[1]["share"]
    rows = slices[0]["rows"]
    assert [row["value"] for row in rows] == ["0", "1", "2", "3"] and [row["trials"] for row in rows] == [15] * 4
    times = sorted(t.timing.median_us for t in measured[0].iter_trials(measured[1]) if t.timing and t.config["A"] == 3)
    assert rows[3]["best"] == times[0] and rows[3]["median"] == times[7]


def test_the_roofline_has_roofs_families_and_peers_in_one_order(timed):
    summary = summarise(*timed)
    rows = ceilings(summary)
    rates = [row["tflops"] for row in rows]
    assert rates == sorted(rates, reverse=True)
    assert {row["label"] for row in rows if row["kind"] == "kernel"} == set(summary.right_by_family)
    assert {row["label"] for row in rows if row["kind"] == "peer"} == {"SDPA cudnn", "SDPA flash"}
    assert {row["label"] for row in rows if row["kind"] == "roof"} == {roof.name for roof in summary.roofs}
    (winner,) = (row for row in rows if row.get("winner"))
    assert winner["us"] == summary.winner.row.median_us and winner["colour"] == "c0"
    assert rows[0]["width"] == 100 and all(0 < row["width"] <= 100 for row in rows)
    pairs = [(one, two) for one in rows for two in rows if one["tflops"] > 1.01 * two["tflops"]]
    scale = {round((a["width"] - b["width"]) / math.log(a["tflops"] / b["tflops"]), 6) for a, b in pairs}
    assert len(scale) == 1  # logarithmic


def test_no_roofline_where_nothing_was_timed(storage):
    study = make_study(storage, offline=True)
    add(storage, study, TrialState.ESTIMATED, cost=5.0, A=1)
    assert ceilings(summarise(storage, study)) == []


def test_a_peer_far_above_the_candidates_is_left_out_of_the_progress(storage):
    study = make_study(storage)
    for n in range(4):
        add(storage, study, TrialState.COMPLETE, us=[("screen", 10.0 + n)], A=n)
    storage.add_peer(study, "math", timing(900.0, "screen"))
    storage.add_peer(study, "flash", Timing((11.0,), {"stage": "screen"}))
    assert [peer["name"] for peer in figures(summarise(storage, study))["progress"]["peers"]] == ["SDPA flash"]
