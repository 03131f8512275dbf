"""What a search found is what the op runs, where its final says that it is clearly ahead."""

from dataclasses import replace

import pytest

from evoattn.engine.budget import Budget
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Evaluation, Timing, TrialState
from evoattn.model.space import KernelConfig
from evoattn.portfolio.pick import pick
from evoattn.portfolio.wins import Wins
from evoattn.search.kept import keep_leader
from evoattn.search.request import SearchPlan, SearchWords
from evoattn.search.setup import PreparedSearch
from evoattn.search.starting import begin
from evoattn.storage import Storage
from evoattn.storage.trials import NewTrial

GPU = GPUS["h100"]
PROBLEM = AttentionProblem(2, 8, 8, 1024, 1024, 64, mask="causal_lower_right")
TODAY = pick(PROBLEM.canonical(), GPU).config
OTHER = next(c for c in load_space("flash_mma", GPU).starting_configs())


@pytest.fixture
def wins(tmp_path):
    return Wins(tmp_path / "wins.jsonl")


@pytest.fixture
def study(tmp_path):
    """Records times of configs in a final, beside SDPA's; gives what `keep_leader` takes."""
    storage = Storage.open(str(tmp_path / "db.sqlite"))

    def made(*timed: tuple[KernelConfig, float], sdpa=50.0, offline=False, stage="final", cache="warm"):
        record = storage.create_study("s", PROBLEM, GPU, offline, "guided", 0, ("flash_mma",), {}, {})
        words = {"stage": stage, "run": "one", "cache": cache}
        for config, us in timed:
            trial = Evaluation(TrialState.COMPLETE, timings=(Timing((us,), words),))
            storage.record_all(record, [NewTrial(config, None, trial)])
        if sdpa:
            storage.add_peer(record, "flash", Timing((sdpa,), words))
        storage.add_peer(record, "cudnn", Timing((1.0,), words | {"run": "another"}))
        plan = SearchPlan(PROBLEM, GPU, None, {})
        return PreparedSearch(storage, record, plan, Budget(1.0), SearchWords())

    yield made
    storage.close()


def test_a_leader_that_is_clearly_ahead_is_kept_and_begun_with(study, wins):
    said = keep_leader(study((OTHER, 10.0), (TODAY, 12.0)), wins)
    assert (
        said
        == f"evoattn.attention runs it from now on, in place of {pick(PROBLEM, GPU).family} {TODAY.id[:8]}, 12.00 µs."
    )
    found = wins.find(PROBLEM.canonical(), GPU)
    assert found.config.id == OTHER.id and "10.00 µs, 12.00 µs before" in found.why


@pytest.mark.parametrize(
    ("times", "sentence"),
    [
        (((TODAY, 10.0), (OTHER, 12.0)), "runs this kernel already"),
        (((OTHER, 11.9), (TODAY, 12.0)), "not clearly ahead of"),
        (((OTHER, 49.9), (TODAY, 60.0)), "not clearly ahead of SDPA flash, 50.00 µs"),
        (((OTHER, 10.0),), "was not timed in this study"),
    ],
)
def test_else_the_op_goes_on_as_it_does(study, wins, times, sentence):
    assert sentence in keep_leader(study(*times), wins)
    assert wins.find(PROBLEM.canonical(), GPU) is None


@pytest.mark.parametrize("words", [{"offline": True}, {"stage": "repeat"}])
def test_without_a_final_nothing_is_said(study, wins, words):
    assert keep_leader(study((OTHER, 10.0), (TODAY, 12.0), **words), wins) == ""


def test_a_time_with_a_cold_cache_decides_nothing(study, wins):
    assert "cold cache" in keep_leader(study((OTHER, 10.0), (TODAY, 12.0), cache="cold"), wins)


def test_where_nothing_ran_before_the_leader_is_what_runs(study, wins, monkeypatch):
    made = study((OTHER, 10.0), sdpa=None)
    ampere = replace(made, plan=SearchPlan(PROBLEM.with_(softcap=3.0), GPUS["a100"], None, {}))
    assert keep_leader(ampere, wins) == "evoattn.attention runs it from now on."
    assert wins.find(PROBLEM.with_(softcap=3.0).canonical(), GPUS["a100"]).why.endswith("nothing else could be timed")


def test_a_search_begins_with_what_was_kept(study, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    space = load_space("flash_mma", GPU)
    unusual = space.make_config(OTHER.params | {"STAGES": 1})
    kept = Wins()
    assert str(kept.path).startswith(str(tmp_path))
    assert keep_leader(study((unusual, 10.0), (TODAY, 12.0))).startswith("evoattn.attention runs it")
    chosen = begin({"flash_mma": space}, PROBLEM, GPU)["flash_mma"]
    assert chosen.starting[0] == unusual.params and len(chosen.starting) == len(set(map(str, chosen.starting)))
