"""A GPU plays another card, and the program that judges picks on it does so."""

import argparse
import json
import sys
from dataclasses import asdict, replace

import pytest

from benchmarks.cards import stranger
from benchmarks.cards.stranger import GOALS, Row, judge, kept_rows, share, table, unseen
from evoattn.backends.compiler import compile_source
from evoattn.families import registry
from evoattn.model.gpu import GPUS, DetectedDevice
from evoattn.model.gpu_table import VARIABLE, is_played, target
from evoattn.model.shape_text import parse_shape
from evoattn.portfolio.pick import list_for, pick
from evoattn.portfolio.select import Checked
from tests.portfolio.calibrate_fakes import CARD, TOOLS

HERE = DetectedDevice(0, "NVIDIA H200", (9, 0), "13.0")
PROBLEM = parse_shape("B=4,H=16,S=1024,D=64,dtype=bf16,mask=causal")


def as_card(monkeypatch, card):
    monkeypatch.setenv(VARIABLE, f"{card}@sm_90a")
    return HERE.spec


@pytest.mark.slow
@pytest.mark.parametrize(("card", "smem"), [("a100", 163 << 10), ("l4", 99 << 10)])
def test_a_gpu_plays_a_card_with_its_families_and_shared_memory(card, smem, monkeypatch):
    spec = as_card(monkeypatch, card)
    assert is_played(spec) and spec.name == f"h200-as-{card}" and spec.arch == GPUS[card].arch
    assert spec.smem_per_block == smem and spec.sm_count == 132
    assert target(spec.arch) == "sm_90a" and list_for(spec) is None, "what ships is hidden"
    able = {family.name for family in registry.FAMILIES.values() if not family.why_unsupported(PROBLEM, spec)}
    theirs = {f.name for f in registry.FAMILIES.values() if not f.why_unsupported(PROBLEM, GPUS[card])}
    assert able == theirs and "flash_wgmma" not in able
    found = pick(PROBLEM, spec)
    assert found.estimated and "known-good configs" in found.why


@pytest.mark.slow
def test_a_stranger_has_all_but_what_ships(monkeypatch):
    spec = as_card(monkeypatch, "stranger")
    assert spec == replace(GPUS["h200"], name="h200-as-stranger") and list_for(spec) is None
    assert list_for(GPUS["h200"]) is not None, "the judge compares with it"
    assert pick(PROBLEM, spec).estimated and not pick(PROBLEM, GPUS["h200"]).estimated


@pytest.mark.parametrize("words", ["", "a100", "no_card@sm_90a", "@"])
def test_nothing_else_is_played(words, monkeypatch):
    monkeypatch.setenv(VARIABLE, words)
    assert HERE.spec == GPUS["h200"] and target("sm_80") == "sm_80"


def test_kernels_are_compiled_for_the_gpu_that_is_here(monkeypatch):
    as_card(monkeypatch, "l4")
    compiled = compile_source('extern "C" __global__ void nothing() {}', "sm_89")
    assert ".target sm_90a" in compiled.ptx


@pytest.mark.slow
def test_picks_are_timed_with_the_best_of_a_search_and_sdpa():
    problems = unseen(3, CARD)
    assert len(problems) == 3 and all(p.dtype != "fp32" for p in problems)
    said = []
    rows = list(judge(problems, CARD, GPUS["l4"], argparse.Namespace(search=0.7, jobs=1), said.append, TOOLS))
    assert [row.checked.problem for row in rows] == [p.describe() for p in problems]
    assert all(row.checked.peers == {"flash": 1e6, "efficient": 1e6} and row.plain for row in rows)
    assert all(row.checked.pick_us == row.shipped >= row.checked.best_us for row in rows), "one kernel"
    assert "Ahead of SDPA on 3 of 3; 0 of 3" in table(rows, GOALS["stranger"])
    raced = [one.checked for one in rows if one.checked.raced_us]
    assert raced and any(one.raced_us < one.pick_us for one in raced), "the card is not as the cost model has it"
    assert all(one.best_us <= one.raced_us <= one.pick_us for one in raced)
    assert "searched: " in said[-1]
    (row,) = judge(problems[:1], CARD, None, argparse.Namespace(search=0.0, jobs=1), said.append, TOOLS)
    assert row.shipped is None and row.checked.candidates == 0 and row.checked.pick_us and len(said) == 1


def row(problem, pick_us, best_us, peers, shipped=None, wrong="", raced_us=None):
    checked = Checked(problem, "", ("f", {}), wrong, pick_us, best_us, None, 1, peers, raced_us=raced_us)
    return Row(checked, pick_us, shipped)


def test_the_table_says_who_is_ahead():
    rows = [
        row("a", 10.0, 8.0, {"flash": 20.0, "efficient": 15.0}, 8.0, raced_us=9.0),
        row("b", 10.0, 9.0, {"flash": 9.0}),
        row("c", None, 8.0, {"flash": 9.0}, wrong="no pick"),
    ]
    text = table(rows, "none")
    assert "| pick / shipped pick | 1 | 1.250 | 1.250 |" in text and "Ahead of SDPA on 1 of 2; 1 of 3" in text
    assert f"| 2 | {(1.25 * 10 / 9) ** 0.5:.3f} | 1.250 |" in text and "wrong: c: no pick" in text
    assert "| 2 | 1.162 | 0.900 |" in text
    assert f"after the race with its rivals | 2 | {(9 / 8 * 10 / 9) ** 0.5:.3f} | 1.125 |" in text
    assert "none" in table([], "none")


def test_parts_are_all_problems_once_and_files_of_parts_one_table(tmp_path):
    assert sorted(i for part in (1, 2, 3) for i in range(10)[share(f"{part}/3")]) == [*range(10)]
    for text in ("0/4", "5/4", "1", "a/b"):
        with pytest.raises(ValueError):
            share(text)
    rows = [row("a", 10.0, 9.0, {"flash": 9.0}), row("b", None, None, {}, wrong="no pick")]
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    for file, one in zip(files, rows, strict=True):
        file.write_text(json.dumps({"play": "l4", "rows": [asdict(one)]}))
    play, kept = kept_rows(files)
    assert play == "l4" and table(kept, "") == table(rows, "")


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["stranger", "--folder", "/tmp/nothing"])
    for name in (VARIABLE, "XDG_DATA_HOME", "EVOATTN_CACHE"):
        monkeypatch.setenv(name, "/tmp/nothing")
    assert stranger.main() == 1 and "could play a card" in capsys.readouterr().err
