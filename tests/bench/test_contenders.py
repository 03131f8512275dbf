"""Who is benched on which problems: records, starting configs, a file of configs, words."""

import sqlite3

import pytest
from rich.console import Console
from typer.testing import CliRunner

from evoattn.bench.contenders import Contender, choose, read_configs, recorded_best, write_configs
from evoattn.bench.records import BenchRecords
from evoattn.bench.run import BenchWords, run_bench
from evoattn.cli.main import app
from evoattn.families.registry import FAMILIES
from evoattn.families.render import render
from evoattn.model.errors import FailedRun
from evoattn.model.gpu import GPUS, DetectedDevice
from evoattn.model.records import Evaluation, TrialState
from evoattn.model.space import ConfigError
from tests.bench.bench_fakes import CONFIGS, GPU, PROBLEM, record, timing


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
