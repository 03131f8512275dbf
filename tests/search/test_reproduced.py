"""What a reproduced trial is held against, without a run: time, cost, code and answers."""

from dataclasses import replace
from unittest import mock

import pytest

from evoattn.backends.compiler import compile_source
from evoattn.families.registry import load_space, lookup
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.records import CheckResult, Evaluation, Timing, Trial, TrialState, ValidationReport
from evoattn.model.shape_text import parse_shape
from evoattn.search import reproduce
from evoattn.search.starting import starting_configs

L4 = GPUS["l4"]


def trial_of(*samples_us: float, cost: float | None = None, seed: int | None = None) -> Trial:
    timings = (Timing(samples_us, {"stage": "screen"}),) if samples_us else ()
    report = ValidationReport("cuda", (), seed)
    config, state = {"A": 1}, TrialState.COMPLETE
    return Trial(7, 1, "f", config, "id", state, "", "hash", None, report, timings, cost, (), "random", "", 0.0)


def evaluated(*samples_us: float, cost: float | None = None, passed: bool = True, seed: int = 3) -> Evaluation:
    timings = (Timing(samples_us, {"stage": "screen"}),) if samples_us else ()
    report = ValidationReport("cuda", (CheckResult("a case", passed, 0.0, 1.0),), seed)
    state = TrialState.COMPLETE if passed else TrialState.WRONG_RESULT
    return Evaluation(state, "" if passed else "It is wrong.", None, report, timings, cost)


@pytest.mark.parametrize(
    "then, now, agrees, said",
    [
        ((100.0,) * 5, (104.0,) * 5, True, "104.00 µs, recorded 100.00 µs: +4.0%, within the noise of ±5.0%."),
        ((100.0,) * 5, (94.0,) * 5, False, "94.00 µs, recorded 100.00 µs: -6.0%, outside the noise of ±5.0%."),
        ((100.0,) * 5, (90.0, 90.0, 106.0, 110.0, 110.0), True, "noise of ±18.9%."),
        ((80.0, 90.0, 100.0, 110.0, 120.0), (135.0,) * 5, True, "+35.0%, within the noise of ±40.0%."),
        ((), (100.0,), None, ""),
    ],
)
def test_a_time_agrees_within_five_per_cent_or_the_wider_spread_of_both(then, now, agrees, said):
    found = reproduce._time_finding(trial_of(*then), evaluated(*now))
    assert [f.agrees for f in found] == ([] if agrees is None else [agrees])
    assert all(f.sentence.endswith(said) for f in found)


@pytest.mark.parametrize("then, now, agrees", [(50.0, 50.0, True), (50.0, 50.001, False), (50.0, 49.9, False)])
def test_a_cost_agrees_to_the_last_digit(then, now, agrees):
    for same_code in (True, False):
        (found,) = reproduce._cost_finding(trial_of(cost=then), evaluated(cost=now), same_code)
        assert found.agrees is (agrees or (None if not same_code else False)), "another evoattn has its own cost model"
        assert not reproduce._cost_finding(trial_of(), evaluated(cost=now), same_code)
        assert not reproduce._cost_finding(trial_of(cost=then), evaluated(), same_code)


def test_answers_say_of_which_inputs_they_are():
    found = reproduce._validation_finding(trial_of(seed=3), evaluated())
    assert found.agrees and found.sentence == "Right in all 1 cases on this GPU, inputs of seed 3, as recorded."
    assert "seed 3 (recorded was 4)" in reproduce._validation_finding(trial_of(seed=4), evaluated()).sentence
    wrong = reproduce._validation_finding(trial_of(seed=3), evaluated(passed=False))
    assert wrong.agrees is False and "It is wrong." in wrong.sentence


@pytest.mark.slow
def test_another_text_is_compiled_to_see_whether_it_is_the_same_kernel():
    problem = parse_shape("B=1,H=1,S=16,D=16,dtype=fp16,mask=full")
    one, other = starting_configs(load_space("flash_scalar", L4), problem, L4)[:2]
    trial = replace(trial_of(), family="flash_scalar")
    kernel = compile_source(render(lookup("flash_scalar"), problem, one, L4).source, L4.arch)
    for config, words in ((one, "the same"), (other, "other")):
        (found,) = reproduce._code_finding(trial, problem, config, L4, kernel)
        assert found.sentence == f"Today's text compiles to {words} machine code here." and found.agrees is None
    assert not reproduce._code_finding(trial_of(), problem, one, L4, kernel), "its family is gone"


def test_half_a_microsecond_is_a_time():
    storage = mock.Mock(**{"source.side_effect": KeyError("its source is looked for")})
    study = mock.Mock(problem={"batch": 1, "heads": 1, "kv_heads": 1, "seqlen_q": 8, "seqlen_k": 8, "head_dim": 16})
    with pytest.raises(KeyError, match="looked for"):
        reproduce.reproduce(storage, trial_of(0.5), study)
