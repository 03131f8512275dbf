"""Who gets a seat in the final, and what compute-sanitizer says of them: no compiler, no device."""

import time
from dataclasses import replace
from threading import Event

import pytest

from evoattn.backends.compiler import CompileError
from evoattn.correctness import sanitizer
from evoattn.engine.tools import Tools
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model import gpu
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, CompiledKernel, CompileInfo, Evaluation, Timing, TrialState
from evoattn.model.space import KernelConfig
from evoattn.samplers.base import STARTING
from evoattn.search import finalists
from evoattn.search.starting import starting_configs

PROBLEM = AttentionProblem(1, 4, 4, 256, 256, 64)
GPU = gpu.GPUS["h100"]
SPACES = {"flash_mma": load_space("flash_mma", GPU)}
INFO = CompileInfo(registers=64)


def valid_configs(count: int) -> list[KernelConfig]:
    (config, *_), space = starting_configs(SPACES["flash_mma"], PROBLEM, GPU), SPACES["flash_mma"]
    near = [space.make_config(config.params | {p.name: value}) for p in space.parameters for value in p.values]
    valid = {c.id: c for c in near if FAMILIES["flash_mma"].why_invalid(PROBLEM, c, GPU) is None}
    return list(valid.values())[:count]


def source_of(config: KernelConfig) -> Candidate:
    return render(FAMILIES["flash_mma"], PROBLEM, config, GPU)


@pytest.mark.parametrize(
    "operator, before, seated", [("mutation", 0, ["5", "6"]), (STARTING, finalists.FINALISTS, ["13"])]
)
def test_who_cannot_run_today_as_recorded_leaves_the_seat_to_the_next(storage, operator, before, seated):
    """One is of a family that is gone, one has a value that the space has not, one has another source, one no longer
    compiles; the last two run. Of starting configs behind the best candidates, one gets a seat."""
    study = storage.create_study("s", PROBLEM, GPU, False, "random", 0, ("flash_mma",), {}, {})
    edited, broken, right, slower = valid_configs(4)
    honest = source_of(right)
    entries = [
        *((KernelConfig("gone", {"A": n}), honest, "mutation") for n in range(before)),
        (replace(right, family="gone"), honest, operator),
        (replace(right, params=right.params | {"STAGES": 99}), honest, operator),
        (edited, replace(source_of(edited), source=honest.source + "// of another version"), operator),
        *((config, source_of(config), operator) for config in (broken, right, slower)),
    ]
    for us, (config, candidate, how) in enumerate(entries, 10):
        timing = Timing((float(us),), {"stage": "screen", "run": str(us)})
        storage.record(study, config, candidate, Evaluation(TrialState.COMPLETE, timings=(timing,)), (), how)

    def compile_all_but_one(candidate: Candidate) -> CompiledKernel:
        if candidate.config_id == broken.id:
            raise CompileError("No such instruction.", "")
        return CompiledKernel(candidate.source.encode(), "", INFO)

    chosen = finalists.choose(storage, study, PROBLEM, GPU, SPACES, Tools(compile=compile_all_but_one))
    assert list(chosen) == seated
    first = chosen[seated[0]]
    assert (first.config, first.gpu, first.compiled.cubin) == (right, GPU, honest.source.encode())


@pytest.mark.parametrize("operator", ["mutation", STARTING])
def test_a_seat_is_for_the_best_time_of_all_not_for_who_was_in_the_last_final(storage, operator):
    seats = finalists.FINALISTS
    study = storage.create_study("s", PROBLEM, GPU, False, "random", 0, ("flash_mma",), {}, {})
    for us, config in enumerate(valid_configs(seats + 1), 10):
        stage = "final" if us == 10 + seats else "screen"
        timing = Timing((float(us),), {"stage": stage, "run": str(us)})
        evaluation = Evaluation(TrialState.COMPLETE, timings=(timing,))
        storage.record(study, config, source_of(config), evaluation, (), operator)
    tools = Tools(compile=lambda candidate: CompiledKernel(b"", "", INFO))
    chosen = finalists.choose(storage, study, PROBLEM, GPU, SPACES, tools)
    assert list(chosen) == [str(number) for number in range(1, seats + 1)]


