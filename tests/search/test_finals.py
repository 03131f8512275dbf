"""Finals: who takes part, who wins, who ties, and what becomes of a worker or a finalist that dies in one."""

import io
import time
from dataclasses import replace
from threading import Event

import pytest
from rich.console import Console

from evoattn.backends.compiler import CompileError
from evoattn.correctness import sanitizer
from evoattn.engine.budget import Budget
from evoattn.engine.device import Device
from evoattn.engine.devices import Devices
from evoattn.engine.finals import BEGINS_AFTER, PEERS_FACTOR, Final, Referee
from evoattn.engine.progress import Progress
from evoattn.engine.tools import SearchError, Tools
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import OnProblem
from evoattn.evaluation.workers import START_TRIES, BaseWorker, WorkerFailed
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model import gpu
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, CompiledKernel, CompileInfo, Evaluation, Timing, TrialState
from evoattn.model.space import KernelConfig
from evoattn.report.show import print_trial
from evoattn.samplers.base import STARTING, SamplerSetup
from evoattn.samplers.registry import make_sampler
from evoattn.search import finalists
from evoattn.search.starting import starting_configs
from evoattn.timing.protocol import FinalResult
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


class FakeWorker(BaseWorker):
    """Ends a task when it is told to."""

    def __init__(self, ready=True):
        super().__init__()
        self.ready, self.tasks, self.endings, self.stopped, self.seconds = ready, [], [], False, []

    def submit(self, tag, task, seconds):
        self._begin(tag)
        self.tasks.append(task)
        self.seconds.append(seconds)

    def end(self, ending=Ending.RESULT, value=None):
        self.endings.append((ending, value))

    def poll(self):
        return self._end(*self.endings.pop(0)) if self.busy and self.endings else None

    def stop(self):
        self.stopped = True

    def _step(self, refresh):
        refresh()
        return self.poll()


def result(us, **refusals):
    return FinalResult({"flash": Timing((us,), {})}, refusals)


def make(own):
    device = Device(FakeWorker(), Progress(), 20.0)
    return Referee(lambda: own, device, 20.0), device.worker


def test_the_peers_are_prepared_beside_candidates_and_timed_alone():
    own = FakeWorker()
    referee, candidates = make(own)
    referee.go_on(BEGINS_AFTER - 1)
    assert not referee.workers and not own.tasks
    candidates.submit("a candidate", None, 1.0)
    referee.go_on(BEGINS_AFTER)
    assert referee.workers == [own] and own.busy and not referee.wants_board
    own.end(value=result(99.0, fa4="It is not installed."))
    assert referee.poll() is None and referee.wants_board  # those times are not kept
    referee.go_on(BEGINS_AFTER)
    assert not own.busy, "a candidate is still on the board"
    candidates.end()
    candidates.poll()
    referee.go_on(BEGINS_AFTER)
    assert own.busy and own.tasks[1].refused == ("fa4",)
    own.end(value=result(40.0))
    times = referee.poll()
    assert times.timings["flash"].median_us == 40.0 and times.refusals == {"fa4": "It is not installed."}
    assert own.seconds == [PEERS_FACTOR * 20.0] * 2, "of what a candidate may take"
    referee.go_on(99)
    assert not referee.wants_board and not own.busy and referee.poll() is None


def test_where_a_board_has_one_worker_that_times_the_peers_too():
    referee, candidates = make(None)
    candidates.submit("a candidate", None, 1.0)
    referee.go_on(BEGINS_AFTER)
    assert referee.wants_board and len(candidates.tasks) == 1
    candidates.end()
    assert not referee.owns(candidates.poll())
    referee.go_on(BEGINS_AFTER)
    assert candidates.busy and referee.times_peers and referee.poll() is None
    candidates.end(value=result(40.0))
    outcome = candidates.poll()
    assert referee.owns(outcome) and referee.take(outcome).timings["flash"].median_us == 40.0
    assert not referee.wants_board and not referee.times_peers


def test_peers_that_cannot_be_timed_are_left_to_the_final():
    own = FakeWorker()
    referee, _ = make(own)
    referee.go_on(BEGINS_AFTER)
    own.end(Ending.RAISED, "RuntimeError: no")
    assert referee.poll() is None and not referee.wants_board
    own.endings = [(Ending.RESULT, result(30.0))]
    held = referee.hold(Final({}), 9.0, lambda: None, pytest.fail)
    assert held.timings["flash"].median_us == 30.0 and own.tasks[-1].refused == ()


