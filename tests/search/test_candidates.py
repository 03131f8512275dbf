"""The queue of the device, the table of what was seen, and budgets as people write them."""

from dataclasses import replace

import pytest

from evoattn.engine.budget import (
    RESERVE_LEAST,
    RESERVE_MOST,
    RESERVE_SHARE,
    Budget,
    BudgetError,
    Clock,
    parse_budget,
    reserve_of,
)
from evoattn.engine.candidates import Pending, Ready, Seen, tried_again
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import Compiled
from evoattn.evaluation.workers import Outcome
from evoattn.families.built import behaviour
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, CompileInfo, CompressedSource, Proposal
from evoattn.model.space import KernelConfig
from evoattn.samplers.base import STARTING

PROBLEM, GPU = AttentionProblem(1, 4, 4, 256, 256, 64), GPUS["h100"]
KERNEL = CompiledKernel(b"", "", CompileInfo())


def pending(name: str, operator: str = "") -> Pending:
    family = FAMILIES["flash_mma"]
    proposal = Proposal(family.name, {}, operator=operator)
    return Pending(proposal, family, KernelConfig(family.name, {}), PROBLEM, GPU, CompressedSource(name, b""), name)


def names(ready: Ready) -> list[str]:
    return [ready.take().source.hash for _ in range(len(ready))]


def test_the_most_promising_comes_first_and_equals_in_their_order():
    ready = Ready()
    for name, cost in (("slow", 9.0), ("fast", 1.0), ("first equal", 5.0), ("second equal", 5.0), ("unknown", None)):
        ready.add(pending(name), Compiled(KERNEL, None, cost))
    assert names(ready) == ["unknown", "fast", "first equal", "second equal", "slow"]


def test_what_a_search_begins_with_goes_before_what_looks_better():
    ready = Ready()
    for name, cost, operator in (("known", 9.0, STARTING), ("bred", 1.0, "guided"), ("portfolio", 8.0, STARTING)):
        ready.add(pending(name, operator), Compiled(KERNEL, None, cost))
    assert names(ready) == ["portfolio", "known", "bred"]


def test_a_second_evaluation_goes_before_all_others_and_keeps_what_the_compile_found():
    ready = Ready()
    ready.add(pending("doubtful"), Compiled(KERNEL, None, 7.0))
    doubtful = ready.take()
    assert doubtful.kernel is KERNEL and doubtful.relative_cost == 7.0 and not doubtful.again
    ready.add(pending("unknown"), Compiled(KERNEL, None, None))
    ready.add_again(tried_again(doubtful, Outcome(doubtful, Ending.DIED, None, 0.0)))
    again = ready.take()
    assert again.again and again.source.hash == "doubtful" and again.kernel is KERNEL and len(ready) == 1


def test_a_behaviour_is_new_once():
    seen = Seen()
    assert seen.earlier("a") is None and len(seen) == 1
    assert seen.earlier("a") == "a candidate still on its way"
    seen.recorded("a", 7)
    assert seen.earlier("a") == "trial 7" and seen.earlier("b") is None


def test_candidates_behave_alike_where_source_and_launches_are_the_same():
    problem, gpu = AttentionProblem(1, 2, 2, 256, 256, 64), GPUS["h100"]
    config = next(iter(load_space("flash_mma", gpu).starting_configs()))
    family = FAMILIES["flash_mma"]
    known = behaviour("a", family, problem, config, gpu)
    assert known == behaviour("a", family, problem, KernelConfig(config.family, dict(config.params)), gpu)
    assert known != behaviour("b", family, problem, config, gpu)
    assert known != behaviour("a", family, replace(problem, batch=2), config, gpu)


@pytest.mark.parametrize(
    "text, budget",
    [
        ("90s", Budget(seconds=90)),
        ("30m", Budget(seconds=1800)),
        ("2h", Budget(seconds=7200)),
        ("1.5h", Budget(seconds=5400)),
        ("500trials", Budget(trials=500)),
        ("2 h", Budget(seconds=7200)),
        (" 5 trials ", Budget(trials=5)),
    ],
)
def test_budgets(text, budget):
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["", "2", "h", "-5s", "0s", "0trials", "1d", "nan s", "1e3s", "²s", 90])
def test_what_is_no_budget_is_one_sentence(text):
    with pytest.raises(BudgetError, match="90s"):
        parse_budget(text)


def test_time_runs_from_the_start_of_the_clock_and_leaves_the_reserve():
    now = [100.0]
    clock, short = (Clock(Budget(seconds=s), reserve=3, now=lambda: now[0]) for s in (60, 4))
    now[0] += 1000
    assert not clock.spent(0)
    clock.start(), short.start()
    for seconds, spent in ((1.9, (False, False)), (2.1, (False, True)), (56.9, (False, True)), (57.1, (True, True))):
        now[0] = 1100 + seconds
        assert (clock.spent(10**6), short.spent(0)) == spent
    assert Clock(Budget(trials=3)).spent(3) and not Clock(Budget(trials=3)).spent(2)


@pytest.mark.parametrize("seconds, kept", [(20, 5), (60, 5), (200, 10), (900, 45), (3600, 45)])
def test_part_of_a_time_budget_is_kept_for_the_final(seconds, kept):
    assert reserve_of(Budget(seconds=seconds)) == pytest.approx(kept) and reserve_of(Budget(trials=9)) == 0.0


def test_a_count_of_trials_keeps_no_time_for_its_final():
    assert reserve_of(Budget(trials=5)) == 0.0
    kept = [reserve_of(Budget(seconds=float(seconds))) for seconds in (1, 60, 600, 10**6)]
    assert kept == sorted(kept) and kept[0] == RESERVE_LEAST and kept[-1] == RESERVE_MOST
    assert RESERVE_LEAST < kept[2] == RESERVE_SHARE * 600 < RESERVE_MOST or kept[2] in (RESERVE_LEAST, RESERVE_MOST)
