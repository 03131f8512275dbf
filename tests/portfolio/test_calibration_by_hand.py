"""What calibrations write, read and say, of kernels and times that are made up: nothing is searched."""

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from typer.testing import CliRunner

from evoattn.cli.main import app
from evoattn.cost import correction_fit
from evoattn.cost.correction import MOST, NONE, Correction, of_row
from evoattn.cost.correction_fit import Timed
from evoattn.cost.cost import scores
from evoattn.cost.fitted import Fitted
from evoattn.engine.groups import Group, Kernel
from evoattn.families.registry import load_space
from evoattn.model import whole_file
from evoattn.model.errors import FailedRun, WrongUse
from evoattn.model.gpu import GPUS
from evoattn.model.paths import FILE, calibration_folder, calibrations_folder
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig, config_id
from evoattn.portfolio import calibrate, calibrations, pick
from evoattn.portfolio.calibrate import JUDGED_SEEDS, Done, Keeper, Plan, drawn, fits, summary, without_lse
from evoattn.portfolio.calibrations import Calibration, Journal, of_card, times_of
from evoattn.portfolio.kernels import KernelList
from evoattn.portfolio.select import Checked
from evoattn.portfolio.workload import BUILD_SEEDS

CARD = GPUS["l4"]
SPACE = load_space("flash_mma", CARD)
PARAMS = [config.params for config in SPACE.starting_configs()[:3]]
ONE, TWO = (parse_shape(f"B=2,H=8,S={length},D=64,dtype=bf16") for length in (512, 1024))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The card's, in a data folder of the test's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(calibrations, "driver_version", lambda: "580.1")
    monkeypatch.setattr(calibrations, "nvrtc_version", lambda: "13.0")
    pick.forget()
    yield calibration_folder(CARD)
    monkeypatch.undo()
    pick.forget()


def made(card=CARD, **changes):
    """A calibration of three kernels."""
    kernels = tuple(KernelConfig("flash_mma", params) for params in PARAMS)
    genes = {"flash_mma": {p.name: list(p.values) for p in SPACE.parameters}}
    listed = KernelList(card.arch, (card.name,), (), {"plain": 1.05}, genes, kernels, (0, 2), {"16 d64 full": (1, 2)})
    fitted = Correction({}, {"all": [12, 1.2, 1.1]})
    about = calibrations.card_of(card)
    versions = calibrations.versions_here(["flash_mma"]) | {"model": calibrations.model_digest(kernels, about)}
    usual = Calibration(*(about, versions, "2026-11-27", listed, fitted), *({"problems": 4, "regret": 1.05}, 77))
    return replace(usual, **changes)


def test_a_file_says_what_was_found(folder):
    found = made()
    path = calibrations.save(found)
    assert path == folder / FILE and len([*calibrations.every()]) == 1
    again = of_card(CARD)
    assert replace(again, listed=found.listed) == found and vars(again.listed) == vars(found.listed)
    assert found.versions["driver"] == "580.1" and found.versions["nvrtc"] == "13.0"
    assert len(found.versions["templates"]["flash_mma"]) == calibrations.DIGITS
    assert found.card == {"name": "l4", "product": "L4", "sm_count": 58, "arch": "sm_89"}
    assert of_card(GPUS["a10"]) is None
    row = json.loads(path.read_text())
    for name in row:
        with pytest.raises(ValueError, match="it is no calibration"):
            Calibration.of_row({other: value for other, value in row.items() if other != name})
    with pytest.raises(ValueError, match="it is of version 4, and this evoattn reads 3"):
        Calibration.of_row(row | {"version": 4})
    for card in ({"sm_count": "58"}, {"name": 4}, {"arch": None}):
        with pytest.raises(ValueError, match="names no card"):
            Calibration.of_row(row | {"card": row["card"] | card})
    with pytest.raises(ValueError, match="AttributeError"):
        Calibration.of_row(row | {"list": row["list"] | {"kinds": 3}})


