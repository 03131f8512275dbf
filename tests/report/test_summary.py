"""What a study's report says, and what it must never say. Which parameters matter, and what their values are worth."""

import io
import json
import random
from statistics import median

import numpy as np
import optuna
import pytest
from rich.console import Console

from evoattn.model import gpu
from evoattn.model.records import Timing, TrialState
from evoattn.report import render_html, render_json, summarise
from evoattn.report.analysis import Column, columns_of, group_failures, importance_of, rank_cost_model
from evoattn.report.screen import Kept, print_result
from evoattn.report.show import print_trial
from evoattn.report.summary import FINALISTS
from evoattn.storage import Storage
from evoattn.storage.course import Tried
from tests.report.report_studies import add, make_study, printed, timing


def test_numbers_of_the_leader(measured):
    summary = summarise(*measured, 20)
    row = summary.leaderboard[0]
    assert (row.rank, row.median_us, row.stage) == (1, 20.0, "final")
    assert (row.p10_us, row.p90_us) == (18.0, 22.0)
    assert row.tflops == pytest.approx(4 * 16 * 1024 * 1024 * 64 / 20e-6 / 1e12)
    assert row.peak_share == pytest.approx(row.tflops / gpu.lookup("h100").peak_tflops("fp16"))
    assert (row.registers, row.spill_bytes) == (96, 12)


def test_a_candidate_that_was_never_compiled_has_no_resources(storage):
    study = make_study(storage, offline=True)
    add(storage, study, TrialState.ESTIMATED, A=1)
    (row,) = summarise(storage, study).leaderboard
    assert (row.registers, row.spill_bytes, row.smem_bytes, row.launches) == (None, None, None, ())


@pytest.mark.slow
def test_speedups_only_between_finals(measured):
    summary = summarise(*measured, 20)
    assert summary.leaderboard[0].speedups == {"flash": 1.5}  # math was timed in no final, cudnn not at all
    assert all(row.speedups == {} for row in summary.leaderboard if row.stage != "final")
    assert {b.backend: b.median_us for b in summary.baselines} == {"flash": 30.0, "math": 200.0, "cudnn": None}


@pytest.mark.slow
def test_failures_that_differ_in_numbers_are_one(measured):
    invalid, compile_error = summarise(*measured, 5).failures
    assert (invalid.state, invalid.count, invalid.variants) == ("INVALID_CONFIG", 3, 3)
    assert compile_error.count == 1
    assert len(group_failures([(TrialState.TIMEOUT, "x" * 5000 + "\nlog", 2)])[0].reason) < 300


@pytest.mark.slow
def test_cost_model_rank(measured, storage):
    rank = summarise(*measured, 5).cost_model
    assert rank.trials == 60 and rank.correlation > 0.95
    trials = list(storage.iter_trials(measured[1]))
    assert rank_cost_model(trials[:9]) is None
    from scipy.stats import spearmanr

    pairs = [(t.relative_cost, t.timing.median_us) for t in trials if t.timing]
    assert rank.correlation == pytest.approx(spearmanr(*zip(*pairs, strict=True)).statistic)


@pytest.mark.slow
def test_progress_and_lineage(measured):
    summary = summarise(*measured, 5)
    best = [summary.progress.value[i] for i in summary.progress.improvements]
    assert best == sorted(best, reverse=True) and best[-1] == min(summary.progress.value)
    first, second = summary.lineage[:2]
    assert first.trial == summary.leaderboard[0].trial and first.parents == (second.trial,)
    assert first.changes["A"] == (second.trial % 4 - 1, 3)


def test_a_family_behind_all_that_are_ranked_is_shown_by_its_best(storage):
    study = make_study(storage)
    for n in range(FINALISTS):
        add(storage, study, TrialState.COMPLETE, us=[("screen", 10.0 + n)], A=n)
    for us in (400.0, 300.0, 500.0):
        add(storage, study, TrialState.COMPLETE, "flash_mma", us=[("screen", us)], A=us)
    ahead, behind = summarise(storage, study, 5).best_of_families
    assert (ahead.family, ahead.median_us, ahead.rank) == ("flash_scalar", 10.0, 1)
    assert (behind.family, behind.median_us, behind.rank, behind.registers) == ("flash_mma", 300.0, 2, 96)


@pytest.mark.slow
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
    assert 'id="progress"' not in render_html(summary)


def test_a_time_of_zero_is_no_time(storage):
    study = make_study(storage)
    add(storage, study, TrialState.COMPLETE, us=[("final", 0.0)], A=1)
    storage.add_peer(study, "flash", timing(0.0, "final"))
    summary = summarise(storage, study, 5)
    assert summary.leaderboard[0].tflops is None and not summary.baselines and not summary.progress.value
    assert render_html(summary) and printed(summary, 160)


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
    assert json.loads(render_json(summary))["progress"]["configs"] == {}, "millions would be"
    again = [Timing(tuple(us + 0.01 * (n % 5) for n in range(25)), {"stage": "final", "run": "g"}) for us in (8.0, 8.0)]
    for number, tied in zip(numbers[:2], again, strict=True):
        storage.add_timing(number, tied)
    assert summarise(storage, study).search_gain.endswith(
        "the search gained 0.0%, which its rounds do not tell from nothing."
    )


