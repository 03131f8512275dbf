"""The bench on a pretended device: recorded bests keep their trials, wrong ones never stand. Who is benched on which
problems: records, starting configs, a file of configs, words."""

import io
import json
import sqlite3

import pytest
from rich.console import Console
from typer.testing import CliRunner

from evoattn.bench.contenders import Contender, choose, read_configs, recorded_best, write_configs
from evoattn.bench.records import BenchRecords
from evoattn.bench.row import Row, Time
from evoattn.bench.run import BenchWords, run_bench
from evoattn.bench.table import render_rows, rows_json
from evoattn.cli.main import app
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model.errors import FailedRun
from evoattn.model.gpu import GPUS, DetectedDevice
from evoattn.model.records import Evaluation, Timing, TrialState
from evoattn.model.space import ConfigError
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
    timing,
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


def test_without_records_the_starting_configs_stand(storage):
    contenders, notes = choose(PROBLEM, GPU, [storage], [], 4)
    assert (
        not notes
        and {c.config.id for c in contenders} >= {c.id for c in CONFIGS}
        and all(c.recorded is None for c in contenders)
    )


def test_configs_travel_and_are_checked(storage, tmp_path):
    record(storage, CONFIGS[0], 50.0)
    record(storage, CONFIGS[0], 10.0, PROBLEM.with_(heads=8, kv_heads=8), "other")
    path = tmp_path / "best.jsonl"
    path.write_text(write_configs([storage], 3))
    (found,) = read_configs(path, PROBLEM.with_(name="else"), "sm_90a")
    assert found == ("flash_mma", CONFIGS[0].params) and not read_configs(path, PROBLEM, "sm_89")
    contenders, notes = choose(PROBLEM, GPU, [], [("flash_mma", {**found[1], "BLOCK_M": 7}), ("evil", {}), found], 4)
    assert len(contenders) == 1 and len(notes) == 2
    for text in (
        "[]",
        "{",
        '{"family": 1, "config": {}, "problem": {}}',
        '{"family": "x", "config": {"A": []}, "problem": {}}',
        "[" * 100_000,
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match="Line 1"):
            read_configs(path, PROBLEM, "sm_90a")


def test_a_study_that_says_of_its_problem_what_others_leave_out_is_of_the_same_problem(storage, tmp_path):
    number = record(storage, CONFIGS[0], 50.0).number
    with sqlite3.connect(tmp_path / "db.sqlite") as plain:
        plain.execute("UPDATE studies SET problem = json_set(problem, '$.lse', json('false'))")
    plain.close()
    (found,) = recorded_best([storage], PROBLEM.with_(name="else"), "sm_90a", 4)
    assert found.trial.number == number


def test_results_go_to_the_bench_s_own_study_of_the_card_that_was_timed(storage):
    contender = Contender(CONFIGS[0], render(FAMILIES["flash_mma"], PROBLEM, CONFIGS[0], GPU))
    done, studies = Evaluation(TrialState.COMPLETE, timings=(timing(50.0, "screen", "alone"),)), []
    for gpu in (GPUS["h100-pcie"], GPU, GPU):
        here = DetectedDevice(0, gpu.name, (9, 0), "13.0")
        trial = storage.trial(BenchRecords(storage, gpu, here, PROBLEM).record(contender, done))
        studies.append(storage.study(trial.study_id))
    assert [study.gpu for study in studies] == ["h100-pcie", "h100", "h100"] and studies[1] == studies[2]


@pytest.mark.slow
def test_without_a_device_it_is_one_sentence():
    with pytest.raises(FailedRun, match="no CUDA device"):
        run_bench(BenchWords(("seed_h100",), "auto", (), None, 4, 1), Console(), devices=[])


@pytest.mark.slow
def test_problems_come_by_name_or_by_shape(tmp_path):
    asked = []

    class Recorder:
        def __init__(self, *words, peers):
            asked.append(peers)

        def run(self, problems, configs):
            asked.extend((problem, configs(problem)) for problem in problems)
            return iter(())

        def close(self):
            asked.append("closed")

    here = [DetectedDevice(0, "NVIDIA H100 80GB HBM3", (9, 0), "13.0")]
    words = ["seed_h100", "B=8,H=32,S=2048,D=64,dtype=bf16", "B=8,H=32,S=4096,D=64,dtype=bf16", "seed_h100"]
    urls = [f"sqlite:///{tmp_path}/a.sqlite"]
    told = BenchWords(tuple(words), "auto", tuple(urls), None, 4, 1, ["cudnn"])
    assert run_bench(told, Console(), here, Recorder) == []
    assert asked.pop() == "closed" and asked.pop(0) == ["cudnn"]
    assert [(p.name, p.seqlen_q, p.dtype, configs) for p, configs in asked] == [
        ("seed_h100", 1024, "fp16", []),
        ("", 2048, "bf16", []),
        ("", 4096, "bf16", []),
    ]
    wrong = CliRunner().invoke(app, ["bench", "B=8,H=x"])
    assert wrong.exit_code == 2 and "whole number" in wrong.stderr