@pytest.mark.slow
def test_what_has_changed_since_makes_it_old():
    now = made(listed=replace(made().listed, kinds={"16 d64": (0, 1)}))
    assert now.why_old() == "" and now.current_list() is now.listed
    for changed, why in (
        ({"templates": {"flash_mma": "0"}}, "templates have changed"),
        ({"nvrtc": "12.9"}, "NVRTC was 12.9, and is 13.0"),
        ({"driver": "570"}, "the driver was 570, and is 580.1"),
    ):
        old = replace(now, versions={**now.versions, **changed})
        assert why in old.why_old() and vars(old.current_list()) == vars(old.listed) | {"cards": ("l4 before",)}
        calibrations.save(old)
        pick.forget()
        found = pick.pick(ONE, CARD)
        assert found.estimated and "l4 before" in found.why, "its kernels are known, and not measured"
    calibrations.save(now)
    pick.forget()
    assert not pick.pick(ONE, CARD).estimated


def test_a_correction_says_of_which_cost_model_it_is(folder, monkeypatch):
    now = made(judged=summary([row()]))
    calibrations.save(now)
    listed = CliRunner().invoke(app, ["calibration", "list"]).stdout
    assert not of_card(CARD).model_changed and "77 times, 3 kernels; regret" in listed and "changed" not in listed
    weights = Fitted.weights_of
    monkeypatch.setattr(Fitted, "weights_of", lambda *about: replace(weights(*about), ends=2 * weights(*about).ends))
    old = of_card(CARD)
    assert old.model_changed and not old.why_old() and old.current_list() is old.listed, "its times are as before"
    listed = CliRunner().invoke(app, ["calibration", "list"]).stdout
    assert "The cost model has changed since" in listed and "`evoattn calibrate --budget 1m` fits it anew" in listed
    versions = {name: value for name, value in now.versions.items() if name != "model"}
    assert Calibration.of_row(now.to_row() | {"versions": versions}).model_changed, "a file of before says nothing"


def test_without_a_driver_only_templates_and_nvrtc_count(monkeypatch):
    old = made(versions={**made().versions, "driver": "570"})
    monkeypatch.setattr(calibrations, "driver_version", lambda: None)
    assert old.why_old() == ""


def test_calibrations_have_names_and_go_to_others(tmp_path):
    other = replace(CARD, sm_count=57)
    for card in (CARD, other):
        calibrations.save(made(card))
    assert calibrations.named("l4-57-sm_89").card["sm_count"] == 57
    with pytest.raises(WrongUse, match=r"There is more than one calibration of 'l4'\. There are: l4-57-sm_89, l4-58-"):
        calibrations.named("l4")
    calibrations.remove("l4-57-sm_89")
    assert calibrations.named("l4").card["sm_count"] == 58
    with pytest.raises(WrongUse, match=r"There is no calibration of 'a10'\. There are: l4-58-sm_89\."):
        calibrations.named("a10")
    sent = tmp_path / "sent.json"
    sent.write_text(json.dumps(made(other).to_row()))
    assert calibrations.bring_in(sent).name == "l4-57-sm_89" and of_card(other)
    with pytest.raises(WrongUse, match="There is a calibration of l4-57-sm_89"):
        calibrations.bring_in(sent)
    (calibrations_folder() / "l4-57-sm_89" / FILE).write_text("{}")
    assert [one if isinstance(one, tuple) else one.name for one in calibrations.every()] == [
        ("l4-57-sm_89", "it is no calibration (KeyError: 'version')"),
        "l4-58-sm_89",
    ]
    for name in ("l4", "l4-57-sm_89"):
        calibrations.remove(name)
    with pytest.raises(WrongUse, match="There are: none"):
        calibrations.remove("l4")


