"""What a study's report says, and what it must never say."""

import json
import random
import re
import subprocess
import sys

import optuna
import pytest
from rich.console import Console

from evoattn.model import gpu
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompileInfo, Evaluation, Timing, TrialState
from evoattn.model.space import KernelConfig
from evoattn.report import render_html, render_json, render_table, summarise
from evoattn.report.analysis import group_failures, rank_cost_model
from evoattn.report.importance import importance_of
from evoattn.report.plots import MAX_POINTS, drawn_points
from evoattn.report.rows import Progress
from evoattn.report.screen import Kept
from evoattn.storage import Storage

PROBLEM = AttentionProblem(1, 16, 16, 1024, 1024, 64, name="seed_h100")
EVIL = "</script><script>alert(1)</script><b onmouseover=x>[bold]\x1b[31m"


def timing(us: float, stage: str) -> Timing:
    return Timing(
        tuple(us * f for f in (0.9, 1.0, 1.1)),
        {"stage": stage, "cache": "warm", "run": "the final" if stage == "final" else us},
    )


def add(
    storage, study, state, family="flash_scalar", us=(), cost=None, parents=(), reason="", operator="random", **params
):
    """Record one trial; `us` are (stage, median) pairs."""
    timings = tuple(timing(value, stage) for stage, value in us)
    info = (
        CompileInfo(registers=96, spill_store_bytes=8, spill_load_bytes=4, static_smem_bytes=16) if us or cost else None
    )
    evaluation = Evaluation(state, reason, info, timings=timings, relative_cost=cost)
    return storage.record(study, KernelConfig(family, params), None, evaluation, parents, operator)


@pytest.fixture
def storage(tmp_path):
    opened = Storage.open(str(tmp_path / "db.sqlite"))
    yield opened
    opened.close()


def make_study(storage, offline=False, name="s"):
    versions = {"evoattn": "0.1"} if offline else {"evoattn": "0.1", "device": "NVIDIA H100", "driver": "CUDA 13.0"}
    return storage.create_study(
        name, PROBLEM, gpu.lookup("h100"), offline, "genetic", 7, ("flash_scalar",), versions, {}
    )


