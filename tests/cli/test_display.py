"""The live view: the best and its config, the ratio to the best peer, convergence, the time since it improved. The
last screen of a search, and the report: at most 24 lines of 80 columns, no word broken, what comes next. The last
screen of a search, and the report: at most 24 lines of 80 columns, no word broken, what comes next."""

import io
import shlex
from dataclasses import replace

import pytest
from rich.console import Console

from evoattn.cli.display import Display, best_sentence, clock, curve
from evoattn.engine.progress import Progress
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompileInfo, Evaluation, Timing, Trial, TrialState
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig, spelling
from evoattn.report import render_table, summarise
from evoattn.report.screen import Kept
from evoattn.report.text import command, wrapped


def trial(number: int, us: float | None = None, cost: float | None = None) -> Trial:
    state = TrialState.ESTIMATED if us is None else TrialState.COMPLETE
    timings = () if us is None else (Timing((us,) * 5, {"stage": "screen"}),)
    config = {"BLOCK_M": 64, "BLOCK_N": 128, "SMEM_LAYOUT": "swizzled"}
    return Trial(number, 1, "flash_mma", config, "", state, "", None, None, None, timings, cost, (), "", "", 0.0)


class Elapsed(Progress):
    """A progress whose clock stands still."""

    @property
    def seconds(self) -> float:
        return 100.0


def shown(progress: Progress, width: int = 80) -> str:
    out = io.StringIO()
    display = Display(Console(file=out, width=width), progress, "evoattn search", 600.0, None)
    Console(file=out, width=width).print(display.panel())
    return out.getvalue()


@pytest.fixture
def measured() -> Progress:
    progress = Elapsed(started=0.0, recorded=12, best=trial(7, us=20.0))
    progress.improvements = [(10.0, 40.0), (30.0, 25.0), (75.0, 20.0)]
    progress.peers = {"math": 200.0, "flash": 30.0, "cudnn": 26.0}
    progress.states[TrialState.COMPLETE] = 12
    return progress


def test_the_panel_says_how_the_search_stands(measured):
    lines = shown(measured).splitlines()
    assert all(len(line) <= 80 for line in lines)
    words = " ".join(" ".join(line.strip("│╭╮╰╯─ ") for line in lines).split())
    assert "trial 7 (flash_mma), 20.00 µs, 1.30× the speed of SDPA cudnn, found 0:25 ago" in words
    assert "BLOCK_M=64 BLOCK_N=128 SMEM_LAYOUT=swizzled" in words
    assert "40.00 to 20.00 µs, 3 improvements" in words and "8:20 left" in words


def test_an_offline_panel_has_no_times():
    progress = Elapsed(started=0.0, best=trial(7, cost=1500.0), improvements=[(1.0, 3000.0), (2.0, 1500.0)])
    text = shown(progress)
    assert "relative cost 1,500" in text and "3,000 to 1,500" in text and "µs" not in text and "speed" not in text


def test_the_curve_falls_from_the_first_value_to_the_best():
    bars = curve([(0.0, 40.0), (50.0, 30.0), (90.0, 20.0)], 100.0, columns=10)
    assert bars == "████▅▅▅▅▁▁"
    assert curve([], 10.0) == curve([(1.0, 5.0)], 10.0) == ""
    assert len(curve([(5.0, 2.0), (5.0, 1.0)], 5.0, columns=7)) == 7


def test_without_a_terminal_there_is_a_line_now_and_then(measured):
    out = io.StringIO()
    with Display(Console(file=out, width=160), measured, "evoattn search", None, 20) as display:
        display.refresh()
        display.refresh()
    assert out.getvalue().count("\n") == 1
    for part in ("1:40: 8 trials left, 12 COMPLETE; 0.1 candidates per second", "1.30× the speed", "found 0:25 ago"):
        assert part in out.getvalue()


def test_a_tie_is_called_a_tie(measured):
    measured.tied_with = (3, 4)
    assert "20.00 µs, a tie with trials 3, 4, 1.30×" in best_sentence(measured)
    assert best_sentence(Progress()) == "none yet"
    assert (clock(65), clock(3605), clock(-1)) == ("1:05", "1:00:05", "0:00")