def test_kernels_that_today_s_spaces_lack_are_left_out_of_a_file():
    known = made().listed
    odd = (KernelConfig("no_family", {"A": 1}), KernelConfig("flash_mma", PARAMS[0] | {"BLOCK_M": 7}))
    genes = {family: {**values, "BLOCK_M": [*values["BLOCK_M"], 7]} for family, values in known.genes.items()}
    listed = replace(
        known,
        kernels=(known.kernels[0], *odd, known.kernels[1]),
        general=(1, 3),
        kinds={"16 d64 full": (0, 3), "odd": (1,)},
        genes={**genes, "no_family": {"A": (1,)}},
    )
    found = Calibration.of_row(replace(made(), listed=listed).to_row()).listed
    assert (*found.kernels,) == (known.kernels[0], known.kernels[1]) and found.general == (1,)
    assert found.kinds == {"16 d64 full": (0, 1)} and set(found.genes) == {"flash_mma"}
    assert 7 not in found.genes["flash_mma"]["BLOCK_M"]


def test_a_card_that_no_table_names_is_one_of_its_architecture():
    card = {"name": "my card", "product": "My card", "sm_count": 20, "arch": "sm_89"}
    found = calibrations.spec_of(card)
    assert (found.name, found.arch, found.sm_count) == ("my card", "sm_89", 20)
    assert found.smem_per_block == GPUS["l4"].smem_per_block != GPUS["a100"].smem_per_block
    assert calibrations.spec_of(card | {"arch": "sm_77"}).smem_per_block == GPUS["a100"].smem_per_block


def searched(*problems):
    """A group with two right kernels and a wrong one."""
    kernels = [
        Kernel("flash_mma", params, state=state) for params, state in zip(PARAMS, ("right", "right", "wrong: x"))
    ]
    kernels[0].times, kernels[1].times, kernels[2].times = {0: 7.0}, {0: 5.123456}, {0: 1.0}
    return Group("16 d64 full", list(problems), ("flash_mma",), 2.0, {kernel.id: kernel for kernel in kernels})


def test_each_new_time_is_kept_once(folder, monkeypatch):
    group, said, clock = searched(ONE, TWO), [], [100.0]
    first, second, _ = group.kernels.values()
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    engine = SimpleNamespace(groups=[group], compiled=3, measured=5, busy_seconds=5.05)
    with Journal(folder) as journal:
        keeper = Keeper(engine, journal, said.append, 60.0)  # which knows what there was before
        clock[0] += 0.9
        first.times[1], first.rough = 9.0, {1}
        keeper()
        assert not [*times_of(folder)] and not said
        clock[0] += 0.2
        keeper()
        kept = [*times_of(folder)]
        assert len(kept) == 1 and kept[0]["us"] == 9.0 and kept[0]["rough"] is True
        assert kept[0]["problem"] == calibrations.short(TWO) and kept[0]["params"] == first.params
        assert (kept[0]["group"], kept[0]["family"]) == ("16 d64 full", "flash_mma")
        assert kept[0]["with"].startswith("580.1 13.0 ") and len(kept[0]["with"]) == len("580.1 13.0 ") + 16
        second.times[1] = 4.56789
        clock[0] += 8.8
        keeper()
        assert not said
        clock[0] += 0.2
        keeper()
        assert said == ["searching, 50 s left: 3 kernels compiled, 5 times, 2 of 2 problems, GPU busy 50%"]
        assert [row["us"] for row in times_of(folder)] == [9.0, 4.5679] and "rough" not in [*times_of(folder)][1]
        keeper.save()
        assert len([*times_of(folder)]) == 2


