"""A search of groups compiles, times and breeds; a GPU process that dies or refuses costs one kernel."""

import hashlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from evoattn.engine.group_search import TRIES, GroupSearch
from evoattn.engine.groups import Group, Kernel
from evoattn.engine.tools import Tools
from evoattn.evaluation.process import Ending, Handler
from evoattn.evaluation.tasks import Compiled, OnProblem, Surveyed
from evoattn.evaluation.workers import Outcome, WorkerFailed
from evoattn.families.registry import load_space
from evoattn.fleet.base import LocalFleet
from evoattn.model.gpu import GPUS
from evoattn.model.records import CompiledKernel, CompileInfo, Evaluation, Proposal, Timing, TrialState
from evoattn.model.shape_text import parse_shape
from evoattn.portfolio import campaign
from evoattn.timing.protocol import FinalResult

GPU = GPUS["h100"]
SHAPES = ("B=2,H=8,S=1000,D=64,dtype=bf16,mask=full", "B=1,H=8,Sq=1,Sk=4000,D=64,dtype=bf16,mask=full")


def fake_us(config) -> float:
    """A time that only the config decides, 50 to 100 µs."""
    return 50 + 50 * int(hashlib.md5(config.id.encode()).hexdigest()[:4], 16) / 65536


class FakeDevice(Handler):
    """Answers as the GPU process does, without a GPU; dies twice at the third kernel that it is asked for."""

    def __init__(self, problem, gpu, cache):
        assert problem is None, "each task says what it is for"

    def __call__(self, task):
        if isinstance(task, OnProblem):
            times = {name: Timing((fake_us(k.config),), {}) for name, k in task.task.finalists.items()}
            theirs = {} if "flash" in task.task.refused else {"flash": Timing((60.0,), {})}
            return FinalResult(times | theirs, {})
        note = Path(os.environ["DEATHS"])
        seen = note.read_text().split() if note.exists() else []
        known = task.kernel.config.id
        if len(seen) < 3 and known not in seen:
            seen.append(known)
            note.write_text(" ".join(seen))
        if len(seen) == 3 and known == seen[2]:
            os._exit(1)
        return Surveyed(((fake_us(task.kernel.config), False),) * len(task.problems))


class CannotStart(Handler):
    """A process that fails before its first task, as one does that lacks a library."""

    def __init__(self, *about):
        raise OSError("libnvrtc.so: cannot open shared object file")

    def __call__(self, task):
        return None


class DiesOnce(Handler):
    """A GPU process that a kernel ends, after which no other can start: the file says that one has."""

    def __init__(self, problem, gpu, cache):
        self._file = Path(os.environ["DEATHS"])
        if self._file.exists():
            raise RuntimeError("no device")

    def __call__(self, task):
        self._file.touch()
        os._exit(1)


@pytest.fixture(autouse=True)
def deaths(tmp_path, monkeypatch):
    monkeypatch.setenv("DEATHS", str(tmp_path / "deaths"))


CANNOT = "A worker process failed to start 3 times; the last time: OSError: libnvrtc.so: cannot open shared object file"


@pytest.fixture
def soon():
    """Fails the test after 20 s: what is tested here is that a wait ends."""

    def give_up(*_):
        pytest.fail("it waits for workers that cannot start")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def search(groups, tools):
    return GroupSearch(groups, GPU, fleet=LocalFleet(1), tools=tools)


def group_of_both(name="16 d64 full"):
    return Group(name, [parse_shape(s) for s in SHAPES], ("split_kv",))


@pytest.mark.slow
def test_compiling_gives_up_where_no_worker_can_start(soon):
    group = group_of_both()
    kernel = Kernel("split_kv", load_space("split_kv", GPU).starting_configs()[0].params)
    broken = Tools(make_compiler=CannotStart, make_device=FakeDevice)
    with search([group], broken) as engine, pytest.raises(WorkerFailed) as error:
        engine.compile_all([(group, kernel)])
    assert str(error.value) == CANNOT


@pytest.mark.slow
def test_a_run_gives_up_where_no_compile_worker_can_start(soon):
    broken = Tools(make_compiler=CannotStart, make_device=FakeDevice)
    with search([group_of_both()], broken) as engine, pytest.raises(WorkerFailed) as error:
        engine.run(60)
    assert str(error.value) == CANNOT


