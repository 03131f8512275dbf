"""A card is calibrated: what was measured is kept whatever ends it, and picks are made from it."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
from typer.testing import CliRunner

from evoattn.cli.main import app
from evoattn.cost.correction import NONE, correction_of
from evoattn.cost.cost import scores
from evoattn.engine.breeding import Breeder
from evoattn.model.errors import FailedRun, WrongUse
from evoattn.model.gpu import GPUS
from evoattn.model.paths import FILE, ROOT, calibration_folder
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from evoattn.portfolio import calibrations, pick, select
from evoattn.portfolio.calibrate import Keeper, Wanted, calibrate, fits, plan
from evoattn.portfolio.calibrations import TIMES, Journal, times_of
from evoattn.portfolio.climb import what_decides
from evoattn.portfolio.kernels import kind_of
from evoattn.portfolio.pick import list_for, shipped_for
from tests.portfolio.calibrate_fakes import CARD, TOOLS, card_us

WANTED = Wanted(1, ("plain",), jobs=1)
KNOWN = 24
"""Kernels of each problem that an earlier run has timed: enough for a correction."""


@pytest.fixture(autouse=True)
def forgotten(tmp_path, monkeypatch):
    """A data folder of its own, and nothing in memory of another test's."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    pick.forget()
    yield calibration_folder(CARD)
    monkeypatch.undo()
    pick.forget()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A calibration of the fake card: (what came of it, its folder's text by file)."""
    before, here = os.environ.get("XDG_DATA_HOME"), tmp_path_factory.mktemp("made")
    os.environ["XDG_DATA_HOME"] = str(here)
    try:
        folder, said = calibration_folder(CARD), []
        time_before(plan(WANTED, CARD))
        with mock.patch.object(select, "EACH", 4):  # problems of a seed, for the general kernels
            done = calibrate(WANTED, CARD, said.append, TOOLS)
        return done, {name: (folder / name).read_text() for name in (FILE, TIMES)}, said
    finally:
        os.environ["XDG_DATA_HOME"] = before or ""
        pick.forget()


def time_before(made):
    """Have the journal hold times of an earlier run."""
    with Journal(calibration_folder(CARD)) as journal:
        keeper = Keeper(SimpleNamespace(groups=made.groups), journal, print, 0)
        for group in made.groups:
            breeder = Breeder(group, CARD, 0)
            for kernel, _ in filter(None, (breeder.propose() for _ in range(KNOWN))):
                times = {i: card_us(group.problems[i], kernel.config) for i in breeder.serves(kernel)}
                group.kernels[kernel.id] = replace(kernel, state="right", times=times)
        keeper.save()


def decides():
    return what_decides.__wrapped__(read_ns=time.time_ns())


def put(folder, files, names=(FILE, TIMES)):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(files[name])
    pick.forget()


@pytest.mark.slow
def test_picks_are_made_from_what_was_measured(made, forgotten):
    done, files, said = made
    before = decides()
    put(forgotten, files)
    listed = list_for(CARD)
    assert listed.cards == ("l4",) and listed.kernels and listed.regret and decides() not in (before, "")
    problem = parse_shape("B=4,H=16,S=1024,D=64,dtype=bf16")
    assert kind_of(problem) in listed.kinds
    found = pick.pick(problem, CARD)
    assert not found.estimated and "fast on l4" in found.why and found.expected_regret == listed.regret["plain"]
    assert pick.pick(parse_shape("B=1,H=2,S=64,D=40"), CARD).estimated, "nobody measured such a head_dim"
    assert pick.pick(problem, replace(CARD, sm_count=57)).estimated, "another card"
    assert done.rows and f"judged {len(done.rows)} of {len(done.rows)}" in said[-1]
    table = done.table()
    assert table.count("| plain |") == 1 and f"{len(done.rows)} of {len(done.rows)}" in table
    judged = done.calibration.judged
    assert judged["ahead"] == judged["beside"] == judged["problems"] == len(done.rows) and judged["regret"] >= 1


@pytest.mark.slow
def test_the_cost_model_is_corrected_where_that_helps(made, forgotten):
    done, files, _ = made
    _, before, after = done.calibration.correction.left_out["all"]
    assert after < before and f"corrected {after:.3f}." in done.table()
    put(forgotten, files)
    assert "flash_mma" in correction_of(CARD).trees
    problem = parse_shape("B=4,H=16,S=1024,D=64,dtype=bf16")
    known = next(c for c in pick.portfolio_kernels(problem, CARD) if c.family == "flash_mma")
    configs = [KernelConfig("flash_mma", known.params | {"BLOCK_N": keys}) for keys in (32, 64)]
    narrow, wide = (a / b for a, b in zip(scores(problem, configs, CARD), scores(problem, configs, CARD, None, NONE)))
    assert wide > 1.1 * narrow, "wide tiles take 1.6 times as long here, of which a short search finds a part"


@pytest.mark.slow
def test_a_later_run_goes_on_and_other_versions_are_timed_again(made, forgotten):
    _, files, _ = made
    put(forgotten, files, (TIMES,))
    kept = sum(1 for _ in times_of(forgotten))
    again = plan(WANTED, CARD)
    assert again.recalled == kept > 100 and not again.old and f"Kept so far: {kept} times" in again.describe()
    assert plan(Wanted(1, ("cached",)), CARD).recalled == kept, "whatever a later run draws"
    old = "\n".join(
        json.dumps(json.loads(line) | {"with": "an older driver"}) for line in files[TIMES].split("\n") if line
    )
    (forgotten / TIMES).write_text(old)
    again = plan(WANTED, CARD)
    assert not again.recalled and again.old == kept and f"{kept} more are of another driver" in again.describe()
    assert all(group.given for group in again.groups), "the best are timed first"


@pytest.mark.slow
def test_kill_9_keeps_what_was_measured_and_two_at_once_are_refused(forgotten):
    words = [sys.executable, "-c", "from tests.portfolio.calibrate_fakes import run; run(60)"]
    with subprocess.Popen(words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE) as run:
        until = time.monotonic() + 120
        while sum(1 for _ in times_of(forgotten)) < 20:
            assert time.monotonic() < until and run.poll() is None
            time.sleep(0.2)
        with pytest.raises(FailedRun, match="Another process calibrates this card"), Journal(forgotten):
            pass
        run.send_signal(signal.SIGKILL)
    kept = sum(1 for _ in times_of(forgotten))
    assert kept >= 20 and plan(Wanted(60, ("plain",)), CARD).recalled == kept
    assert list_for(CARD) is shipped_for(CARD), "no list was made"
    with (forgotten / TIMES).open("a") as file:
        file.write('{"group": "16 d64 fu')
    with Journal(forgotten) as journal:
        journal.add([{"what": "comes next", "times": [{"us": 1.0}]}])
    assert [*times_of(forgotten)][-1] == {"what": "comes next", "us": 1.0} and sum(
        1 for _ in times_of(forgotten)
    ) == kept + 1


def command(*words):
    return CliRunner().invoke(app, ["calibration", *words])


@pytest.mark.slow
def test_calibrations_are_listed_and_go_to_others_as_plain_data(made, forgotten, tmp_path):
    _, files, _ = made
    assert "No card was calibrated" in command("list").stdout
    put(forgotten, files)
    assert command("list").stdout.startswith("l4-58-sm_89: ") and "regret" in command("list").stdout
    file = tmp_path / "l4.json"
    assert command("export", "l4", "-o", str(file)).exit_code == 0
    assert "source" not in file.read_text()
    assert command("import", str(file)).exit_code == 2, "the card has one"
    assert command("remove", "l4").exit_code == 0 and not forgotten.exists()
    assert command("remove", "l4").exit_code == command("export", "a10").exit_code == 2
    assert "Kept l4-58-sm_89" in command("import", str(file)).stdout
    assert list_for(CARD).cards == ("l4",)


@pytest.mark.slow
def test_a_file_that_holds_anything_else_is_refused_or_passed_over(made, forgotten, tmp_path):
    _, files, _ = made
    row, file = json.loads(files[FILE]), tmp_path / "other.json"
    odd_trees = {"trees": {"flash_mma": "x"}, "left_out": {}}
    wrong = [[], {}, row | {"version": 1}, row | {"correction": odd_trees}, row | {"card": {"name": "l4"}}]
    wrong += [row | {"correction": {"trees": {}, "left_out": {"all": [1, 2]}}}]
    wrong += [row | {"list": row["list"] | {"kernels": [["flash_mma"]]}}]
    for content in (*map(json.dumps, wrong), "no JSON", ""):
        file.write_text(content)
        with pytest.raises(WrongUse, match="cannot be imported"):
            calibrations.bring_in(file)
        put(forgotten, {FILE: content}, (FILE,))
        assert list_for(CARD) is shipped_for(CARD) and correction_of(CARD) in (NONE, correction_of(CARD))
        (forgotten / FILE).unlink()


def test_a_folder_s_name_stays_in_its_folder():
    assert calibration_folder(replace(CARD, name="../../x y")).parent == calibration_folder(CARD).parent


def test_problems_fit_the_card_and_own_ones_have_half_of_the_time():
    own = parse_shape("B=1,H=8,S=4096,D=64,dtype=bf16,mask=causal,lse=1")
    made = plan(Wanted(60, ("plain", "packed"), [(own, 3.0), (own.with_(dtype="fp16"), 1.0)]), CARD)
    assert all(fits(p, CARD) for group in made.groups for p in group.problems)
    problems = {p for group in made.groups for p in group.problems}
    assert {p.varlen != "" for p in problems} == {True, False} and not problems & set(made.judged)
    weights = {group.name: group.weight - len(group.problems) for group in made.groups}
    drawn = len(problems) - 2
    assert weights["16 d64 causal"] == pytest.approx(0.75 * drawn - 1) and not fits(own.with_(batch=4096), CARD)
    assert weights["16 d64 causal fp16"] == pytest.approx(0.25 * drawn - 1)
    assert "Card: L4 (l4, 58 SMs, sm_89)" in made.describe() and "packed" not in made.groups[0].name
    assert GPUS["l4"] == CARD


@pytest.mark.slow
def test_without_a_gpu_the_command_says_so():
    result = CliRunner().invoke(app, ["calibrate", "--dry-run"])
    assert result.exit_code == 1 and "runs on the card itself" in result.output
    assert CliRunner().invoke(app, ["calibrate", "--budget", "9 trials"]).exit_code == 2
    assert CliRunner().invoke(app, ["calibrate", "--kinds", "odd"]).exit_code == 2


def test_ctrl_c_says_that_what_was_measured_is_kept(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("evoattn.model.gpu.detect_devices", lambda: [SimpleNamespace(spec=CARD)])
    monkeypatch.setattr("evoattn.portfolio.calibrate.calibrate", interrupted)
    result = CliRunner().invoke(app, ["calibrate", "--budget", "1m"])
    assert result.exit_code == 1 and "What was measured is kept: the same command goes on." in result.output