def test_a_journal_is_read_by_versions_and_odd_lines_are_passed_over(folder):
    group = searched(ONE, TWO)
    about = {"group": group.name, "family": "flash_mma", "with": calibrate._Versions().of("flash_mma")}
    times = [
        {"problem": calibrations.short(ONE), "us": 3.0},
        {"problem": calibrations.short(TWO), "us": 4.0, "rough": 1},
    ]
    odd = [{"problem": calibrations.short(ONE), "us": us} for us in (0, -1, "x", math.inf, math.nan, None)]
    with Journal(folder) as journal:
        journal.add([about | {"params": PARAMS[0], "times": [*times, *odd, {"us": 1.0}, {"problem": {}, "us": 1.0}]}])
        journal.add([about | {"params": PARAMS[1], "with": "an older driver", "times": times}])
        journal.add([about | {"params": PARAMS[2], "group": "another", "times": times[1:]}])
    today, before = calibrate._journal(CARD)
    assert set(today) == {group.name, "another"} and set(before) == {group.name}
    assert today[group.name].problems == [ONE, TWO] and today["another"].problems == [TWO]
    (kernel,) = today[group.name].kernels.values()
    assert kernel.params == PARAMS[0] and kernel.times == {0: 3.0, 1: 4.0} and kernel.rough == {1}
    assert kernel.state == "right" and today["another"].best(0) == 4.0
    plan = Plan(CARD, [Group(group.name, [TWO], ("flash_mma",)), Group("third", [ONE], ("flash_mma",))], [], 10.0, 0.0)
    calibrate._recall(plan, today, before)
    assert plan.recalled == 1 and plan.old == 2, "of the group's problems"
    assert [kernel.params for kernel in plan.before[group.name].kernels.values()] == [PARAMS[1]]
    assert plan.groups[0].given == [("flash_mma", PARAMS[1])] and not plan.groups[1].kernels
    assert "2 more are of another driver" in plan.describe() and "2 problems in 2 groups" in plan.describe()


@pytest.mark.parametrize(
    ("change", "odd", "taken"),
    [(1.0, 1.0, True), (1.2, 1.02, True), (1.0, 1.1, False)],
    ids=["as before", "all slower by a fifth", "each otherwise"],
)
def test_times_of_other_versions_count_where_those_taken_again_agree(monkeypatch, change, odd, taken):
    group, before = searched(ONE, TWO), searched(ONE, TWO)
    for kernel in (*group.kernels.values(), *before.kernels.values()):
        kernel.times, kernel.rough, kernel.state = {}, set(), "right"
    first, second, third = before.kernels
    for place, name in enumerate((first, second)):
        before.kernels[name].times = {0: 10.0, 1: 20.0}
        group.kernels[name].times = {0: 10.0 * change * odd**place, 1: 20.0 * change * odd**-place}
    before.kernels[third].times, before.kernels[third].rough = {0: 15.0, 1: 60.0}, {1}
    group.kernels[third].state = "new"
    plan = Plan(CARD, [group, Group("another", [ONE], ())], [], 10.0, 0.0, before={group.name: before})
    monkeypatch.setattr(calibrate, "PAIRS", 4)
    now, another = calibrate.with_confirmed(plan)
    assert now.kernels[first].times == group.kernels[first].times and not another.kernels
    found = now.kernels[third]
    assert found.state == ("right" if taken else "new")
    assert found.times == (pytest.approx({0: 15.0 * change, 1: 60.0 * change}) if taken else {})
    assert found.rough == ({1} if taken else set()) and not group.kernels[third].times
    group.kernels[third].state = "wrong: it is off today"
    assert calibrate.with_confirmed(plan)[0].kernels[third] is group.kernels[third]
    monkeypatch.setattr(calibrate, "PAIRS", 5)
    assert not calibrate.with_confirmed(plan)[0].kernels[third].times, "too few were taken again"


class InThisProcess(contextlib.nullcontext):
    """In place of a pool of processes."""

    jobs = 0

    def __init__(self, jobs):
        super().__init__(self)
        InThisProcess.jobs = jobs

    def map(self, call, *given, chunksize):
        return map(call, *given)