PROBLEM = AttentionProblem(8, 32, 8, 1024, 4096, 128, "bf16", "causal_lower_right", "bshd")
PLACE = "/home/somebody/.local/share/evoattn/evoattn.sqlite"


def longest(family: str) -> KernelConfig:
    """The config of a family that takes most room to print."""
    space = load_space(family, GPUS["h100"])
    return space.make_config({p.name: max(p.values, key=lambda v: len(spelling(v))) for p in space.parameters})


def timing(us: float, spread: float = 0.01, stage: str = "final") -> Timing:
    samples = tuple(us * (1 + spread * (n % 5 - 2)) for n in range(30))
    return Timing(samples, {"stage": stage, "run": "r"})


def measured_study(
    storage, family="three_kernel", times=(2000.0, 2500.0), peers=(("flash", 3000.0), ("cudnn", 2600.0))
):
    """A study with a final: the best of `times` is the given family's, the others are of it too."""
    study = storage.create_study(
        "b8_h32_kv8_sq1024_sk4096_d128_bf16_lower_right_bshd_h100", PROBLEM, GPUS["h100"], False, "genetic", 0,
        (family,), {"device": "NVIDIA H100 80GB HBM3"}, {},
    )  # fmt: skip
    config = longest(family)
    for n, us in enumerate(times):
        operator = "starting" if n else "mutation"
        evaluation = Evaluation(TrialState.COMPLETE, "", CompileInfo(registers=128), None, (timing(us),))
        other = replace(config, params={**config.params, "BLOCK_M": n} if n else config.params)
        storage.record(study, other, None, evaluation, (), operator)
    for name, us in peers:
        storage.add_peer(study, name, timing(us))
    return study


def printed(storage, study, kept: Kept | None = None, full: bool = False, width: int = 80) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    render_table(summarise(storage, study), console, kept or Kept(PLACE), full)
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_result_fits_a_screen_of_24_lines_and_80_columns(storage, family):
    """A search says in two lines before it how it ended."""
    study = measured_study(storage, family)
    lines = printed(storage, study).splitlines()
    assert len(lines) <= 22 and all(len(line) <= 80 for line in lines), "\n".join(lines)


def test_the_result_says_the_winner_its_peer_how_sure_it_is_and_where_it_is_kept(storage):
    text = " ".join(printed(storage, measured_study(storage)).split())
    assert "Best kernel: trial 1 (three_kernel), 2000.00 µs, 240.6 TFLOP/s (24% of peak)" in text
    assert "1.30× the speed of SDPA cudnn, the fastest peer (2600.00 µs)." in text
    assert "No tie: it is ahead of every other finalist" in text
    assert "20.0% less than that of the best starting config, trial 2" in text
    assert "Kept: trial 1 of study b8_h32_kv8_sq1024_sk4096_d128_bf16_lower_right_bshd_h100" in text
    assert PLACE in text
    for step in ("evoattn export best -o", "evoattn report --format html -o", 'evoattn.load("best")'):
        assert step in text