@pytest.fixture
def measured(storage):
    """60 right candidates of two genes, of which only A matters; the best two also in a final, beside two SDPA backends."""
    study = make_study(storage)
    for n in range(60):
        us = 40.0 - 5 * (n % 4) + n % 3 * 0.1 - n / 1000
        genes = {"A": n % 4, "B": n // 4 % 2}
        add(
            storage,
            study,
            TrialState.COMPLETE,
            us=[("screen", us)],
            cost=us * 10,
            parents=[n] if n else [],
            operator="mutation",
            **genes,
        )
    best = [t.number for t in storage.leaderboard(study, 2)]
    for number in best:
        storage.add_timing(number, timing(20.0 if number == best[0] else 21.0, "final"))
    storage.add_baseline(study, "flash", timing(99.0, "screen"))
    storage.add_baseline(study, "flash", timing(30.0, "final"))
    storage.add_baseline(study, "math", timing(200.0, "screen"))
    storage.add_baseline(study, "cudnn", None, "Refused: no.")
    for n in range(3):
        add(storage, study, TrialState.INVALID_CONFIG, reason=f"{n + 100} threads are too many.", A=n)
    add(storage, study, TrialState.COMPILE_ERROR, reason=EVIL, A=9)
    return storage, study


def printed(summary, width):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    render_table(summary, console, Kept("/data/evoattn.sqlite"), full=True)
    return console.export_text()


def test_numbers_of_the_leader(measured):
    summary = summarise(*measured, 20)
    row = summary.leaderboard[0]
    assert (row.rank, row.median_us, row.stage) == (1, 20.0, "final")
    assert (row.p10_us, row.p90_us) == (18.0, 22.0)
    assert row.tflops == pytest.approx(4 * 16 * 1024 * 1024 * 64 / 20e-6 / 1e12)
    assert row.peak_share == pytest.approx(row.tflops / gpu.lookup("h100").peak_tflops("fp16"))
    assert row.spill_bytes == 12


def test_speedups_only_between_finals(measured):
    summary = summarise(*measured, 20)
    assert summary.leaderboard[0].speedups == {"flash": 1.5}  # math was timed in no final, cudnn not at all
    assert all(row.speedups == {} for row in summary.leaderboard if row.stage != "final")
    assert {b.backend: b.median_us for b in summary.baselines} == {"flash": 30.0, "math": 200.0, "cudnn": None}


def test_failures_that_differ_in_numbers_are_one(measured):
    invalid, compile_error = summarise(*measured, 5).failures
    assert (invalid.state, invalid.count, invalid.variants) == ("INVALID_CONFIG", 3, 3)
    assert compile_error.count == 1
    assert len(group_failures([(TrialState.TIMEOUT, "x" * 5000 + "\nlog", 2)])[0].reason) < 300


def test_importance_finds_the_gene_that_matters(measured):
    (importance,) = summarise(*measured, 5).importances
    assert importance.trials == 60
    assert list(importance.shares)[0] == "A" and importance.shares["A"] > 0.8


@pytest.mark.parametrize("count", (30, 137, 1200))
def test_importance_is_what_optuna_computes(count):
    rng = random.Random(count)
    values = {"A": [16, 32, 64], "B": [False, True], "C": ["exp2", "poly", "mixed", "none"], "D": list(range(9))}
    results = []
    for _ in range(count):
        params = {name: rng.choice(choices[:-1] if name == "D" else choices) for name, choices in values.items()}
        results.append((params, round(params["A"] / 16 + params["B"] * 0.3 + rng.random(), 1)))  # rounded: ties
    study = optuna.create_study()
    seen = {name: sorted({params[name] for params, _ in results}) for name in values}
    kinds = {name: optuna.distributions.CategoricalDistribution(choices) for name, choices in seen.items()}
    study.add_trials(
        [optuna.trial.create_trial(params=params, distributions=kinds, value=value) for params, value in results]
    )
    expected = optuna.importance.get_param_importances(study, evaluator=optuna.importance.PedAnovaImportanceEvaluator())
    ours = importance_of("f", results).shares
    assert ours == pytest.approx(expected) and list(ours)[0] == list(expected)[0]


def test_report_needs_no_slow_library(measured):
    """torch takes three seconds to import, optuna's importance with scikit-learn one: a report of a day's search has three in all."""
    storage, study = measured
    code = (
        "import sys; from evoattn.cli.main import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: print([n for n in ('torch', 'optuna', 'sklearn', 'cupy') if n in sys.modules])"
    )
    for kind in ("table", "json", "html"):
        words = [sys.executable, "-c", code, "report", "--format", kind, "--db", str(storage.url.database)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert done.stdout.rstrip().endswith("[]"), done.stdout[-200:]


def test_importance_of_few_trials_says_so(storage):
    study = make_study(storage)
    add(storage, study, TrialState.COMPLETE, us=[("screen", 5.0)], A=1)
    (importance,) = summarise(storage, study, 5).importances
    assert not importance.shares and "too few" in importance.why_not


def test_cost_model_rank(measured, storage):
    rank = summarise(*measured, 5).cost_model
    assert rank.trials == 60 and rank.correlation > 0.95
    trials = list(storage.iter_trials(measured[1]))
    assert rank_cost_model(trials[:9]) is None
    from scipy.stats import spearmanr

    pairs = [(t.relative_cost, t.timing.median_us) for t in trials if t.timing]
    assert rank.correlation == pytest.approx(spearmanr(*zip(*pairs, strict=True)).statistic)


def test_progress_and_lineage(measured):
    summary = summarise(*measured, 5)
    best = [summary.progress.value[i] for i in summary.progress.improvements]
    assert best == sorted(best, reverse=True) and best[-1] == min(summary.progress.value)
    first, second = summary.lineage[:2]
    assert first.trial == summary.leaderboard[0].trial and first.parents == (second.trial,)
    assert first.changes["A"] == (second.trial % 4 - 1, 3)


def test_what_each_improvement_was_and_which_genes_won(measured):
    summary = summarise(*measured, 5)
    first, *later = summary.improvements
    assert first.gain is None and all(step.gain > 0 for step in later)
    assert [step.found.value for step in summary.improvements] == [
        summary.progress.value[i] for i in summary.progress.improvements
    ]
    best = {gene.gene: gene for gene in reversed(summary.genes)}
    assert best["A"].value == 3 and best["A"].top_share == 1.0 and best["A"].share == pytest.approx(0.25)
    assert "Values that won" in printed(summary, 160) and "Improvements" in printed(summary, 160)


def test_the_effect_of_a_gene_is_paired(storage):
    study = make_study(storage)
    for b in range(4):
        for a, us in ((0, 10.0), (1, 8.0)):
            add(storage, study, TrialState.COMPLETE, us=[("screen", us * (b + 1))], A=a, B=b)
    effects = {(g.gene, g.value): (g.effect, g.pairs) for g in summarise(storage, study, 5).genes}
    assert effects["A", 1] == (pytest.approx(0.8), 4) and effects["A", 0] == (pytest.approx(1.25), 4)
    assert effects["B", 0] == (None, 2)


def test_offline_study_has_no_times_anywhere(storage):
    study = make_study(storage, offline=True)
    for n in range(40):
        add(storage, study, TrialState.ESTIMATED, cost=1000.0 + n, A=n % 4, B=n % 2, parents=[n] if n else [])
    add(storage, study, TrialState.COMPLETE, us=[("final", 1.0)], A=1)  # a stray: never beside estimates
    storage.add_baseline(study, "flash", timing(30.0, "final"))
    summary = summarise(storage, study, 50)
    assert {row.state for row in summary.leaderboard} == {"ESTIMATED"} and len(summary.leaderboard) == 40
    text = json.loads(render_json(summary))
    assert text["kind"] == "estimated" and not text["baselines"] and not text["roofs"] and text["cost_model"] is None
    for row in text["leaderboard"]:
        assert [row[k] for k in ("median_us", "p10_us", "p90_us", "tflops", "peak_share")] == [None] * 5 and row[
            "speedups"
        ] == {}
    body = render_html(summary).split("<script")[0]
    for shown in (printed(summary, 160), body):
        assert "not a time" in shown and "µs" not in shown and "SDPA" not in shown and "×" not in shown
        assert not re.search(r"\d TFLOP/s", shown)


def test_page_is_whole_and_escapes_the_database(measured):
    page = render_html(summarise(*measured, 20))
    assert "alert(1)</script>" not in page and "<b onmouseover" not in page
    assert page.count("</script>") == page.count("<script") == 3
    policy = re.search(r'Content-Security-Policy"\s+content="([^"]*)"', page)[1]
    assert (
        policy.startswith("default-src 'none'")
        and policy.count("'sha256-") == 2
        and "script-src 'unsafe-inline'" not in policy
    )
    head = page.split("<script")[0]
    assert not re.search(r"(src|href)\s*=|url\(|@import", head)
    assert all(f'id="plot-{name}"' in page for name in ("progress", "roofline", "importance-0"))


def test_page_of_an_empty_study(storage):
    summary = summarise(storage, make_study(storage), 5)
    assert "No candidate is right yet" in render_html(summary)
    assert "No candidate is right yet" in printed(summary, 100)
    assert json.loads(render_json(summary))["leaderboard"] == []


@pytest.mark.parametrize("width", (100, 160))
def test_table_fits_and_keeps_the_terminal_safe(measured, width):
    text = printed(summarise(*measured, 20), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "\x1b" not in text and "[bold]" in text and "…" not in text
    leader = next(line for line in text.splitlines() if line.split()[:1] == ["1"])
    assert "20.00" in leader and "1.50" in leader and "COMPLETE" in leader


def test_json_survives_infinities(storage):
    study = make_study(storage, offline=True)
    add(storage, study, TrialState.ESTIMATED, cost=float("inf"), A=1)
    summary = summarise(storage, study, 5)
    assert json.loads(render_json(summary), parse_constant=pytest.fail)["leaderboard"][0]["relative_cost"] is None
    assert 'id="plot-progress"' not in render_html(summary)


def test_a_time_of_zero_is_no_time(storage):
    study = make_study(storage)
    add(storage, study, TrialState.COMPLETE, us=[("final", 0.0)], A=1)
    storage.add_baseline(study, "flash", timing(0.0, "final"))
    summary = summarise(storage, study, 5)
    assert summary.leaderboard[0].tflops is None and not summary.baselines and not summary.progress.value
    assert render_html(summary) and printed(summary, 160)


def test_many_points_are_thinned_but_no_improvement_is_lost():
    improvements = [0, 7, 19_999]
    drawn = drawn_points(
        Progress("median_us", list(range(20_000)), [0.0] * 20_000, ["f"] * 20_000, [1.0] * 20_000, improvements)
    )
    assert len(drawn) <= MAX_POINTS + len(improvements) and set(improvements) <= set(drawn)


def test_a_tie_in_the_final_is_said_to_be_one_and_the_disqualified_are_off_the_leaderboard(storage):
    study = make_study(storage)
    numbers = [add(storage, study, TrialState.COMPLETE, us=[("screen", 10.0)], cost=1.0, A=n).number for n in range(4)]
    wobble = [0.01 * (n % 5) for n in range(25)]
    finals = {
        numbers[0]: [10 + w for w in wobble],
        numbers[1]: [10.001 + w for w in reversed(wobble)],
        numbers[2]: [10.9 + w for w in wobble],
        numbers[3]: [5.0 + w for w in wobble],
    }
    for number, samples in finals.items():
        protocol = {"stage": "final", "run": "f"} | (
            {"disqualified": "In the final: it lies."} if number == numbers[3] else {}
        )
        storage.add_timing(number, Timing(tuple(samples), protocol))
    summary = summarise(storage, study, 1)
    assert summary.leaderboard[0].trial == numbers[0]
    assert summary.verdict.startswith(f"Trial {numbers[0]} ties with trial {numbers[1]}:")
    assert [t.number for t in storage.leaderboard(study, 9)] == numbers[:3]
    assert storage.trial(numbers[3]).disqualified == "In the final: it lies."
    assert summary.verdict in render_html(summary) and json.loads(render_json(summary))["verdict"] == summary.verdict
    storage.add_timing(numbers[1], Timing(tuple((10 + w) * 1.001 for w in wobble), {"stage": "final", "run": "f"}))
    assert "ties with" in summarise(storage, study).verdict  # a gap under `ranking.RESOLUTION` in every round is none
    storage.add_timing(numbers[1], Timing(tuple(10.5 + w for w in wobble), {"stage": "final", "run": "f"}))
    assert "is ahead of all other finalists" in summarise(storage, study).verdict


def test_what_the_search_gained_over_the_best_starting_config_is_one_line(storage):
    study = make_study(storage)
    operators = ("mutation", "starting", "starting", "random")
    numbers = [
        add(storage, study, TrialState.COMPLETE, us=[("screen", 9.0)], operator=o, A=n).number
        for n, o in enumerate(operators)
    ]
    assert not summarise(storage, study).search_gain
    for number, us in zip(numbers[:3], (8.0, 10.0, 12.0), strict=True):
        storage.add_timing(
            number, Timing(tuple(us + 0.01 * (n % 5) for n in range(25)), {"stage": "final", "run": "f"})
        )
    summary = summarise(storage, study, 1)
    line = f"The best starting config, trial {numbers[1]}, takes 10.02 µs in the same final: the search gained 20.0%."
    assert summary.search_gain == line and line in printed(summary, 200) and line in render_html(summary)
    assert json.loads(render_json(summary))["search_gain"] == line
    again = [Timing(tuple(us + 0.01 * (n % 5) for n in range(25)), {"stage": "final", "run": "g"}) for us in (8.0, 8.0)]
    for number, timing in zip(numbers[:2], again, strict=True):
        storage.add_timing(number, timing)
    assert summarise(storage, study).search_gain.endswith(
        "the search gained 0.0%, which its rounds do not tell from nothing."
    )