def test_times_of_a_group_become_rows_of_the_fit(monkeypatch):
    group = searched(ONE)
    first, second, wrong = group.kernels.values()
    found = calibrate._timed(ONE, [first.config, second.config], [7.0, 5.0], CARD)
    assert [(row.problem, row.family, row.kernel, row.us) for row in found] == [
        (ONE, "flash_mma", kernel.id, us) for kernel, us in ((first, 7.0), (second, 5.0))
    ]
    assert [row.score for row in found] == scores(ONE, [first.config, second.config], CARD, correction=NONE)
    assert all(row.asked for row in found) and first.id == config_id("flash_mma", PARAMS[0])
    wrong.times = {}
    monkeypatch.setattr(calibrate, "ProcessPoolExecutor", InThisProcess)
    rows = calibrate.timed_rows([group], CARD, 3)
    assert [(row.kernel, row.us, row.problem) for row in rows] == [(second.id, 5.123456, ONE), (first.id, 7.0, ONE)]
    assert InThisProcess.jobs == 3 and calibrate.timed_rows([], CARD, None) == []


def test_a_long_search_learns_when_it_knows_something():
    group = Group("16 d64 full", [ONE, TWO], ("flash_mma",))
    long, enough = calibrate.LEARN_SECONDS, 2 * calibrate.LEARN_TIMES
    for seconds, recalled, parts in (
        (long - 1, enough, [(False, 1.0)]),
        (long, enough - 1, [(False, 0.4), (True, 0.7), (True, 1.0)]),
        (long, enough, [(True, 0.5), (True, 1.0)]),
    ):
        assert calibrate.turns(Plan(CARD, [group], [], seconds, 0.0, recalled)) == parts


@pytest.mark.slow
def test_what_would_be_chosen_is_asked_where_it_was_not_timed(monkeypatch):
    group = Group("16 d64 full", [ONE, TWO], ("flash_mma",))
    configs = [KernelConfig("flash_mma", params) for params in PARAMS]
    chosen = {ONE: configs, TWO: [configs[1], configs[0]]}
    known, wrong = (
        Kernel("flash_mma", params, state=state) for params, state in zip(PARAMS[1:], ("right", "wrong: x"))
    )
    known.times[0] = 5.0
    group.kernels |= {known.id: known, wrong.id: wrong}
    monkeypatch.setattr(calibrate, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(calibrate, "_choices", lambda problem, families, gpu: chosen[problem])
    found = list(calibrate.asked(Plan(CARD, [group], [], 1.0, 0.0), 2))
    assert [(kernel.params, indexes) for _, kernel, indexes in found] == [(PARAMS[0], (0, 1)), (PARAMS[1], (1,))]
    assert found[1][1] is known and not found[0][1].times
    monkeypatch.undo()
    first, *others = calibrate._choices(ONE, ("flash_mma",), CARD)
    assert first == pick.portfolio_kernels(ONE, CARD)[0] and others and len({c.id for c in others}) == len(others)


def test_what_was_learnt_is_taken_once_it_is_there(monkeypatch):
    """The search goes on meanwhile; the end waits."""
    group, found, engine, said = Group("16 d64 full", [ONE], ("flash_mma",)), Future(), mock.Mock(), list[str]()
    kernel, made = Kernel("flash_mma", PARAMS[0]), Plan(CARD, [group], [], 1.0, 0.0)
    pool = mock.MagicMock()
    pool.return_value.__enter__.return_value.submit.side_effect = [mock.Mock(), found]
    monkeypatch.setattr(calibrate, "ProcessPoolExecutor", pool)
    with calibrate.learning(made, 2, engine, said.append) as take:
        take()
        assert not said
        found.set_result(("1.03", [(group.name, kernel, (0,))]))
        take()
    assert said == ["learnt: 1.03"] and engine.ask.call_args_list == [mock.call([(group, kernel, (0,))])]
    monkeypatch.setattr(calibrate, "make", lambda *about: about)
    monkeypatch.setattr(calibrate, "first_choice", lambda about: f"by {about[1]}")
    monkeypatch.setattr(calibrate, "asked", lambda *about: [(group, kernel, (0,))])
    monkeypatch.setattr(calibrate, "_HERE", [made])
    assert calibrate._learn(3) == ("by 3", [(group.name, kernel, (0,))])


def is_running(pid):
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["the command", "the process"])
def test_who_learns_ends_with_the_search(monkeypatch, tmp_path, kill):
    """With all that it has started, in a group that Ctrl-C does not reach."""
    told = tmp_path / "pids"

    def lasting(*_):
        other = subprocess.Popen(["sleep", "600"])
        whole_file.write_file(told, f"{os.getpid()} {other.pid} {os.getpgid(other.pid)}")
        other.wait()

    def search():
        while not told.exists():
            time.sleep(0.01)
        if kill == "the command":
            raise KeyboardInterrupt
        os.kill(int(told.read_text().split()[0]), signal.SIGKILL)

    monkeypatch.setattr(calibrate, "make", lasting)
    ends = KeyboardInterrupt if kill == "the command" else FailedRun
    with pytest.raises(ends), calibrate.learning(Plan(CARD, [], [], 1.0, 0.0), 1, mock.Mock(), print):
        search()
    learns, other, group = map(int, told.read_text().split())
    assert group == learns != os.getpgid(0) and not calibrate._HERE
    while any(is_running(pid) for pid in (learns, other)):  # a signal takes its time
        time.sleep(0.01)


