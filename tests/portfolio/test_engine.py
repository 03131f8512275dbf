"""The engine compiles, times and breeds; a GPU process that dies or refuses costs one kernel."""

import hashlib
import os
import signal
from functools import partial

import pytest

from evoattn.evaluation.pool import Pool, processes
from evoattn.evaluation.process import Handler
from evoattn.evaluation.workers import WorkerFailed
from evoattn.model.gpu import GPUS
from evoattn.model.records import Candidate
from evoattn.model.shape_text import parse_shape
from evoattn.portfolio import campaign
from evoattn.portfolio.campaign import timed_problems
from evoattn.portfolio.engine.compiling import compile_all
from evoattn.portfolio.engine.engine import Engine
from evoattn.portfolio.engine.kernel import Group
from evoattn.portfolio.final_table import final_tables, in_turn, with_peers

GPU = GPUS["h100"]
SHAPES = ("B=2,H=8,S=1000,D=64,dtype=bf16,mask=full", "B=1,H=8,Sq=1,Sk=4000,D=64,dtype=bf16,mask=full")


def fake_us(config) -> float:
    """A time that only the config decides, 50 to 100 µs."""
    return 50 + 50 * int(hashlib.md5(config.id.encode()).hexdigest()[:4], 16) / 65536


class FakeStage(Handler):
    """Answers as the GPU process does, without a GPU; dies at the third job."""

    def __init__(self):
        self._jobs, self._registered = 0, set()

    def __call__(self, task):
        name, *arguments = task
        if name == "register":
            self._registered.add(arguments[0])
            return None
        if name == "prove":
            self.broken = True
            raise RuntimeError("the context is lost")
        if name == "final":
            assert arguments[0] in self._registered, "a fresh process is told the problems"
            return [fake_us(k.config) for k in arguments[2]], {"flash": 60.0}, {}, {"flash": [60.0]}
        job = arguments[0]
        assert job.group in self._registered
        self._jobs += 1
        if self._jobs == 3:
            os._exit(1)
        return {i: (fake_us(job.kernel.config), False) for i in job.indexes}


class CannotStart(Handler):
    """A process that fails before its first task, as one does that lacks a library."""

    def __init__(self):
        raise OSError("libnvrtc.so: cannot open shared object file")

    def __call__(self, task):
        return None


class DiesOnce(FakeStage):
    """A GPU process that a kernel ends, after which no other can start: the file says that one has."""

    def __init__(self, file):
        if file.exists():
            raise RuntimeError("no device")
        super().__init__()
        self._file = file

    def __call__(self, task):
        if task[0] == "job":
            self._file.touch()
            os._exit(1)
        return super().__call__(task)


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


def test_compiling_gives_up_where_no_worker_can_start(soon):
    pool = Pool(processes(1, CannotStart))
    try:
        with pytest.raises(WorkerFailed) as error:
            compile_all(pool, [Candidate("split_kv", {}, "id", "source", "sm_90")])
    finally:
        pool.stop()
    assert str(error.value) == CANNOT


def test_a_run_gives_up_where_no_compile_worker_can_start(soon):
    group = Group("16 d64 full", [parse_shape(s) for s in SHAPES], ("split_kv",))
    with (
        Engine([group], GPU, jobs=1, stage=FakeStage, compiler=CannotStart) as engine,
        pytest.raises(WorkerFailed) as error,
    ):
        engine.run(60)
    assert str(error.value) == CANNOT


@pytest.mark.slow
def test_a_run_gives_up_where_no_gpu_process_can_start_any_more(soon, tmp_path):
    group = Group("16 d64 full", [parse_shape(s) for s in SHAPES], ("split_kv",))
    stage = partial(DiesOnce, tmp_path / "died")
    with Engine([group], GPU, jobs=1, stage=stage) as engine, pytest.raises(WorkerFailed, match="no device"):
        engine.run(60)


def test_groups_of_one_name_are_refused():
    with pytest.raises(ValueError, match="Two groups have one name: 16 d64, 16 d64"):
        Engine([Group("16 d64", [parse_shape(SHAPES[0])], ("split_kv",)) for _ in range(2)], GPU)


@pytest.mark.slow
def test_the_engine_finds_times_and_survives_a_dead_gpu_process(tmp_path):
    group = Group("16 d64 full", [parse_shape(s) for s in SHAPES], ("split_kv",))
    other = Group("16 d64 causal", group.problems, ("split_kv",))
    with Engine([group, other], GPU, jobs=1, stage=FakeStage) as engine:
        engine.run(6, among=[group])
        assert not other.kernels, "it is only timed"
        right = [k for k in group.kernels.values() if k.state == "right"]
        assert right and all(k.times for k in right)
        assert any(k.state.startswith("launch") for k in group.kernels.values())
        assert "the context is lost" in engine.prove(group, 1, next(k for k in right if 1 in k.times))
        *_, table = final_tables(engine, 4, 1, 60)
        *_, none = final_tables(engine, 4, 1, 0)
        beside = with_peers(engine, table, ("flash",), 1, 60)["16 d64 full"]
    made = table["16 d64 full"]
    assert set(beside["peers"]) == {str(i) for i in timed_problems(made)}
    for index, times in beside["peers"].items():
        assert times == {"ours": min(us for us in made["us"][int(index)] if us), "flash": 60.0}
    assert made["kernels"] and len(made["us"]) == len(SHAPES) and timed_problems(made)
    assert none["16 d64 full"]["kernels"] == made["kernels"] and not timed_problems(none["16 d64 full"])
    campaign.save(tmp_path / "c.jsonl.gz", [group, other], {"device": "fake"}, table)
    about, groups, tables = campaign.load(tmp_path / "c.jsonl.gz")
    assert about["device"] == "fake" and tables == table
    assert {k.id: k.times.keys() for k in groups[0].kernels.values()} == {
        k.id: k.times.keys() for k in group.kernels.values()
    }


def test_final_tables_broken_off_have_a_like_share_of_every_group():
    large, small = (Group(name, [parse_shape(SHAPES[0])] * n, ()) for name, n in (("large", 30), ("small", 6)))
    order = in_turn([large, small])
    assert sorted(i for g, i in order if g is large) == list(range(30))
    half = [g for g, _ in order[:18]]
    assert half.count(large) == 15 and half.count(small) == 3
