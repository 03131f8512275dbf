"""Which times a fit sees and which it is judged on; what the tables say."""

import gzip
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from evoattn.cost.fitted import Fitted, load
from evoattn.cost.training import experiments
from evoattn.cost.training import fit as fits
from evoattn.cost.training import rows as measured
from evoattn.cost.training.experiments import Data, folds
from evoattn.cost.training.rows import Row
from evoattn.cost.training.table import make_table
from evoattn.model.errors import WrongUse
from tests.cost.made_up_campaigns import CARDS, CONFIGS, H100, PROBLEM, campaign, kept_campaigns


def row(card, problem, config=CONFIGS[0], saved=""):
    return Row(card, problem, config, 128, 0, 9.0, "campaign", saved)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return kept_campaigns(tmp_path_factory.mktemp("kept"))


def test_there_are_measured_times_in_the_repository():
    assert {path.parent.name for path in measured.files()} == {"h100.npz", "h200.npz", "landscapes.npz"}


def test_the_fit_that_ships_can_be_repeated():
    about = load().about
    for told in (about, *about.get("families", {}).values()):
        found = measured.named(told["files"])
        assert len(found) == len(told["files"]) and set(found) <= set(measured.files())
    with pytest.raises(WrongUse, match="has times of h100-2020-01-01-a"):
        measured.named(["h100-2020-01-01-a"])


def test_no_fit_saw_a_problem_that_it_is_judged_on():
    problems = [PROBLEM.with_(batch=b) for b in range(1, 8)]
    every = [row(card, p) for p in problems for card in CARDS]
    table = make_table(every)
    parts = folds(Data(table, table), 3)
    assert sorted(i for _, outside in parts for i in outside) == list(range(len(every)))
    for inside, outside in parts:
        assert not {every[i].problem for i in inside} & {every[i].problem for i in outside}
        assert len(inside) + len(outside) == len(every)


def test_a_campaign_is_read_as_it_was_kept_or_as_it_was_measured(kept, tmp_path):
    one = campaign(H100, "h100-x", range(1, 8))
    path = tmp_path / "mine.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in (one.about, *one.groups))
    rows = measured.read([path])
    assert len(rows) == 7 * len(CONFIGS) and {r.gpu.name for r in rows} == {"h100"}
    assert [r.us for r in rows] == [r.us for r in measured.read(kept[:1])]
    (group,) = one.groups
    first, finals = group["kernels"][0]["times"], group["final"]["us"]
    assert [r.us for r in rows[:2]] == pytest.approx([us / 1.01 for us in finals[0][:2]], rel=1e-3), "at one level"
    finals[0][0] *= 1.1
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in (one.about, group))
    assert measured.read([path])[0].us == pytest.approx(1.1 * first["0"], rel=1e-3), "of the final table, in turns"
    with gzip.open(path, "wt") as file:
        file.write('{"about": {}}\n')
    for unreadable in (path, tmp_path / "not-there.jsonl.gz"):
        with pytest.raises(WrongUse, match="no measured times"):
            measured.read([unreadable])
    with pytest.raises(WrongUse, match="no measured times"):
        measured.read([kept[0].with_name("not-there")])
    with pytest.raises(WrongUse, match="No measured times were found"):
        measured.read([])


@pytest.mark.slow
def test_a_fit_is_kept_when_it_is_made_and_with_its_judgement(kept):
    said, fits = [], []
    experiments.fit_and_judge(kept, said.append, fits.append)
    first, last = fits
    assert first.weights == last.weights and first.about["left_out"] == {}
    assert last.about["files"] == ["h100-x", "h200-x"] and last.about["cards"] == ["h100", "h200"]
    assert last.about["times"] == 13 * len(CONFIGS) and set(last.trees) == {"flash_mma"}
    table = "\n".join(said)
    lines = re.findall(r"^\| (campaign, h\d+|all) \| (\d+) \|", table, re.MULTILINE)
    assert lines[:3] == [("all", "13"), ("campaign, h100", "7"), ("campaign, h200", "6")]
    assert {label for label, _ in lines} <= set(last.about["left_out"]) and "Fitted on the h100 alone" in table
    assert last.about["left_out"]["all"]["spearman"] > 0.5


def test_a_fit_alone_is_judged_on_nothing(kept):
    said = []
    found = experiments.make_fit(kept[:1], said.append, each=9)
    assert said == ["63 times in the fit"] and found.about["left_out"] == {} and found.about["times"] == 63


@pytest.mark.slow
def test_trees_behind_those_of_a_fit_learn_how_kernels_near_the_best_are_ordered(kept, monkeypatch):
    problems = [PROBLEM.with_(batch=b) for b in range(1, 25)]
    base, rows = load(), [row(H100, problem, config) for problem in problems for config in CONFIGS]
    table = make_table(rows, "estimate")
    expected = fits.predict(table, np.arange(len(rows)), base)
    off = [1.1 if row.config["BLOCK_ORDER"] == "heads" else 1.0 for row in rows]
    slower = [replace(row, us=us * factor) for row, us, factor in zip(rows, expected, off)]
    monkeypatch.setattr(experiments, "read", lambda paths: slower)
    said: list[str] = []
    found = experiments.fit_near(kept, said.append, 1)
    *_, told = found.about["near"]
    assert told["files"] == ["h100-x", "h200-x"] and told["left_out"]["problems"] == 24
    assert "Of 24 problems left out" in said[0] and told["left_out"]["mean"] < told["left_out"]["before"]
    logs = np.log(fits.predict(table, np.arange(len(rows)), found) / expected)
    heads = np.array(off) > 1
    assert logs[heads].mean() - logs[~heads].mean() == pytest.approx(math.log(1.1), rel=0.3)
    with pytest.raises(WrongUse, match="times of h100-x already"):
        experiments.fit_near(kept, said.append, 1, found)


@pytest.mark.slow
def test_a_fit_is_repeated_with_the_later_trees_of_families(kept, monkeypatch):
    first = [path.name for path in kept[:1]]
    later = {"flash_mma": {"files": [path.name for path in kept]}}
    shipped = Fitted({}, {}, {"files": first, "families": later, "left_out": {}})
    monkeypatch.setattr(experiments, "load", lambda: shipped)
    monkeypatch.setattr(measured, "files", lambda: kept)
    made: list[Fitted] = []
    experiments.fit_again(lambda text: None, made.append, 20, 0, 1)
    (again,), whole = made, experiments.make_fit(kept[:1], lambda text: None, 20)
    assert not whole.trees and set(again.trees) == {"flash_mma"}, "there are enough times of both cards alone"
    rest = again.about.pop("families")["flash_mma"]
    assert again.about == whole.about and again.weights == whole.weights
    assert rest["files"] == later["flash_mma"]["files"] and rest["times"] == 13 * 20