def test_problems_are_half_plain_and_fit_the_card():
    found = drawn(("plain", "packed", "cached"), BUILD_SEEDS, 9, CARD)
    kinds = ["packed" if p.varlen else "cached" if p.seqused else "plain" for p in found]
    assert len(set(found)) == len(found) == 9 and [kinds.count(kind) for kind in ("plain", "packed", "cached")] == [
        5,
        2,
        2,
    ]
    assert not any(p.varlen or p.seqused for p in drawn(("plain",), JUDGED_SEEDS, 5, CARD))
    assert all(p.varlen for p in drawn(("packed",), JUDGED_SEEDS, 5, CARD))
    floor = CARD.floor_us(ONE.flops, ONE.bytes, ONE.dtype)
    longest = next(n for n in range(1, 10**6, 50) if CARD.floor_us(n * ONE.flops, 0, ONE.dtype) > calibrate.LONGEST_US)
    assert fits(ONE, CARD) and floor < calibrate.LONGEST_US and not fits(ONE.with_(batch=4 * longest), CARD)
    assert fits(ONE, CARD.with_limits({"dram_bytes": calibrate.MEMORY_SHARE * ONE.bytes}))
    assert not fits(ONE, CARD.with_limits({"dram_bytes": calibrate.MEMORY_SHARE * ONE.bytes - 1}))
    asked = parse_shape("B=1,H=8,S=512,D=64,dtype=bf16,mask=causal,lse=1")
    assert not without_lse(asked).lse and without_lse(asked).causal


def row(kind="", pick_us=5.0, best_us=4.0, sdpa=10.0):
    name = "B=1 x " + ("d64" + (f"+{kind}" if kind else "")) + " full"
    return Checked("p", name, None, "", pick_us, best_us, None, 3, {"flash": sdpa, "efficient": 2 * sdpa, "fa4": 0.1})