def test_the_energy_and_the_board_of_a_final_are_shown(storage):
    study = make_study(storage)
    trial = add(storage, study, TrialState.COMPLETE, us=[("screen", 20.0)])
    assert " mJ " not in printed(summarise(storage, study, 5), 160)
    board = {"energy_mj_per_call": 6.25, "sm_mhz": [1900, 1980], "power_w": [310.2, 480.0], "temperature_c": [41, 47]}
    final = timing(20.0, "final")
    storage.add_timing(trial.number, Timing(final.samples_us, final.protocol | board))
    table = printed(summarise(storage, study, 5), 160)
    assert " mJ " in table and "6.25" in table
    console = Console(width=160, record=True, file=io.StringIO())
    print_trial(storage, storage.trial(trial.number), console)
    shown = " ".join(console.export_text().split())
    assert "6.25 mJ per call of the whole board; 1900-1980 MHz; 310-480 W; 41-47 °C" in shown


def test_one_screen_reads_the_best_alone(measured):
    class OnlyTheBest(Storage):
        def iter_trials(self, *args, **words):
            raise AssertionError("a study may have 200,000 trials")

    storage, study = measured
    only = OnlyTheBest(storage.url)
    short, whole = summarise(only, study, course=False), summarise(storage, study)
    only.close()
    assert on_one_screen(short) == on_one_screen(whole)


def on_one_screen(summary):
    console = Console(width=80, record=True, file=io.StringIO())
    print_result(summary, console, Kept("/data/evoattn.sqlite"))
    return console.export_text()


def test_a_measured_study_ranks_no_estimates(storage):
    """As a database may hold that somebody has changed."""
    study = make_study(storage)
    add(storage, study, TrialState.ESTIMATED, cost=12.0, A=1)
    summary = summarise(storage, study)
    assert not summary.best_of_families and not summary.progress.value
    assert "<html" in render_html(summary)


def test_importance_finds_the_gene_that_matters(measured):
    (importance,) = summarise(*measured, 5).importances
    assert importance.trials == 60
    assert next(iter(importance.shares)) == "A" and importance.shares["A"] > 0.8


@pytest.mark.parametrize("count", (30, 137, 1200))
@pytest.mark.slow
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
    ranked = sorted(enumerate(results), key=lambda result: result[1][1])
    trials = [Tried(n, "f", params, TrialState.COMPLETE, None, (), "", "", us) for n, (params, us) in ranked]
    columns = columns_of(trials)
    assert [columns["A"].values[code] for code in columns["A"].codes] == [trial.config["A"] for trial in trials]
    assert columns["A"].values == list(dict.fromkeys(trial.config["A"] for trial in trials))
    ours = importance_of("f", [us for _, (_, us) in ranked], columns).shares
    assert ours == pytest.approx(expected) and next(iter(ours)) == next(iter(expected))


def test_importance_of_few_trials_says_so(storage):
    study = make_study(storage)
    add(storage, study, TrialState.COMPLETE, us=[("screen", 5.0)], A=1)
    (importance,) = summarise(storage, study, 5).importances
    assert not importance.shares and "too few" in importance.why_not


def test_nothing_matters_where_all_but_one_took_as_long():
    columns = {"A": Column([16, 32], np.arange(60) % 2), "B": Column([1, 2], np.arange(60) // 30)}
    assert importance_of("f", [1.0] + [2.0] * 59, columns).shares == {"A": 0.0, "B": 0.0}


@pytest.mark.slow
def test_what_each_improvement_was_and_which_genes_won(measured):
    summary = summarise(*measured, 5)
    first, *later = summary.improvements
    assert first.gain is None and all(step.gain > 0 for step in later)
    assert [step.found.value for step in summary.improvements] == [
        summary.progress.value[i] for i in summary.progress.improvements
    ]
    best = {gene.gene: gene for gene in reversed(summary.genes)}
    assert best["A"].value == 3 and best["A"].top_share == 1.0 and best["A"].share == pytest.approx(0.25)
    assert "Improvements" in printed(summary, 160)
    assert "Values that won" not in printed(summary, 160)  # B is worth 0.1 %, and too few pairs tell of A


def test_the_effect_of_a_gene_is_paired(storage):
    study = make_study(storage)
    for b in range(4):
        for a, us in ((0, 10.0), (1, 8.0)):
            add(storage, study, TrialState.COMPLETE, us=[("screen", us * (b + 1))], A=a, B=b)
    effects = {(g.gene, g.value): (g.effect, g.pairs) for g in summarise(storage, study, 5).genes}
    assert effects["A", 1] == (pytest.approx(0.8), 4) and effects["A", 0] == (pytest.approx(1.25), 4)
    assert effects["B", 0] == (None, 2)


def test_effects_are_those_of_every_pair_that_differs_in_one_gene_alone(storage):
    rng, study = random.Random(7), make_study(storage)
    found = []
    for _ in range(120):
        genes = {"A": rng.choice((1, 2, 3)), "B": rng.choice((1, 2)), "C": rng.choice((True, False))}
        genes |= {"D": rng.choice((5, 6))} if rng.random() < 0.2 else {}
        found.append((rng.choice((1.5, 1 + rng.random())), genes))
        add(storage, study, TrialState.COMPLETE, us=[("screen", found[-1][0])], **genes)
    best = {}
    for us, genes in sorted(found, key=lambda pair: pair[0]):
        best.setdefault(frozenset(genes.items()), us)
    ratios = {}
    for genes, us in best.items():
        for name, value in genes:
            others = [t for g, t in best.items() if len(g ^ genes) == 2 and {n for n, _ in g ^ genes} == {name}]
            if others:
                ratios.setdefault((name, value), []).append(us / min(others))
    shown = {(gene.gene, gene.value): gene for gene in summarise(storage, study).genes}
    assert {name for name, _ in shown} >= {"A", "B", "C"}
    for key, gene in shown.items():
        assert gene.pairs == len(ratios.get(key, ()))
        if gene.pairs >= 3:
            assert gene.effect == pytest.approx(median(ratios[key]))
