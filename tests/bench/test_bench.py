"""The bench on a pretended device: recorded bests keep their trials, wrong ones never stand."""

import io
import json

import pytest
from rich.console import Console

from evoattn.bench.row import Row, Time
from evoattn.bench.table import render_rows, rows_json
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.records import Timing, TrialState
from evoattn.search.starting import starting_configs
from tests.bench.bench_fakes import (
    CONFIGS,
    GPU,
    PROBLEM,
    AlwaysDoubtsItself,
    DiesInFinals,
    DoubtsItself,
    FakeDevice,
    KnowsAllPeers,
    bench_on,
    record,
    run,
)


@pytest.fixture(scope="module")
def bench():
    with bench_on(FakeDevice) as made:
        yield made


@pytest.mark.slow
def test_a_recorded_best_keeps_its_trial_and_gets_the_final_s_time_beside_the_peers(bench, storage):
    best, slow = sorted(CONFIGS, key=lambda c: c["BLOCK_M"])[0], sorted(CONFIGS, key=lambda c: c["BLOCK_M"])[-1]
    numbers = [record(storage, config, us).number for config, us in ((slow, 300.0), (best, 90.0))]
    row = run(bench, storage)
    assert row.trial == numbers[1] and row.ours.median_us == best["BLOCK_M"] and row.ratio == best["BLOCK_M"] / 100
    study = storage.find_study("s")
    assert len(storage.studies()) == 1 and sum(storage.counts(study).values()) == 2
    assert [t.protocol["stage"] for t in storage.trial(numbers[1]).timings] == ["screen", "final"]
    assert storage.peers(study)["fa4"][0].interleaved_with(storage.trial(numbers[1]).timing)
    file = io.StringIO()
    render_rows([row], Console(file=file, width=160))
    shown = (
        f"{best['BLOCK_M'] / 100:.3f}",
        "fa3 has no time for every problem: flash-attn-3 is not installed",
        "To bring fa3: python scripts/",
    )
    assert all(words in file.getvalue() for words in shown)
    assert json.loads(rows_json([row]))[0]["ratio"] == row.ratio


@pytest.mark.slow
def test_peers_that_are_not_asked_have_neither_a_time_nor_a_refusal(storage):
    with bench_on(KnowsAllPeers, peers=("cudnn", "fa4")) as made:
        row = run(made, storage)
    assert set(row.peers) == {"cudnn", "fa4"} and row.refusals == {}


@pytest.mark.slow
def test_what_proves_wrong_in_the_final_does_not_stand(bench, storage):
    scalar = starting_configs(load_space("flash_scalar", GPU), PROBLEM, GPU)[0]
    row = run(bench, storage, [("flash_scalar", scalar.params)])
    assert (
        row.ours is None
        and row.ratio is None
        and row.notes[0].endswith("disqualified: In the final: two outputs differ.")
    )
    (study,) = storage.studies()
    (trial,) = storage.iter_trials(study)
    assert (
        trial.disqualified == "In the final: two outputs differ."
        and not storage.leaderboard(study, 9)
        and not storage.peers(study)
    )
    assert "fa4" in rows_json([row])


@pytest.mark.slow
def test_what_fails_in_the_final_is_noted_and_the_others_stand(bench, storage):
    three_kernel = FAMILIES["three_kernel"]
    failing = next(
        c
        for c in starting_configs(load_space("three_kernel", GPU), PROBLEM, GPU)
        if not three_kernel.why_invalid(PROBLEM, c, GPU)
    )
    row = run(bench, storage, [("flash_mma", CONFIGS[0].params), ("three_kernel", failing.params)])
    (study,) = storage.studies()
    numbers = {trial.family: trial.number for trial in storage.iter_trials(study)}
    failed = storage.trial(numbers["three_kernel"])
    assert row.family == "flash_mma" and row.ratio
    assert row.notes == [f"three_kernel trial {failed.number}: left the final: The launch failed."]
    assert failed.disqualified == "In the final: The launch failed." and failed.timing.protocol["stage"] == "screen"
    assert [t.number for t in storage.leaderboard(study, 9)] == [numbers["flash_mma"]]


@pytest.mark.slow
def test_a_final_that_cannot_be_held_is_one_note(storage):
    with bench_on(DiesInFinals) as bench:
        row = run(bench, storage, [("flash_mma", CONFIGS[0].params)])
    said = "here: The final could not be held: The worker process ended with exit code 3."
    assert row.ours is None and row.notes == [said]


@pytest.mark.slow
def test_a_doubtful_verdict_is_asked_for_again_once(storage):
    with bench_on(AlwaysDoubtsItself) as bench:
        row = run(bench, storage, [("flash_mma", CONFIGS[0].params)])
    assert row.notes == ["flash_mma trial 1: WRONG_RESULT: It differs."]
    with bench_on(DoubtsItself) as bench:
        assert run(bench, storage, [("flash_mma", CONFIGS[0].params)]).ours


@pytest.mark.slow
def test_what_fails_alike_is_one_line_and_every_trial_of_it_recorded(bench, storage):
    configs = starting_configs(load_space("flash_wmma", GPU), PROBLEM, GPU)
    row = run(bench, storage, [("flash_wmma", c.params) for c in configs])
    (study,) = storage.studies()
    assert len(configs) > 1 and storage.counts(study) == {TrialState.COMPILE_ERROR: len(configs)}
    assert len(row.notes) == 1 and f"trial 1 and {len(configs) - 1} more: COMPILE_ERROR: no header: xxx" in row.notes[0]
    file = io.StringIO()
    render_rows([row], Console(file=file, width=80))
    (line,) = [line for line in file.getvalue().splitlines() if "note:" in line]
    assert len(line) == 160 and line.endswith("…")


def test_the_energy_of_a_call_stands_under_the_times():
    weighed = Time.of(Timing((20.0, 20.0, 21.0), {"energy_mj_per_call": 6.25}))
    row = Row({"name": "seed_h100"}, "", weighed, peers={"cudnn": Time.of(Timing((30.0,), {}))})
    console = Console(width=160, record=True, file=io.StringIO())
    render_rows([row], console)
    assert "seed_h100: mJ per call of the whole board: ours 6.25\n" in console.export_text()
    found = json.loads(rows_json([row]))[0]
    assert found["ours"]["energy_mj"] == 6.25 and found["peers"]["cudnn"]["energy_mj"] is None