def test_what_was_judged_is_told_by_kinds():
    rows = [row(), row(pick_us=16.0, best_us=10.0), row("window", 4.0, 4.0), row("window", None, None)]
    told = summary(rows)
    assert told == {"problems": 4, "regret": round(2 ** (1 / 3), 4), "worst": 1.6, "ahead": 2, "beside": 3}
    assert summary(()) == {"problems": 0, "regret": None, "worst": None, "ahead": 0, "beside": 0}
    assert calibrate._regrets(rows) == {"plain": round(math.sqrt(2), 4), "variants": 1.0}
    assert summary([row(pick_us=8.0, best_us=7.0)])["worst"] == 1.143
    lines = Done(made(), rows).table().split("\n")
    assert len({line.count("|") for line in lines[:5]}) == 1
    assert lines[2:5] == [
        f"| plain | 2 | {math.sqrt(2):.3f} | 1.600 | 1 of 2 | {math.sqrt(2 * 0.625):.2f} |",
        "| window | 2 | 1.000 | 1.000 | 1 of 1 | 2.50 |",
        f"| all | 4 | {2 ** (1 / 3):.3f} | 1.600 | 2 of 3 | {(2 * 0.625 * 2.5) ** (1 / 3):.2f} |",
    ]
    assert lines[5] == "The cost model's first choice takes 1.200 times the best, corrected 1.100."
    assert "was not judged" in calibrate.first_choice(made(correction=NONE))
    assert calibrate._line("plain", [row(pick_us=None)]) == "| plain | 1 | none | none | 0 of 0 | none |"


def test_kernels_that_ship_count_where_they_are_of_the_card(monkeypatch):
    told = []
    fakes = {"fit": lambda *_: NONE, "with_confirmed": lambda _: []}
    for cards in ((CARD.name,), ("h100",)):
        listed = replace(made().listed, cards=cards)
        fakes["shipped_for"] = lambda _, listed=listed: listed
        fakes["select_of"] = lambda groups, gpu, today, *_, **__: told.append(today and today.cards) or made().listed
        for name, fake in fakes.items():
            monkeypatch.setattr(calibrate, name, fake)
        calibrate.make(Plan(CARD, [], [], 1.0, 0.0), 1)
    assert told == [(CARD.name,), None]


def timed(number, kernel, us, score, **asked):
    return Timed(ONE.with_(batch=number), "flash_mma", kernel, us, score, {"stages": 1.0, **asked})


def test_the_fit_s_table_has_the_problems_with_several_kernels():
    rows = [timed(2, "b", 4.0, 2.0), timed(1, "a", 2.0, 2.0, registers=9.0), timed(1, "b", 3.0, 1.0, warps=4.0)]
    table, kinds = correction_fit._table(rows)
    assert table.problem.tolist() == [0, 0] and table.us.tolist() == [2.0, 3.0] and kinds[0][:2] == ("all", "flash_mma")
    mine, names, asked = table.families["flash_mma"]
    assert mine.tolist() == [0, 1] and names == ("stages", "warps") and np.isnan(asked[0, 1]) and asked[1, 1] == 4.0
    assert table.weights == pytest.approx([1.3, 0.3 + math.exp(-0.5 / 0.15)])
    assert (table.over * table.weights).sum() == pytest.approx(0) and table.over[1] - table.over[0] == pytest.approx(
        math.log(3)
    )
    assert table.lost(np.zeros(2)) == pytest.approx([math.log(1.5)]), "the lower score is the slower kernel's"
    trees = SimpleNamespace(
        names=("warps", "stages"), predict=lambda columns: columns[:, 0] * 0.3 + columns[:, 1] - 1.0
    )
    logs = correction_fit._logs(table, {"flash_mma": trees})
    assert np.isnan(logs[0]) and logs[1] == MOST == pytest.approx(1.0)
    assert table.lost(np.array([0.0, MOST])) == pytest.approx([0.0])
    assert correction_fit._by_kind([("all", "a"), ("all",)], np.log([1.2, 1.0]), np.log([1.0, 1.0])) == {
        "all": (2, round(math.sqrt(1.2), 4), 1.0),
        "a": (1, 1.2, 1.0),
    }