def test_a_final_of_a_few_candidates_has_a_worker_of_its_own_too():
    """Before the peers were begun there is none."""
    own = FakeWorker()
    referee, candidates = make(own)
    own.endings, candidates.endings = ([(Ending.RESULT, result(us))] for us in (30.0, 40.0))
    assert referee.hold(Final({}), 9.0, lambda: None, pytest.fail).timings["flash"].median_us == 30.0
    assert referee.workers == [own]
    referee.go_on(BEGINS_AFTER)
    assert not own.busy, "the final has timed the peers"


def test_the_final_waits_for_peers_that_are_being_prepared():
    own = FakeWorker()
    referee, _ = make(own)
    referee.go_on(BEGINS_AFTER)
    own.endings = [(Ending.RESULT, result(99.0)), (Ending.RESULT, result(30.0))]
    held = referee.hold(Final({}), 9.0, lambda: None, pytest.fail)
    assert held.timings["flash"].median_us == 30.0 and len(own.tasks) == 2
    referee.stop()
    assert own.stopped


@pytest.mark.parametrize("in_final", [False, True])
def test_a_worker_of_its_own_that_does_not_start_costs_nothing(in_final):
    own = FakeWorker(ready=False)
    referee, candidates = make(own)
    if not in_final:
        referee.go_on(BEGINS_AFTER)
        own.failures_to_start = START_TRIES
        assert referee.poll() is None and own.stopped and not referee.workers and referee.wants_board
        referee.go_on(BEGINS_AFTER)
        candidates.end(value=result(40.0))
        assert referee.take(candidates.poll()).timings["flash"].median_us == 40.0
    own.failures_to_start = START_TRIES
    candidates.endings = [(Ending.RESULT, result(30.0))]
    assert referee.hold(Final({}), 9.0, lambda: None, pytest.fail).timings["flash"].median_us == 30.0


def test_a_board_that_can_have_one_worker_is_asked_for_another_once():
    device, asked = Device(FakeWorker(), Progress(), 20.0), []
    referee = Referee(lambda: asked.append("a worker"), device, 20.0)
    referee.go_on(BEGINS_AFTER)
    device.worker.endings = [(Ending.RESULT, result(30.0))] * 2
    assert referee.take(device.worker.poll()).timings["flash"].median_us == 30.0
    assert referee.hold(Final({}), 9.0, lambda: None, pytest.fail).timings["flash"].median_us == 30.0
    assert asked == ["a worker"]


def test_a_final_that_cannot_be_held_ends_the_search():
    referee, candidates = make(None)
    candidates.end(Ending.RAISED, "KeyError: 1")
    with pytest.raises(SearchError, match="KeyError: 1 All trials are recorded"):
        referee.hold(Final({}), 9.0, lambda: None, pytest.fail)
    candidates.failures_to_start, candidates.ready = START_TRIES, False
    with pytest.raises(WorkerFailed):
        referee.hold(Final({}), 9.0, lambda: None, pytest.fail)


@pytest.mark.parametrize("batch, expected", [(1, True), (4096, False)])
def test_a_problem_that_fills_the_memory_gets_no_second_worker(batch, expected):
    asked = []

    class OneBoard:
        boards = ("",)

        def devices(self, make, args):
            return [FakeWorker()]

        def referee(self, make, args):
            asked.append(args)
            return FakeWorker()

    problem = AttentionProblem(batch, 8, 8, 1024, 1024, 64)
    boards = Devices.start(OneBoard(), Tools(), (problem, GPUS["h100"], "warm"), Progress())
    boards.referee.go_on(BEGINS_AFTER)
    assert bool(asked) == bool(boards.referee.workers) == expected


OF_FINALISTS = AttentionProblem(1, 4, 4, 256, 256, 64)
ONE_GPU = gpu.GPUS["h100"]
SPACES = {"flash_mma": load_space("flash_mma", ONE_GPU)}
INFO = CompileInfo(registers=64)


def valid_configs(count: int) -> list[KernelConfig]:
    (config, *_), space = starting_configs(SPACES["flash_mma"], OF_FINALISTS, ONE_GPU), SPACES["flash_mma"]
    near = [space.make_config(config.params | {p.name: value}) for p in space.parameters for value in p.values]
    valid = {c.id: c for c in near if FAMILIES["flash_mma"].why_invalid(OF_FINALISTS, c, ONE_GPU) is None}
    return list(valid.values())[:count]


