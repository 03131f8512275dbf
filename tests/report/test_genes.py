"""Which parameters matter, and what their values are worth."""

import random
from statistics import median

import optuna
import pytest

from evoattn.model.records import TrialState
from evoattn.report import summarise
from evoattn.report.analysis import columns_of, importance_of
from evoattn.storage.course import Tried
from tests.report.report_studies import add, make_study, printed


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