@pytest.mark.slow
def test_a_run_gives_up_where_no_gpu_process_can_start_any_more(soon):
    with search([group_of_both()], Tools(make_device=DiesOnce)) as engine, pytest.raises(WorkerFailed, match="no dev"):
        engine.run(60)


def test_groups_of_one_name_are_refused():
    with pytest.raises(ValueError, match="Two groups have one name: 16 d64, 16 d64"):
        GroupSearch([group_of_both("16 d64") for _ in range(2)], GPU)


def test_groups_without_a_kernel_do_not_end_a_search_of_others():
    none = [Group(f"none {number}", [parse_shape(SHAPES[0])], ()) for number in range(TRIES)]
    engine = GroupSearch([*none, group_of_both()], GPU)
    engine._compilers = mock.Mock(**{"idle.side_effect": lambda: ["a worker"]}, workers=["a worker"], busy=0)
    assert not engine._feed_compilers() and not engine.exhausted
    assert engine._feed_compilers() and engine._compilers.submit.call_count == 1


def test_what_was_timed_or_found_wrong_since_it_was_chosen_is_not_asked_for():
    group, (first, second, third) = group_of_both(), load_space("split_kv", GPU).starting_configs()[:3]
    timed, wrong = Kernel("split_kv", first.params, times={0: 5.0}, state="right"), Kernel("split_kv", second.params)
    wrong.state = "wrong"
    group.kernels |= {timed.id: timed, wrong.id: wrong}
    engine, new = GroupSearch([group], GPU), Kernel("split_kv", third.params)
    engine.ask([(group, Kernel("split_kv", one.params), (0, 1)) for one in (first, second)] + [(group, new, (0, 1))])
    assert [*engine._asked] == [(group, timed, (1,)), (group, new, (0, 1))]
    engine.ask([(group, Kernel("split_kv", first.params), (0,))])
    assert not engine._asked


@pytest.fixture
def engine():
    """Without processes: what is given to them is kept. Of two groups the second is due three times as much."""
    engine = GroupSearch([group_of_both("one"), replace(group_of_both("two"), weight=3.0)], GPU)
    engine._compilers = mock.Mock(workers=[])
    engine._devices = mock.Mock(**{"free.return_value": [mock.Mock()]})
    engine._clock = mock.Mock(**{"spent.return_value": False})
    return engine


@pytest.mark.slow
def test_a_group_has_turns_by_its_weight(engine):
    for _ in range(40):
        assert engine._begin_next(["worker"])
    submitted = [call.args[0] for call in engine._compilers.submit.call_args_list]
    first, second = (sum(pending.group is group for pending in submitted) for group in engine.groups)
    assert first + second == 40 and 2 * first <= second <= 4 * first
    assert all(pending.bred is pending.group.kernels[pending.bred.id] for pending in submitted)


def test_a_kernel_that_was_asked_for_is_compiled_timed_and_timed_on_more(engine):
    group, board = engine.groups[0], engine._devices.free()[0]
    configs = [Kernel("split_kv", config.params) for config in load_space("split_kv", GPU).starting_configs()]
    kernel = next(one for one in configs if engine.serves(group, one) == [0, 1])
    engine.ask([(group, kernel, (1,))])
    assert engine._begin_next(["worker"])
    pending, worker = engine._compilers.submit.call_args.args
    assert pending.proposal == Proposal("split_kv", kernel.params, (), kernel.origin)
    assert worker == "worker" and pending.place == (group, kernel) and pending.problem == group.problems[1]
    assert (pending.indexes, pending.rest, pending.check, pending.again, pending.kernel) == (
        (1,),
        (0,),
        True,
        False,
        None,
    )
    failure = Evaluation(TrialState.COMPILE_ERROR, "no")
    for answer in (failure, Compiled(None, failure)):
        engine._compiled(pending, answer)
        assert kernel.state == "compile: no" and not engine._ready
    kernel.state = "new"
    code = CompiledKernel(
        b"code", "ptx", CompileInfo(registers=40, spill_store_bytes=8, spill_load_bytes=8, seconds=0.5)
    )
    engine._compiled(pending, Compiled(code, None, 3.0))
    assert engine.compiled == 3 and (kernel.registers, kernel.compile_seconds) == (40, 0.5)
    engine._feed_boards()
    timed, task = board.submit.call_args.args
    assert timed.kernel is code and timed.relative_cost is None and task.problems == (group.problems[1],)
    engine._take(board, Outcome(timed, Ending.RESULT, Surveyed(((20.0, False),)), 2.0))
    assert kernel.state == "right" and kernel.times == {1: 20.0} and (engine.measured, engine.busy_seconds) == (1, 2.0)
    engine._feed_boards()  # nothing fresh waits: a promising kernel is timed on the rest, and is not checked again
    timed, task = board.submit.call_args.args
    assert board.submit.call_count == 2 and (timed.indexes, task.check, task.best_us) == ((0,), False, (float("inf"),))
    engine._feed_boards()
    engine.ask([(group, kernel, (0, 1))])
    assert engine._begin_next([]) and engine._ready.take().indexes == (0,)  # it is compiled, and has one of its times
    assert board.submit.call_count == 2 and engine._compilers.submit.call_count == 1


