"""The bench on a pretended device: recorded bests keep their trials, wrong ones never stand, configs of a file are
checked."""

import io
import json
import os
from contextlib import contextmanager
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from evoattn.bench.contenders import choose, read_configs, write_configs
from evoattn.bench.run import Bench
from evoattn.bench.session import run_bench
from evoattn.bench.table import render_rows, rows_json
from evoattn.cli.main import app
from evoattn.evaluation.process import Handler
from evoattn.evaluation.tasks import Compiled, Evaluate
from evoattn.families.registry import FAMILIES
from evoattn.families.render import render
from evoattn.model import gpu
from evoattn.model.gpu import DetectedDevice, GpuError
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, CompileInfo, Evaluation, Timing, TrialState
from evoattn.model.space import ConfigError, load_space
from evoattn.storage import Storage
from evoattn.timing.finalists import FinalResult

PROBLEM = AttentionProblem(1, 4, 4, 256, 256, 64, name="here")
GPU = gpu.GPUS["h100"]
CONFIGS = [
    c
    for c in load_space("flash_mma", GPU).starting_configs(PROBLEM)
    if not FAMILIES["flash_mma"].why_invalid(PROBLEM, c, GPU)
]


def timing(us: float, stage: str, run: str) -> Timing:
    return Timing((us * 0.9, us, us * 1.1), {"stage": stage, "run": run})


class FakeCompiler(Handler):
    """Takes all but flash_wmma."""

    def __call__(self, task):
        if task.family == "flash_wmma":
            return Compiled(None, Evaluation(TrialState.COMPILE_ERROR, "no header:\n" + 200 * "x"))
        return Compiled(CompiledKernel(b"", "", CompileInfo(registers=64)), None)


class FakeDevice(Handler):
    """Slower by BLOCK_M; kernels of flash_scalar prove wrong in the final, those of three_kernel fail in it."""

    def __init__(self, gpu, cache):
        pass

    def __call__(self, task):
        return self.evaluate(task.task) if isinstance(task.task, Evaluate) else self.final(task.task)

    def evaluate(self, task):
        alone = timing(task.kernel.config["BLOCK_M"], "screen", "alone")
        return Evaluation(TrialState.COMPLETE, "", CompileInfo(registers=64), timings=(alone,))

    def final(self, task):
        times = {name: timing(f.config["BLOCK_M"], "final", "F") for name, f in task.finalists.items()}
        for name, finalist in task.finalists.items():
            if finalist.family.name == "flash_scalar":
                times[name].protocol["disqualified"] = "In the final: two outputs differ."
            if finalist.family.name == "three_kernel":
                times[name] = Timing.out("The launch failed.", disqualified=True)
        return FinalResult(
            times | {"fa4": timing(100.0, "final", "F")}, {"fa3": "flash-attn-3 is not installed (no vllm)."}
        )


class DiesInFinals(FakeDevice):
    """Each time."""

    def final(self, task):
        os._exit(3)


class DoubtsItself(FakeDevice):
    """Says of its first verdict that it may be the process's fault; a second one stands."""

    verdicts = 0

    def evaluate(self, task):
        self.verdicts += 1
        state = TrialState.WRONG_RESULT if self.verdicts == 1 else TrialState.COMPLETE
        return replace(super().evaluate(task), state=state, doubtful=self.verdicts == 1)


class AlwaysDoubtsItself(FakeDevice):
    """Says so of every verdict."""

    def evaluate(self, task):
        return Evaluation(TrialState.WRONG_RESULT, "It differs.", doubtful=True)


@pytest.fixture
def storage(tmp_path):
    opened = Storage.open(str(tmp_path / "db.sqlite"))
    yield opened
    opened.close()


def record(storage, config, us, problem=PROBLEM, name="s"):
    study = storage.find_study(name) or storage.create_study(
        name, problem, GPU, False, "genetic", 7, ("flash_mma",), {}, {}
    )
    candidate = render(FAMILIES[config.family], problem, config, GPU)
    return storage.record(
        study, config, candidate, Evaluation(TrialState.COMPLETE, timings=(timing(us, "screen", "alone"),))
    )


