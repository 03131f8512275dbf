"""When TPE is asked, and what it is told."""

from __future__ import annotations

from optuna.trial import TrialState as OptunaState

from evoattn.model.records import TrialState
from evoattn.samplers.base import SamplerSetup
from evoattn.samplers.tpe import STARTUP, TpeSampler
from tests.samplers.made_up_families import SPACES, trial, why_invalid


def one_family() -> dict:
    return {"round": SPACES["round"]}


def test_the_estimator_is_asked_once_enough_are_right():
    sampler = TpeSampler(SamplerSetup(one_family(), 0, why_invalid))
    states = [TrialState.WRONG_RESULT] * (STARTUP + 4) + [TrialState.COMPLETE] * STARTUP
    for number, state in enumerate(states, 1):
        (proposal,) = sampler.ask(1)
        assert proposal.operator in ("starting", "random")
        sampler.tell(proposal, trial(number, proposal, state))
    assert [p.operator for p in sampler.ask(5)] == ["tpe"] * 5


def told(sampler: TpeSampler) -> list[OptunaState]:
    """What Optuna holds of the family `round`, but for the trials that were drawn and not begun."""
    trials = sampler._estimators["round"]._study.get_trials(deepcopy=False)
    return [t.state for t in trials]


def test_optuna_is_told_what_is_under_way_what_failed_and_nothing_of_duplicates():
    sampler = TpeSampler(SamplerSetup(one_family(), 0, why_invalid))
    proposals = sampler.ask(4)
    assert told(sampler) == [OptunaState.RUNNING] * 4
    ends = (TrialState.COMPLETE, TrialState.DUPLICATE, TrialState.LAUNCH_ERROR)
    for number, (proposal, end) in enumerate(zip(proposals, ends), 1):
        sampler.tell(proposal, trial(number, proposal, end))
    assert told(sampler) == [OptunaState.COMPLETE, OptunaState.FAIL, OptunaState.PRUNED, OptunaState.RUNNING]
