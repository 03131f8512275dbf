"""Which parameters matter, and what their values are worth."""

import random

import optuna
import pytest

from evoattn.model.records import TrialState
from evoattn.report import summarise
from evoattn.report.analysis import importance_of
from tests.report.report_studies import add, make_study, printed


def test_importance_finds_the_gene_that_matters(measured):
    (importance,) = summarise(*measured, 5).importances
    assert importance.trials == 60
    assert next(iter(importance.shares)) == "A" and importance.shares["A"] > 0.8


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
    assert ours == pytest.approx(expected) and next(iter(ours)) == next(iter(expected))


def test_importance_of_few_trials_says_so(storage):
    study = make_study(storage)
    add(storage, study, TrialState.COMPLETE, us=[("screen", 5.0)], A=1)
    (importance,) = summarise(storage, study, 5).importances
    assert not importance.shares and "too few" in importance.why_not


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