def test_trees_that_judge_a_problem_were_not_fitted_to_it(monkeypatch):
    fitted = []
    monkeypatch.setattr(correction_fit, "fit_trees", lambda names, columns, over, *rest: fitted.append(over.tolist()))
    number = np.arange(3 * correction_fit.FOLDS).repeat(correction_fit.LEAST_ROWS)
    one = np.ones(len(number))
    family = np.arange(len(number)), ("stages",), one[:, None]
    table = correction_fit._Table(number, one, one, number * 1.0, one, {"f": family}, number, [], number, [])
    monkeypatch.setattr(correction_fit, "_HERE", [(table, {})])
    for fold in (None, *range(correction_fit.FOLDS)):
        correction_fit._fit_here((fold, "f"))
        assert {int(each) % correction_fit.FOLDS for each in fitted.pop()} == {*range(correction_fit.FOLDS)} - {fold}


TREE = {"names": ["a", "b"], "depth": 1, "base": 0.5, "inner": [True, False, False], "question": [0]}
TREE |= {"feature": [1], "threshold": [1.5], "missing_left": [1.0], "value": [-0.25, 0.25]}
ODD = {
    "names": ("a", ["a", 7]),
    "depth": (64, -1, 1.5),
    "base": (math.nan, None),
    "inner": ([1, 0, 0], [True, True, False], [False, True, False], [True, False], None),
    "question": ([1], [], [0, 0]),
    "feature": ([2], [-1], "b"),
    "threshold": ([math.inf], [], ["1"]),
    "missing_left": ([None], []),
    "value": ([1.0], [0.1, math.nan], None),
}


def test_trees_of_a_file_are_looked_at_before_they_are_walked():
    found = of_row({"trees": {"flash_mma": TREE}, "left_out": {"all": [3, 1.2, 1.1]}, "kernels": {}})
    assert found.to_row() == {"trees": {"flash_mma": TREE}, "left_out": {"all": [3, 1.2, 1.1]}, "kernels": {}}
    low, high = found.trees["flash_mma"].predict(np.array([[0.0, 1.0], [0.0, 2.0]]))
    assert (low, high) == (0.25, 0.75)
    for name, values in ODD.items():
        for value in values:
            with pytest.raises(ValueError, match="a correction is no table of trees"):
                of_row({"trees": {"flash_mma": TREE | {name: value}}, "left_out": {}, "kernels": {}})
    for odd in ("b", {}, {"names": [], "inner": 3, "feature": []}, None):
        with pytest.raises(ValueError, match="a correction is no table of trees"):
            of_row({"trees": {"flash_mma": odd}, "left_out": {}, "kernels": {}})
    for row in ([], {}, {"trees": {}}, None):
        with pytest.raises(ValueError, match="a correction"):
            of_row(row)
    for left_out in ({"all": [1.0, 2.0]}, {"all": [1, 2, "3"]}, [], None):
        with pytest.raises(ValueError, match="does not say how good it is"):
            of_row({"trees": {}, "left_out": left_out, "kernels": {}})


def test_what_is_left_over_of_a_kernel_is_drawn_to_nothing():
    kernels, names, one, places = [("a", "k"), ("a", "l")], ["k", "l"], np.ones(3), np.array([0, 1, 1])
    table = correction_fit._Table(
        *(np.array([0, 0, 1]), one, one, np.array([1.0, -1.0, 7.0]), one, {}, places, kernels, places, names)
    )
    anywhere, own = table.means(np.zeros(3), np.ones(3, bool))
    most, more = correction_fit.SHRUNK_ANYWHERE, correction_fit.SHRUNK
    first, second = 1 / (1 + most), -1 / (2 + most)
    assert anywhere == pytest.approx([first, second])
    left = 1 - (first - second) / 2
    assert own == pytest.approx([left / (1 + more), -left / (2 + more)])
    anywhere, own = table.means(np.zeros(3), np.array([True, False, False]))
    assert anywhere == pytest.approx([first, 0]) and own == pytest.approx([(1 - first / 2) / (1 + more), 0])