def kernel_of(name: str) -> BuiltKernel:
    return BuiltKernel(
        FAMILIES["flash_mma"], KernelConfig("flash_mma", {}), GPU, CompiledKernel(name.encode(), "", INFO)
    )


def test_the_sanitizer_disqualifies_who_reads_out_of_bounds_and_keeps_what_it_said_of_the_others():
    verdicts = {
        "good": {"memcheck": sanitizer.CLEAN, "racecheck": sanitizer.CLEAN},
        "bad": {"memcheck": "found: Invalid read", "racecheck": sanitizer.CLEAN},
        "caught": {"memcheck": "found: Invalid write"},
    }
    timings = {name: Timing((10.0,), {"stage": "final"}) for name in verdicts}
    timings["caught"].protocol["disqualified"] = "In the final: it lies."
    timings["gone"] = Timing.out("It needs more device memory than is free.", disqualified=False)
    asked, shown = [], Event()

    def judge(problem, kernel):
        name = kernel.compiled.cubin.decode()
        asked.append((problem, name))
        assert shown.wait(200)  # the display goes on meanwhile
        return verdicts[name]

    finalists.sanitize(PROBLEM, {name: kernel_of(name) for name in timings}, timings, shown.set, judge)
    assert sorted(asked, key=str) == sorted(((PROBLEM, name) for name in verdicts), key=str)
    assert {name: t.protocol.get("sanitizer") for name, t in timings.items()} == verdicts | {"gone": None}
    assert not timings["good"].disqualified and not timings["gone"].disqualified
    assert (
        timings["bad"].disqualified
        == f"By compute-sanitizer: memcheck found: Invalid read; racecheck {sanitizer.CLEAN}"
    )
    assert timings["caught"].disqualified == "In the final: it lies."


@pytest.mark.slow
def test_who_interrupts_waits_for_no_finalist_that_was_not_begun():
    names = [str(n) for n in range(3 * finalists.SANITIZED_AT_ONCE)]
    asked = []

    def judge(problem, kernel):
        asked.append(kernel)
        time.sleep(5 * finalists.LOOK_SECONDS)
        return {}

    def refresh():
        raise KeyboardInterrupt

    timings = {name: Timing((10.0,), {"stage": "final"}) for name in names}
    with pytest.raises(KeyboardInterrupt):
        finalists.sanitize(PROBLEM, {name: kernel_of(name) for name in names}, timings, refresh, judge)
    assert len(asked) < len(names)


def test_boards_are_compared_by_the_kernel_that_compared_them_before_else_by_the_leader(storage):
    """The leader is the fastest of all, whoever was in the last final."""
    study = storage.create_study("s", PROBLEM, GPU, False, "random", 0, ("flash_mma",), {}, {})
    tools, numbers = Tools(compile=lambda candidate: CompiledKernel(b"", "", INFO)), []

    def found(several: bool) -> tuple[int, float] | None:
        one = finalists.reference(storage, study, PROBLEM, GPU, SPACES, tools, several)
        return one and (one.trial, one.median_us)

    assert found(True) is None
    for us, stage, config in zip((10.0, 20.0, 30.0), ("screen", "final", "screen"), valid_configs(3), strict=True):
        timing = Timing((us,), {"stage": stage, "run": str(us)})
        evaluation = Evaluation(TrialState.COMPLETE, timings=(timing,))
        numbers.append(storage.record(study, config, source_of(config), evaluation, (), "mutation").number)
    assert found(True) == (numbers[0], 10.0) and found(False) is None
    storage.add_timing(numbers[1], Timing((21.0,), {"stage": "repeat", "run": "x", "reference": numbers[2]}))
    assert found(False) == (numbers[2], 30.0)