def test_a_run_forgets_who_was_promising_and_begins_where_it_is_told(engine):
    engine._promising.append("one")
    engine._devices = None
    with mock.patch.object(engine, "_loop"):
        engine.run(0.0, among=engine.groups[1:])
        assert engine._searched == engine.groups[1:] and not engine._promising
        engine._clock.start()
        assert engine._clock.spent(0), "its seconds are none"
        engine.run(0.0)
    assert engine._searched == engine.groups
    engine.fleet, engine.tools = mock.Mock(), Tools()
    with mock.patch("evoattn.engine.group_search.Devices"), mock.patch("evoattn.engine.group_search.Compilers"), engine:
        engine.fleet.compilers.assert_called_once_with(engine.tools.make_compiler, (GPU, False), beside=True)


def test_what_is_compiled_is_not_compiled_again(engine):
    (one, two), (first, second) = engine.groups, load_space("split_kv", GPU).starting_configs()[:2]
    first, second = Kernel("split_kv", first.params), Kernel("split_kv", second.params)
    engine._code[one.name, first.id] = CompiledKernel(b"", "", CompileInfo())
    engine._compilers = mock.Mock(workers=[], busy=0, **{"idle.return_value": ["a", "b", "c"], "poll.return_value": []})
    engine.compile_all([(one, first), (two, first), (one, second), (one, second)])
    submitted = [call.args[0] for call in engine._compilers.submit.call_args_list]
    assert {(pending.group.name, pending.bred.id) for pending in submitted} == {("two", first.id), ("one", second.id)}
    assert len(submitted) == 2 and not any(pending.check for pending in submitted)


@pytest.mark.slow
def test_a_search_finds_times_and_survives_a_dead_gpu_process(tmp_path):
    group = group_of_both()
    other = Group("16 d64 causal", group.problems, ("split_kv",))
    with search([group, other], Tools(make_device=FakeDevice)) as engine:
        for _ in range(12):  # a busy machine compiles three kernels in more than five seconds
            engine.run(5, among=[group])
            if any(k.state.startswith("launch") for k in group.kernels.values()):
                break
        assert not other.kernels, "it is only timed"
        right = [k for k in group.kernels.values() if k.state == "right"]
        assert right and all(k.times for k in right)
        assert sum(k.state.startswith("launch") for k in group.kernels.values()) == 1, "it had two tries"
        compiled, known = engine.compiled, right[0]
        known.times, new = {}, Kernel("split_kv", {**known.params, "SPLITS": 9})
        engine.ask([(group, Kernel("split_kv", known.params), (1,)), (group, new, (0, 1))])
        while not (known.times and new.times):
            engine.run(0.1, among=[group])
        assert 1 in known.times and new.times.keys() == {0, 1} and group.kernels[new.id] is new
        assert engine.compiled > compiled, "the new one"
        times = engine.final(group, 1, [known, new], peers=("flash",)).right_us
    assert times == {known.id: fake_us(known.config), new.id: fake_us(new.config), "flash": 60.0}
    table = {group.name: {"kernels": [known.id], "us": [[None], [times[known.id]]]}}
    campaign.save(tmp_path / "c.jsonl.gz", [group, other], {"device": "fake"}, table)
    about, groups, tables = campaign.load(tmp_path / "c.jsonl.gz")
    assert about["device"] == "fake" and tables == table
    assert {k.id: k.times.keys() for k in groups[0].kernels.values()} == {
        k.id: k.times.keys() for k in group.kernels.values()
    }