def test_a_place_under_the_home_folder_is_short_but_not_in_commands(storage, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    place = "/home/ada/.local/share/evoattn/evoattn.sqlite"
    text = printed(storage, measured_study(storage), Kept(place, db=place), width=200)
    assert "  in ~/.local/share/evoattn/evoattn.sqlite\n" in text
    assert text.count(f"--db {place}") == 2 and f"db='{place}'" in text


def test_a_tie_names_the_trials(storage):
    text = " ".join(printed(storage, measured_study(storage, times=(20.0, 20.0, 20.0))).split())
    assert "A tie with trials 2, 3: the final does not tell them apart." in text and "No tie" not in text
    assert "ahead" not in text


def test_the_config_can_be_pasted(storage):
    """The lines of the config, put together as a shell does, are options that a search takes."""
    lines = printed(storage, measured_study(storage)).splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("Its config")) + 1
    end = lines.index("", begin)
    assert all(line.endswith(" \\") for line in lines[begin : end - 1])
    words = " ".join(line.rstrip("\\") for line in lines[begin:end]).split()
    assert words[:2] == ["--family", "three_kernel"] and words[2::2] == ["--set"] * (len(words) // 2 - 1)
    space = load_space("three_kernel", GPUS["h100"])
    part = space.restricted({name: (value,) for name, value in (word.split("=") for word in words[3::2])})
    assert {p.name: p.values[0] for p in part.parameters} == longest("three_kernel").params


def test_commands_name_a_database_and_a_study_that_they_would_not_find_themselves(storage):
    study = measured_study(storage)
    text = printed(storage, study, Kept("/tmp/x.sqlite", "/tmp/my data.sqlite", study.name))
    joined = " ".join(text.replace("\\\n", " ").split())
    assert f"evoattn export best --study {study.name} --db '/tmp/my data.sqlite' -o best.cu" in joined
    assert f"evoattn report --study {study.name} --db '/tmp/my data.sqlite' --format html" in joined
    assert f"evoattn.load(\"best\", study='{study.name}', db='/tmp/my data.sqlite')" in joined


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_word_is_broken_in_the_middle(storage, width):
    """Every word on the screen is one that stands on a wider one too: below 140 columns the tables are others."""
    study = measured_study(storage, times=(20.0, 25.0, 22.0))
    for n in range(3):
        reason = f"{n} threads do not divide into warps of COMPUTE_WARPS=4 with BLOCK_M={n}, whatever the rest is."
        storage.record(study, longest("flash_mma"), None, Evaluation(TrialState.INVALID_CONFIG, reason))
    whole = {word for wide in (139, 2000) for word in printed(storage, study, full=True, width=wide).split()}
    narrow = [word for word in printed(storage, study, full=True, width=width).split() if word != "\\"]
    broken = [word for word in narrow if word not in whole and set(word) != {"─"}]
    assert not broken


@pytest.mark.slow
def test_an_offline_result_has_a_relative_cost_and_says_what_that_is(storage):
    study = storage.create_study("s", PROBLEM, GPUS["l4"], True, "genetic", 0, ("flash_mma",), {}, {})
    evaluation = Evaluation(TrialState.ESTIMATED, "", CompileInfo(registers=128), relative_cost=1234.0)
    storage.record(study, longest("flash_mma"), None, evaluation)
    text = printed(storage, study)
    assert len(text.splitlines()) <= 24
    assert "relative cost 1,234; never timed" in text and "not a time" in " ".join(text.split())
    assert "µs" not in text and "×" not in text and "TFLOP" not in text
    commands = text.partition("On the l4 itself these time it:\n")[2].replace(" \\\n", "").splitlines()
    assert [shlex.split(line)[1] for line in commands] == ["try", "search", "report"]
    _, _, family, *rest = shlex.split(commands[0])
    assert family == "flash_mma" and len(rest) == len(longest("flash_mma").params) + 2
    assert parse_shape(rest[-1]) == PROBLEM


def test_a_study_without_a_right_trial_says_so_and_how_to_see_why(storage):
    study = storage.create_study("s", PROBLEM, GPUS["l4"], True, "genetic", 0, ("flash_mma",), {}, {})
    storage.record(study, longest("flash_mma"), None, Evaluation(TrialState.INVALID_CONFIG, "It cannot be."))
    text = printed(storage, study)
    assert "No candidate is right yet: 1 trial, 1 INVALID_CONFIG.\n  Most often: It cannot be.\n" in text
    assert "evoattn report --full" in text


def test_values_that_tell_nothing_have_no_row(storage):
    assert "Values that won" not in printed(storage, measured_study(storage), full=True)


def test_text_breaks_between_words_and_commands_between_options():
    assert wrapped("see `--set NAME=V1-V2` now", 12) == ["see `--set", "  NAME=V1-V2`", "  now"]
    lines = command([["evoattn", "search"], ["--study", "a b"], ["--db", "x" * 30]], 40)
    assert lines == ["  evoattn search --study 'a b' \\", f"    --db {'x' * 30}"]
