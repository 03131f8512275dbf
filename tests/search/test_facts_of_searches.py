"""What a search says of words, of devices and of a trial that ran again stays, until a change wants it otherwise."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from evoattn.backends.base import LaunchError
from evoattn.backends.compiler import CompileError
from evoattn.engine.progress import Progress
from evoattn.evaluation.process import Ending
from evoattn.evaluation.workers import Outcome
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import load_space, lookup
from evoattn.families.render import render
from evoattn.model.errors import WrongUse
from evoattn.model.gpu import GPUS, DetectedDevice
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import (
    CheckResult,
    CompiledKernel,
    CompileInfo,
    Evaluation,
    Study,
    Timing,
    Trial,
    TrialState,
    ValidationReport,
)
from evoattn.search import api, attempt, machines, profiled, recorded, reproduce, setup, spaces, study
from evoattn.search.recorded import Finding
from evoattn.search.recorder import Recorder
from evoattn.search.request import SearchWords, choose_boards, choose_device, plan, read_numbers, read_words
from evoattn.search.starting import begin, starting_configs
from evoattn.timing.protocol import FinalResult
from tests.support.facts import changed

H100, L4 = GPUS["h100"], GPUS["l4"]
TWO_H100 = [DetectedDevice(n, "NVIDIA H100 80GB HBM3", (9, 0), "13.0", f"GPU-{n}") for n in (0, 3)]
OLDER, OLD = DetectedDevice(4, "NVIDIA H100 80GB HBM3", (9, 0), "12.8"), DetectedDevice(0, "Tesla V100", (7, 0), "13.0")
OTHER = DetectedDevice(5, "NVIDIA L4", (8, 9), "13.0")
MACHINES = {"none": [], "two": TWO_H100, "mixed": [*TWO_H100, OTHER], "older": [TWO_H100[0], OLDER], "old": [OLD]}
WORDS = [
    *({"budget": text} for text in ("10m", "soon", "5trials", "0s", "1h30m")),
    *({"shape": text} for text in ("B=1,H=2,S=64,D=32", "B=0", "odd")),
    *({"problem": text} for text in ("seed_h100", "nothing")),
    *({"problem": "seed_h100", "shape": "B=1"}, {"gpu": "no"}, {"gpu": "A100"}, {"cache": "hot"}, {"cache": "cold"}),
    *({"sampler": "odd"}, {"sampler": "tpe"}, {"study": ""}, {"study": "a\nb"}, {"seed": -1}, {"jobs": 0}, {"jobs": 3}),
    *({"devices": text} for text in ("0,1", "all", "0,0", "x", "1234")),
    *({"devices": "0", "offline": True}, {"devices": "0", "ray": "auto"}, {"families": ("odd",)}),
    *({"choices": ("UNROLL=4",)}, {"choices": ("UNROLL",)}, {"choices": ("A=1", "A=2")}),
    *({"resume": True} | more for more in ({}, {"seed": 0}, {"cache": "warm"}, {"starting_configs": False})),
    *({"resume": True} | more for more in ({"study": "mine"}, {"shape": "B=1"}, {"families": ("flash_scalar",)})),
]
ASKED = [
    *((("flash_scalar",), ()), (("flash_scalar", "flash_wmma"), ("BLOCK_M=32,64", "KV_STAGES=1"))),
    *((("flash_scalar",), ("BLOCK_M=7",)), (("large_head",), ()), (("flash_scalar",), ("ODD=1",))),
]
"""Of families whose spaces change seldom."""
PROBLEM = AttentionProblem(1, 2, 2, 96, 96, 32)
INFO = CompileInfo(registers=128, spill_store_bytes=8, compiler="NVRTC 13.0")
CHECKS = ValidationReport("interpreter", (CheckResult("ragged", True, 1e-4, 1e-2),), 7)
CONFIG = load_space("flash_scalar", L4).starting_configs()[0]
STUDY = Study(
    1, "s", PROBLEM.to_dict(), "l4", "sm_89", False, "random", 0, ("flash_scalar",), {"evoattn": "0.1"}, {}, ""
)


def said(call: Any, *arguments: Any) -> Any:
    """What a call gives, or what its refusal says."""
    try:
        return call(*arguments)
    except (WrongUse, reproduce.ReproduceError) as error:
        return f"{type(error).__name__}: {error}"


def _trial(number: int = 1, state: TrialState = TrialState.COMPLETE, us: float = 10.0, **changes: Any) -> Trial:
    times = (Timing((us, us * 1.01, us * 0.99), {"stage": "final"}),)
    row = (number, 1, "flash_scalar", CONFIG.params, CONFIG.id, state, "", "0" * 64, INFO, CHECKS, times, 5.0)
    return replace(Trial(*row, (), "", "", 0.0), **changes)


def _of_devices() -> Iterator[Any]:
    for name, (machine, devices), offline in itertools.product(
        ("auto", "h100", "H100", "l4", "odd"), MACHINES.items(), (False, True)
    ):
        found = said(choose_device, name, devices, offline)
        yield name, machine, offline, found if isinstance(found, str) else (found[0].name, found[1] and found[1].index)
    for text, (machine, devices) in itertools.product((None, "all", "0", "3,0", "0,4", "9"), MACHINES.items()):
        found = said(choose_boards, text, devices)
        yield text, machine, found if isinstance(found, str) else [board.index for board in found]
    yield [said(read_numbers, text) for text in ("all", "0", "2,1", "", "1,", "007", "1,1")]


def _planned(families: Any, choices: Any, problem: AttentionProblem) -> Any:
    found = said(spaces.choose_spaces, families, choices, True, problem, H100)
    if isinstance(found, str):
        return found
    return {name: [len(space.starting), [len(p.values) for p in space.parameters]] for name, space in found.items()}


def _restricted() -> Any:
    """A value that one family lacks, of parameters that are all that another one has."""
    some = {name: load_space(name, H100) for name in ("flash_mma", "flash_scalar")}
    chosen = {p.name: (str(p.values[0]).lower(),) for p in some["flash_scalar"].parameters}
    return said(spaces._restricted, some, chosen)


def _again() -> Iterator[Any]:
    report = replace(CHECKS, seed=8)
    here, there = {"evoattn": "0.1", "commit": "a", "torch": "2.11"}, {"evoattn": "0.1", "commit": "b", "host": "x"}
    for then, now in itertools.product(([], [there], [here]), (here, there)):
        kept = SimpleNamespace(environments=lambda trial, then=then: then)
        with mock.patch.object(reproduce, "collect", lambda device, now=now: now):
            yield reproduce._place_finding(kept, _trial(), replace(STUDY, offline=True))
    for info in (INFO, replace(INFO, registers=127), replace(INFO, spill_load_bytes=4, compiler="NVRTC 13.2")):
        yield reproduce._compile_finding(_trial(), CompiledKernel(b"", "", info))
    for state, checks in itertools.product(TrialState, (None, CHECKS, report)):
        yield reproduce._validation_finding(_trial(), Evaluation(state, "Why.", INFO, checks))
    yield reproduce._validation_finding(_trial(validation=None), Evaluation(TrialState.COMPLETE, "", INFO, CHECKS))
    for cost, same in itertools.product((None, 5.0, 5.0001, 6.0), (True, False)):
        yield reproduce._cost_finding(_trial(), Evaluation(TrialState.ESTIMATED, "", INFO, relative_cost=cost), same)
    for us in (8.0, 9.5, 10.0, 10.2, 12.0):
        timed = Evaluation(TrialState.COMPLETE, "", INFO, timings=_trial(us=us).timings)
        yield reproduce._time_finding(_trial(), timed), reproduce._time_finding(_trial(timings=()), timed)
    for state in TrialState:
        yield said(reproduce.reproduce, None, _trial(state=state, source_hash=None), STUDY)


def _final() -> Iterator[Any]:
    """A final of two, one of whom left it, beside two peers."""
    progress, added, flushed = Progress(), [], []
    alike = (Timing((10.0, 10.2, 10.1) * 9, {"stage": "final", "run": "a"}),)
    kept = SimpleNamespace(
        add_timing=lambda *words: added.append(words),
        add_peer=lambda study, *words: added.append(words),
        leaderboard=lambda study, most: [_trial(2, timings=alike), _trial(1, timings=alike)][:most],
    )
    recorder = object.__new__(Recorder)
    recorder._progress, recorder._storage, recorder._study = progress, kept, STUDY
    recorder.flush = lambda wait=False: flushed.append(wait)
    times = {"1": Timing.out("It hangs.", True), "2": Timing((10.0,), {}), "flash": Timing((12.0,), {})}
    recorder.record_final({"1": None, "2": None}, FinalResult(times, {"math": "No."}))
    yield sorted(map(str, added)), flushed, progress.notes, progress.peers, progress.tied_with, progress.best.number


def _outcomes(state: TrialState = TrialState.COMPLETE) -> Iterator[Outcome]:
    report = CHECKS if state is TrialState.COMPLETE else None
    right = Evaluation(state, "" if report else "It is off.", INFO, report, _trial().timings)
    yield Outcome(1, Ending.RESULT, right, 0.5)
    yield Outcome(2, Ending.RESULT, "element 3 of o", 0.5)
    for ending in Ending:
        yield Outcome(3, ending, right if ending is Ending.RESULT else "It fell.", 0.5)


def _tried() -> Iterator[Any]:
    """The steps of a config that is not valid, that does not compile, that is wrong and that is right, on a device."""
    right, wrong = attempt.Step("case", "Right.", True), attempt.Step("case", "Wrong.", False)
    for reason, made, steps in itertools.product(("", "Too small."), (True, False), ([right], [right, wrong])):
        compiled = [CompiledKernel(b"", "", INFO) if made else CompileError("No", "log")]
        fakes = {"compile_candidate": mock.Mock(side_effect=compiled), "_on_device": lambda *_: iter(["on a device"])}
        fakes |= {"check_on_interpreter": lambda *_, steps=steps: iter(steps), "_occupancy": lambda *_: iter(["room"])}
        with mock.patch.multiple(attempt, **fakes):
            filled = attempt.Filled(CONFIG, {}, "", reason)
            for device in (True, False):
                fakes["compile_candidate"].side_effect = compiled
                yield [*attempt.attempt(lookup("flash_scalar"), filled, PROBLEM, L4, device)]


def _on_devices() -> Iterator[Any]:
    """A config that is tried, and a trial again, on a device: what each end of its worker becomes."""
    kernel, problem = BuiltKernel(lookup("flash_scalar"), CONFIG, L4, CompiledKernel(b"", "", INFO)), PROBLEM
    cold = replace(STUDY, options={"cache": "cold"})
    for state in (TrialState.COMPLETE, TrialState.WRONG_RESULT, TrialState.LAUNCH_ERROR):
        answered, _, *others = _outcomes(state)
        for outcomes in ([answered, inspected] for inspected in (*_outcomes(), Outcome(4, Ending.RESULT, "", 0.5))):
            worker = mock.Mock(**{"ask.side_effect": outcomes})
            with mock.patch.object(attempt, "Worker", mock.Mock(return_value=worker)) as made:
                steps = [*attempt._on_device(kernel, problem, object)]
            asked = [[type(call.args[0]), call.args[1]] for call in worker.ask.call_args_list]
            yield steps, asked, worker.stop.call_count, made.call_args.args[1][2]
        for outcome in (answered, *others):
            worker = SimpleNamespace(ask=lambda *_, one=outcome: one, stop=mock.Mock())
            fakes = {"require_device": mock.Mock(), "Worker": mock.Mock(return_value=worker)}
            with mock.patch.multiple(reproduce, **fakes):
                found = reproduce._on_device(problem, L4, cold, _trial(), CONFIG, kernel.compiled)
            required = [type(one) for one in fakes["require_device"].call_args.args]
            yield found, worker.stop.call_count, fakes["Worker"].call_args.args[1][2], required


def _run_again() -> Iterator[Any]:
    """Whole reproductions, of a trial of each kind, with today's text and another."""
    same, other = Finding("source", "Same.", True), Finding("source", "Other.", None)
    kept = SimpleNamespace(source=lambda number: f"source of {number[:3]}", environments=lambda trial: [])
    whole = Evaluation(TrialState.COMPLETE, "", INFO, CHECKS, _trial().timings, relative_cost=5.0)
    for state, rendered in itertools.product((TrialState.COMPLETE, TrialState.ESTIMATED), (same, other)):
        for compiles in (True, False):
            compiled = [CompiledKernel(b"", "", INFO) if compiles else CompileError("No", "log")]
            fakes = {
                "require_trusted": mock.Mock(return_value=rendered),
                "require_fitting": mock.Mock(),
                "compile_source": mock.Mock(side_effect=compiled),
                "_code_finding": mock.Mock(return_value=[Finding("code", "The same.", None)]),
                "evaluate_offline": mock.Mock(return_value=whole),
                "_on_device": mock.Mock(return_value=whole),
                "collect": lambda device: {"evoattn": "0.1"},
            }
            with mock.patch.multiple(reproduce, **fakes):
                found = reproduce.reproduce(kept, _trial(state=state), STUDY, True)
            called = {name: fake.call_args for name, fake in fakes.items() if name != "collect"}
            said_to = {name: call and [str(one)[:20] for one in call.args] for name, call in called.items()}
            yield found.findings, found.reproduced, said_to


