"""Finals: who takes part, who wins, who ties, and what becomes of a worker or a finalist that dies in one."""

import io

import pytest
from rich.console import Console

from evoattn.engine.budget import Budget
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model.records import Evaluation, Timing, TrialState
from evoattn.report.show import print_trial
from evoattn.samplers.base import STARTING, SamplerSetup
from evoattn.samplers.registry import make_sampler
from evoattn.search import finalists
from tests.search.search_fakes import CloseFinals, DiesInFinals, DiesOfAFinalist
from tests.search.studies_of_fakes import GPU, PROBLEM, fakes, make_search, space_of, why_invalid


@pytest.mark.slow
def test_a_final_names_its_winner_who_ties_with_it_and_who_left_it(storage):
    running = make_search(storage, space_of(WARPS="4", STAGES="1", KEY_WARPS="1"), fakes(CloseFinals))
    progress = running.run(Budget(trials=5))
    leaders = [t.number for t in storage.leaderboard(running.study, 9)]
    assert progress.best.number == leaders[0] == 2 and leaders[3:] == [5, 1]
    assert progress.tied_with == (3, 4)
    assert progress.notes == ["trial 1 left the final: It needs more device memory than is free."]
    assert storage.refusals(running.study) == {"cudnn": "It needs another head_dim."}


@pytest.mark.slow
def test_a_worker_killed_in_the_finals_costs_another_try(storage, tmp_path, monkeypatch):
    monkeypatch.setenv("DEATHS", str(tmp_path))
    running = make_search(storage, space_of(WARPS="4", STAGES="1,2", KEY_WARPS="1"), fakes(DiesInFinals), jobs=2)
    assert running.run(Budget(trials=12)).recorded == 12
    assert len((tmp_path / "final").read_text()) == 1
    assert storage.leaderboard(running.study, 1)[0].timing.protocol["stage"] == "final"


@pytest.mark.slow
def test_a_finalist_that_kills_the_worker_leaves_the_final_and_the_leaderboard(storage):
    running = make_search(storage, space_of(WARPS="4", STAGES="1,2", KEY_WARPS="1"), fakes(DiesOfAFinalist))
    study = running.study
    progress = running.run(Budget(trials=3))
    out = storage.trial(1)
    assert (
        out.disqualified
        and "exit code 3. So it did 2 times" in progress.notes[0]
        and progress.notes[0].startswith("trial 1 left the final")
    )
    assert out.timing.protocol["stage"] == "screen" and not out.timings[-1].samples_us
    leaders = storage.leaderboard(study, 9)
    assert {t.number for t in leaders} == {2, 3} and all(t.timing.protocol["stage"] == "final" for t in leaders)
    storage.add_timing(leaders[0].number, Timing.out("It needs more device memory than is free.", disqualified=False))
    assert [t.number for t in storage.leaderboard(study, 9)] == [t.number for t in leaders]
    shown = io.StringIO()
    print_trial(storage, out, Console(file=shown, width=200))
    assert "none: The worker process ended with exit code 3" in shown.getvalue()


def test_the_best_starting_config_takes_part_in_the_final(storage):
    space = load_space("flash_mma", GPU)
    study = storage.create_study("fake", PROBLEM, GPU, False, "random", 0, ("flash_mma",), {}, {})
    proposals = make_sampler("random", SamplerSetup({"flash_mma": space}, 0, why_invalid)).ask(40)
    started, bred = ([p for p in proposals if (p.operator == STARTING) == which] for which in (True, False))
    numbers = {}
    for us, proposal in enumerate([*bred[:10], *started[:2]], 10):
        config = space.make_config(proposal.params)
        timing = Timing((float(us),), {"stage": "screen", "run": str(us)})
        candidate = render(FAMILIES["flash_mma"], PROBLEM, config, GPU)
        evaluation = Evaluation(TrialState.COMPLETE, timings=(timing,))
        numbers[us] = str(storage.record(study, config, candidate, evaluation, (), proposal.operator).number)

    def chosen():
        return list(finalists.choose(storage, study, PROBLEM, GPU, {"flash_mma": space}, fakes()))

    assert chosen() == [numbers[us] for us in (*range(10, 10 + finalists.FINALISTS), 20)]
    storage.add_timing(int(numbers[20]), Timing((99.0,), {"stage": "repeat", "run": "slow"}))
    assert chosen()[-1] == numbers[21]
    storage.add_timing(
        int(numbers[21]), Timing((1.0,), {"stage": "final", "run": "f"})
    )  # among the best: no extra seat
    assert chosen() == [numbers[us] for us in (21, *range(10, 9 + finalists.FINALISTS))]
    storage.add_timing(int(numbers[21]), Timing((1.0,), {"stage": "final", "run": "f", "disqualified": "It lies."}))
    assert chosen()[-1] == numbers[20]
