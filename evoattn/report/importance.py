"""Which parameters matter, by Optuna's PED-ANOVA over the trials of each family."""

from __future__ import annotations

import warnings
from typing import Any

from evoattn.report.data import Importance

MIN_TRIALS = 30
"""Below it the best tenth is fewer than three trials, and says nothing about parameters."""
MAX_TRIALS = 1000
"""Optuna takes 0.4 ms a trial; an even sample over the ranking says the same."""


def importance_of(family: str, results: list[tuple[dict[str, Any], float]]) -> Importance:
    """`results` are (parameters, value to minimise) of the right trials of one family.

    PED-ANOVA (Watanabe et al., IJCAI 2023) asks which parameters set the best tenth apart from all: what a search wants to
    know, in milliseconds, where fANOVA's forests take seconds and answer for the bad regions too.
    """
    if len(results) < MIN_TRIALS:
        return Importance(family, len(results), {}, f"{len(results)} right trials are too few to tell; {MIN_TRIALS} are needed.")
    names = [name for name in results[0][0] if all(name in params for params, _ in results)]
    seen = {name: sorted({params[name] for params, _ in results}, key=lambda v: (str(type(v)), v)) for name in names}
    varied = [name for name in names if len(seen[name]) > 1]
    if not varied or len({value for _, value in results}) == 1:
        return Importance(family, len(results), {}, "All right trials have the same parameters or the same result.")
    ranked = sorted(results, key=lambda result: result[1])
    sample = ranked if len(ranked) <= MAX_TRIALS else [ranked[i * len(ranked) // MAX_TRIALS] for i in range(MAX_TRIALS)]
    shares = _ped_anova({name: seen[name] for name in varied}, sample)
    return Importance(family, len(results), shares, "")


def _ped_anova(values: dict[str, list[Any]], results: list[tuple[dict[str, Any], float]]) -> dict[str, float]:
    import optuna                                   # here, because it takes a third of a second and most reports are short

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {name: optuna.distributions.CategoricalDistribution(tuple(choices)) for name, choices in values.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study()
        study.add_trials([
            optuna.trial.create_trial(params={name: params[name] for name in values}, distributions=distributions, value=value)
            for params, value in results
        ])
        shares = optuna.importance.get_param_importances(study, evaluator=optuna.importance.PedAnovaImportanceEvaluator())
    return {name: float(share) for name, share in shares.items()}