@contextmanager
def bench_on(device):
    made = Bench([], GPU, DetectedDevice(0, "NVIDIA H100", (9, 0), "13.0"), 1, 2, "warm", FakeCompiler, device)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def bench():
    with bench_on(FakeDevice) as made:
        yield made


def run(bench, storage, configs=()):
    bench.storages = [storage]
    return next(bench.run([PROBLEM], lambda problem: list(configs)))


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


def test_what_proves_wrong_in_the_final_does_not_stand(bench, storage):
    scalar = load_space("flash_scalar", GPU).starting_configs(PROBLEM)[0]
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


def test_what_fails_in_the_final_is_noted_and_the_others_stand(bench, storage):
    three_kernel = FAMILIES["three_kernel"]
    failing = next(
        c
        for c in load_space("three_kernel", GPU).starting_configs(PROBLEM)
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


def test_a_final_that_cannot_be_held_is_one_note(storage):
    with bench_on(DiesInFinals) as bench:
        row = run(bench, storage, [("flash_mma", CONFIGS[0].params)])
    said = "here: The final could not be held: The worker process ended with exit code 3."
    assert row.ours is None and row.notes == [said]


def test_a_doubtful_verdict_is_asked_for_again_once(storage):
    with bench_on(AlwaysDoubtsItself) as bench:
        row = run(bench, storage, [("flash_mma", CONFIGS[0].params)])
    assert row.notes == ["flash_mma trial 1: WRONG_RESULT: It differs."]
    with bench_on(DoubtsItself) as bench:
        assert run(bench, storage, [("flash_mma", CONFIGS[0].params)]).ours


def test_what_fails_alike_is_one_line_and_every_trial_of_it_recorded(bench, storage):
    configs = load_space("flash_wmma", GPU).starting_configs(PROBLEM)
    row = run(bench, storage, [("flash_wmma", c.params) for c in configs])
    (study,) = storage.studies()
    assert len(configs) > 1 and storage.counts(study) == {TrialState.COMPILE_ERROR: len(configs)}
    assert len(row.notes) == 1 and f"trial 1 and {len(configs) - 1} more: COMPILE_ERROR: no header: xxx" in row.notes[0]
    file = io.StringIO()
    render_rows([row], Console(file=file, width=80))
    (line,) = [line for line in file.getvalue().splitlines() if "note:" in line]
    assert len(line) == 160 and line.endswith("…")


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


@pytest.mark.slow
def test_without_a_device_it_is_one_sentence():
    with pytest.raises(GpuError, match="no CUDA device"):
        run_bench(["seed_h100"], "auto", [], None, 4, 1, Console(), devices=[])


@pytest.mark.slow
def test_problems_come_by_name_or_by_shape(tmp_path):
    asked = []

    class Recorder:
        def __init__(self, *words):
            pass

        def run(self, problems, configs):
            asked.extend((problem, configs(problem)) for problem in problems)
            return iter(())

        def close(self):
            asked.append("closed")

    here = [DetectedDevice(0, "NVIDIA H100 80GB HBM3", (9, 0), "13.0")]
    words = ["seed_h100", "B=8,H=32,S=2048,D=64,dtype=bf16", "B=8,H=32,S=4096,D=64,dtype=bf16", "seed_h100"]
    urls = [f"sqlite:///{tmp_path}/a.sqlite"]
    assert run_bench(words, "auto", urls, None, 4, 1, Console(), here, Recorder) == []
    assert asked.pop() == "closed"
    assert [(p.name, p.seqlen_q, p.dtype, configs) for p, configs in asked] == [
        ("seed_h100", 1024, "fp16", []),
        ("", 2048, "bf16", []),
        ("", 4096, "bf16", []),
    ]
    wrong = CliRunner().invoke(app, ["bench", "B=8,H=x"])
    assert wrong.exit_code == 2 and "whole number" in wrong.stderr