def source_of(config: KernelConfig) -> Candidate:
    return render(FAMILIES["flash_mma"], OF_FINALISTS, config, ONE_GPU)


@pytest.mark.parametrize(
    "operator, before, seated", [("mutation", 0, ["5", "6"]), (STARTING, finalists.FINALISTS, ["13"])]
)
def test_who_cannot_run_today_as_recorded_leaves_the_seat_to_the_next(storage, operator, before, seated):
    """One is of a family that is gone, one has a value that the space has not, one has another source, one no longer
    compiles; the last two run. Of starting configs behind the best candidates, one gets a seat."""
    study = storage.create_study("s", OF_FINALISTS, ONE_GPU, False, "random", 0, ("flash_mma",), {}, {})
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

    chosen = finalists.choose(storage, study, OF_FINALISTS, ONE_GPU, SPACES, Tools(compile=compile_all_but_one))
    assert list(chosen) == seated
    first = chosen[seated[0]]
    assert (first.config, first.gpu, first.compiled.cubin) == (right, ONE_GPU, honest.source.encode())


@pytest.mark.parametrize("operator", ["mutation", STARTING])
def test_a_seat_is_for_the_best_time_of_all_not_for_who_was_in_the_last_final(storage, operator):
    seats = finalists.FINALISTS
    study = storage.create_study("s", OF_FINALISTS, ONE_GPU, False, "random", 0, ("flash_mma",), {}, {})
    for us, config in enumerate(valid_configs(seats + 1), 10):
        stage = "final" if us == 10 + seats else "screen"
        timing = Timing((float(us),), {"stage": stage, "run": str(us)})
        evaluation = Evaluation(TrialState.COMPLETE, timings=(timing,))
        storage.record(study, config, source_of(config), evaluation, (), operator)
    tools = Tools(compile=lambda candidate: CompiledKernel(b"", "", INFO))
    chosen = finalists.choose(storage, study, OF_FINALISTS, ONE_GPU, SPACES, tools)
    assert list(chosen) == [str(number) for number in range(1, seats + 1)]


def kernel_of(name: str) -> BuiltKernel:
    return BuiltKernel(
        FAMILIES["flash_mma"], KernelConfig("flash_mma", {}), ONE_GPU, CompiledKernel(name.encode(), "", INFO)
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

    finalists.sanitize(OF_FINALISTS, {name: kernel_of(name) for name in timings}, timings, shown.set, judge)
    assert sorted(asked, key=str) == sorted(((OF_FINALISTS, name) for name in verdicts), key=str)
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
        finalists.sanitize(OF_FINALISTS, {name: kernel_of(name) for name in names}, timings, refresh, judge)
    assert len(asked) < len(names)


def test_boards_are_compared_by_the_kernel_that_compared_them_before_else_by_the_leader(storage):
    """The leader is the fastest of all, whoever was in the last final."""
    study = storage.create_study("s", OF_FINALISTS, ONE_GPU, False, "random", 0, ("flash_mma",), {}, {})
    tools, numbers = Tools(compile=lambda candidate: CompiledKernel(b"", "", INFO)), []

    def found(several: bool) -> tuple[int, float] | None:
        one = finalists.reference(storage, study, OF_FINALISTS, ONE_GPU, SPACES, tools, several)
        return one and (one.trial, one.median_us)

    assert found(True) is None
    for us, stage, config in zip((10.0, 20.0, 30.0), ("screen", "final", "screen"), valid_configs(3), strict=True):
        timing = Timing((us,), {"stage": stage, "run": str(us)})
        evaluation = Evaluation(TrialState.COMPLETE, timings=(timing,))
        numbers.append(storage.record(study, config, source_of(config), evaluation, (), "mutation").number)
    assert found(True) == (numbers[0], 10.0) and found(False) is None
    storage.add_timing(numbers[1], Timing((21.0,), {"stage": "repeat", "run": "x", "reference": numbers[2]}))
    assert found(False) == (numbers[2], 30.0)


def test_a_final_of_another_problem_says_of_which():
    assert Final({}, problem=PROBLEM).task == OnProblem(PROBLEM, Final({}).task)