def _recorded() -> Iterator[Any]:
    """Of sources as they are rendered today and as they are not, and of machines like the trial's and others."""
    same = render(lookup("flash_scalar"), PROBLEM, CONFIG, L4).source_hash
    trials = [_trial(source_hash=same), _trial(), _trial(family="gone"), _trial(config={"BLOCK_M": 7})]
    for trial, trusts in itertools.product(trials, (False, True)):
        yield said(recorded.require_trusted, trial, PROBLEM, L4, trusts)
    for outdated in (None, "Launches have another argument."):
        family = SimpleNamespace(why_outdated=lambda config, source, words=outdated: words and f"{words} {source}")
        with mock.patch.object(recorded.registry, "lookup", lambda name, family=family: family):
            yield said(recorded.require_fitting, _trial(), "text")
    for (name, devices), spec in itertools.product(MACHINES.items(), (H100, L4)):
        with mock.patch.object(recorded.gpus, "detect_devices", lambda devices=devices: devices):
            yield name, said(recorded.require_device, _trial(), spec)


def _counted() -> Iterator[Any]:
    """Counters of a trial and of a peer: the one that is named, the fastest, or none."""
    timing = _trial().timing

    def count(problem: Any, kernel: Any, cache: str) -> Any:
        if kernel == "odd":
            raise profiled.ProfileError("It cannot be read.")
        return SimpleNamespace(tool="ncu", csv=f"{getattr(kernel, 'config', kernel)} {cache}"[:12])

    states = TrialState.COMPLETE, TrialState.TIMEOUT
    for peers, peer, cache, state in itertools.product(
        ({}, {"flash": [timing]}), (None, "odd", "math"), ("warm", "cold", None), states
    ):
        kept, checks = mock.Mock(), mock.Mock()
        kept.peers.return_value, kept.source.return_value = peers, "text"
        study = replace(STUDY, options={"cache": cache} if cache else {})
        fakes = {"require_trusted": checks.trusted, "require_fitting": checks.fitting, "parse": len}
        fakes["compile_source"] = lambda *words: CompiledKernel(b"", "", INFO)
        fakes["fastest_peer"] = lambda timing, peers: SimpleNamespace(backend="flash") if peers else None
        with mock.patch.multiple(profiled, **fakes):
            words = kept, _trial(state=state), study, peer, True, count, checks.device
            found = said(lambda words=words: [*profiled.profile_trial(*words)])
        added = [[call.args[0] is study, call.args[1].peer, call.args[2]] for call in kept.add_profile.call_args_list]
        yield found, added, [f"{name} {[str(one)[:20] for one in args]}" for name, args, _ in checks.mock_calls]
    fakes["compile_source"] = mock.Mock(side_effect=CompileError("No", "log"))
    with mock.patch.multiple(profiled, **fakes):
        yield said(lambda: [*profiled.profile_trial(kept, _trial(), study, None, True, count, checks.device)])


def _machines() -> Iterator[Any]:
    for boards, given in itertools.product(([], TWO_H100, [OLDER]), ("", "4,5,6,7,8")):
        plan = SimpleNamespace(boards=boards)
        with mock.patch.dict("os.environ", {"CUDA_VISIBLE_DEVICES": given}):
            fleet = machines.Machines([]).fleet(SearchWords(jobs=3), plan)
        yield fleet.jobs, fleet.boards, fleet._visible, machines.Machines([], "a cluster").fleet(None, plan)


def _restored() -> Iterator[Any]:
    """What a study of before tells a search that goes on with it."""
    states = TrialState.COMPLETE, TrialState.DUPLICATE, TrialState.TIMEOUT
    trials = [_trial(n, state, source_hash=source) for n, (state, source) in
              enumerate(itertools.product(states, (None, "1" * 64)), 1)]  # fmt: skip
    kept = mock.Mock(**{"peers.return_value": {"flash": [_trial(us=9.0).timing, _trial(us=7.0).timing]}})
    kept.iter_trials.return_value = trials
    recorder = object.__new__(Recorder)
    recorder._storage, recorder._study, recorder._sampler, recorder._progress = kept, STUDY, mock.Mock(), Progress()
    recorder.seen = mock.Mock()
    recorder.restore(PROBLEM, L4, {"flash_scalar": load_space("flash_scalar", L4)})
    numbers = [call.args[1] for call in recorder.seen.recorded.call_args_list]
    restored = [trial.number for trial in recorder._sampler.restore.call_args.args[0]]
    yield numbers, restored, recorder._progress.peers, recorder._progress.best.number


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    for words in WORDS:
        found = said(read_words, SearchWords(**words))
        yield f"words {words}", found if isinstance(found, str) else [asdict(found.budget), found.problem]
    yield "defaults", asdict(SearchWords(db="x", jobs=2)) | {"processes": SearchWords(jobs=5).processes}
    yield "devices", [*_of_devices()]
    for words in ({}, {"devices": "3"}, {"gpu": "l4"}, {"offline": True, "gpu": "l4"}):
        found = said(plan, SearchWords(**words, families=("flash_scalar",)), PROBLEM, TWO_H100)
        yield f"plan {words}", found if isinstance(found, str) else [found.gpu.name, found.device, found.boards]
    for (families, choices), head_dim in itertools.product(ASKED, (32, 512)):
        yield f"spaces {families} {choices} {head_dim}", _planned(families, choices, PROBLEM.with_(head_dim=head_dim))
    for family, problem in itertools.product(("flash_scalar",), (PROBLEM, PROBLEM.with_(seqlen_q=1))):
        space = load_space(family, H100)
        chosen = [c.params for c in starting_configs(space, problem, H100)]
        yield f"starting {family} {problem.seqlen_q}", [chosen, begin({family: space}, problem, H100)[family].starting]
    launches = [
        KernelLaunch("one", (2, 3, 5), (64, 2, 1), 100, ()),
        KernelLaunch("two", (7, 1, 1), (1024, 1, 1), 2**20, ()),
    ]
    info = SimpleNamespace(info=CompileInfo(registers=64, static_smem_bytes=10))
    yield (
        "launches",
        [*attempt._occupancy(SimpleNamespace(compiled=info, gpu=L4, launches=lambda p: launches), PROBLEM)],
    )
    yield "all parameters of a family", _restricted()
    yield "again", [*_again()]
    yield "final", [*_final()]
    yield "tried", [*_tried()]
    yield "on devices", [*_on_devices()]
    yield "run again", [*_run_again()]
    yield "recorded", [*_recorded()]
    yield "counted", [*_counted()]
    yield "machines", [*_machines()]
    yield "restored", [*_restored()]
    for best, ratio, words in itertools.product(
        (_trial(), _trial(state=TrialState.ESTIMATED, timings=())), (None, 0.9), ("", "It is kept.")
    ):
        progress = SimpleNamespace(ratio=ratio, peers={"flash": 2.0})
        result = api.SearchResult("s", PROBLEM, "postgresql://me:secret@host/db", best, progress, words)
        yield f"result {best.timing is None} {ratio} {words}", [str(result), result.value, result.ratio, result.peers]


@pytest.mark.slow
def test_what_a_search_says_stays():
    assert not changed("searching")


def test_a_launch_that_no_device_takes_is_a_step_that_failed():
    def refuses(*_: Any) -> Iterator[Any]:
        raise LaunchError("No.")
        yield

    with mock.patch.object(attempt, "_cases", refuses):
        (step,) = attempt.check_on_interpreter(SimpleNamespace(compiled=SimpleNamespace(info=INFO)), None, PROBLEM)
    assert step.agrees is False and step.sentence == "No."


def test_a_sampler_thinks_ahead_where_kernels_are_timed_alone():
    words, machines = SearchWords(), SimpleNamespace(fleet=lambda *_: None)
    wanted = SimpleNamespace(spaces={}, problem=PROBLEM, gpu=L4)
    ahead = mock.patch.object(setup.AheadSampler, "start", lambda *_: "ahead")
    with ahead, mock.patch.multiple(setup, Search=lambda *made: made[3], sampler_of=lambda *_: "here"):
        for offline, where in ((True, "here"), (False, "ahead")):
            prepared = setup.PreparedSearch(None, replace(STUDY, offline=offline), wanted, None, words)
            assert setup.make_search(prepared, machines) == where


def test_the_reference_of_before_is_used():
    names = ("Devices", "Compilers", "ahead", "finalists")
    with mock.patch.multiple(study, **dict.fromkeys(names, mock.DEFAULT)) as fakes:
        running = mock.Mock(_kept=(), study=STUDY, fleet=mock.Mock(boards=["one"]))
        study.Search._start_workers(running)
    refer_to = fakes["Devices"].start.return_value.scale.refer_to
    refer_to.assert_called_once_with(fakes["finalists"].reference.return_value)
