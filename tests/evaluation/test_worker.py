"""Worker processes: results come back; a crash, a hang and a broken context cost one task and a respawn."""

import os
import signal
import subprocess
import sys
import time

import pytest

from evoattn.evaluation.process import Ending, Handler, adopt
from evoattn.evaluation.workers import Pool, Worker, WorkerFailed, processes, wait_for_any

pytestmark = pytest.mark.slow


class Obedient(Handler):
    """Does what its task says."""

    def __call__(self, task):
        what, value = task
        if what == "report and exit":
            for doing in value:
                self.report(doing)
            os._exit(1)
        if what == "exit":
            os._exit(value)
        if what == "hang":
            time.sleep(value)
        if what == "compute":
            end = time.process_time() + value
            while time.process_time() < end:
                pass
        if what == "raise":
            raise ValueError(value)
        if what == "break":
            self.broken = True
        return what, os.getpid()


class CannotStart(Handler):
    def __init__(self):
        raise RuntimeError("no device")

    def __call__(self, task):
        return task


class Watched(dict):
    """An environment, and which of its names were deleted or set."""

    def __init__(self, *words, **more):
        super().__init__(*words, **more)
        self.touched = set()

    def __setitem__(self, name, value):
        self.touched.add(name)
        super().__setitem__(name, value)

    def __delitem__(self, name):
        self.touched.add(name)
        super().__delitem__(name)


def test_a_process_takes_over_an_environment_and_leaves_alone_what_is_the_same():
    own, wanted = Watched(STAYS="1", CHANGES="1", GOES="1"), {"STAYS": "1", "CHANGES": "2", "COMES": "3"}
    adopt(wanted, own)
    assert own == wanted and own.touched == {"CHANGES", "GOES", "COMES"}


@pytest.fixture(scope="module")
def worker():
    worker = Worker(Obedient)
    yield worker
    worker.stop()


def test_a_result_comes_back_from_one_process(worker):
    first, second = worker.ask(("echo", 0), 200.0), worker.ask(("echo", 0), 200.0)
    assert first.ending is Ending.RESULT
    assert first.value == second.value


def test_a_process_whose_asker_is_gone_ends_without_an_error():
    worker = Worker(Obedient)
    worker.wait()
    worker.submit(None, ("hang", 0.2), 200.0)
    worker.connection.close()
    worker._process.join(200)
    assert worker._process.exitcode == 0


def test_a_death_is_told_with_what_the_task_was_about(worker):
    outcome = worker.ask(("report and exit", ["this", "that"]), 200.0)
    assert outcome.ending is Ending.DIED and outcome.doing == "that"
    assert worker.ask(("echo", 0), 200.0).doing == ""


def test_an_exception_costs_the_task_only(worker):
    before = worker.ask(("echo", 0), 200.0).value[1]
    outcome = worker.ask(("raise", "bad luck"), 200.0)
    assert outcome.ending is Ending.RAISED and "bad luck" in outcome.value
    assert worker.ask(("echo", 0), 200.0).value[1] == before


@pytest.mark.parametrize(
    "task, ending, words", [(("exit", 3), Ending.DIED, "exit code 3"), (("hang", 60), Ending.TIMEOUT, "limit of 1 s")]
)
def test_death_and_hang_are_followed_by_a_fresh_process(worker, task, ending, words):
    before = worker.ask(("echo", 0), 200.0).value[1]
    outcome = worker.ask(task, seconds=1.0)
    assert outcome.ending is ending and words in outcome.value
    assert worker.ask(("echo", 0), 200.0).value[1] != before


class Starved(Worker):
    """Has had no core for so long, by what Linux says."""

    seconds = 0.0

    def waited(self):
        return self.seconds


def test_what_a_process_waited_for_a_core_is_not_held_against_its_task():
    worker = Starved(Obedient)
    try:
        worker.wait()
        worker.seconds = 300.0  # before: it counts for nothing
        assert worker.ask(("hang", 60), 0.5).ending is Ending.TIMEOUT
        worker.wait()
        worker.submit(None, ("hang", 1.5), 0.5)
        worker.seconds = 600.0
        while not (outcome := worker.poll()):
            wait_for_any([worker], 0.05)
        assert outcome.ending is Ending.RESULT and outcome.seconds > 1
    finally:
        worker.stop()


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this system does not count what is waited")
def test_a_process_that_computes_beside_others_waits_for_a_core(worker):
    first, cores = worker.ask(("echo", 0), 200.0).value[1], os.sched_getaffinity(0)
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(2)]
    try:
        for pid in (first, *(process.pid for process in busy)):
            os.sched_setaffinity(pid, {min(cores)})
        worker.ask(("hang", 0.1), 200.0)
        before = worker.waited()
        worker.ask(("compute", 0.3), 200.0)
        assert worker.pid == first and 0.01 < worker.waited() - before < 60
    finally:
        os.sched_setaffinity(first, cores)
        for process in busy:
            process.kill()
            process.wait()


def test_a_killed_process_is_noticed(worker):
    before = worker.ask(("echo", 0), 200.0).value[1]
    worker.submit("tag", ("hang", 60), 300)
    os.kill(before, signal.SIGKILL)
    while not (outcome := worker.poll()):
        wait_for_any([worker], 0.05)
    assert outcome.ending is Ending.DIED and "SIGKILL" in outcome.value


def test_a_broken_handler_delivers_its_result_and_is_replaced(worker):
    outcome = worker.ask(("break", 0), 200.0)
    assert outcome.ending is Ending.RESULT and outcome.value[0] == "break"
    assert worker.ask(("echo", 0), 200.0).value[1] != outcome.value[1]


def test_a_handler_that_cannot_start_is_counted_with_its_reason():
    worker = Worker(CannotStart)
    try:
        with pytest.raises(WorkerFailed, match="failed to start 3 times; the last time: RuntimeError: no device"):
            worker.ask("task", 200.0)
    finally:
        worker.stop()


def test_who_asks_sees_the_end_of_the_task_before_and_refreshes_meanwhile(worker):
    worker.ask(("echo", 0), 200.0)
    worker.submit("before", ("hang", 0.3), 200.0)
    earlier, refreshed = [], []
    outcome = worker.ask(("echo", 1), 20.0, lambda: refreshed.append(1), earlier.append)
    assert [o.tag for o in earlier] == ["before"] and outcome.tag is None and outcome.value[0] == "echo"
    assert len(refreshed) >= 3


def test_a_pool_answers_in_the_order_of_its_tasks_whatever_becomes_of_them():
    pool = Pool(processes(2, Obedient))
    try:
        outcomes = pool.ask([("hang", 0.5), ("exit", 3), ("echo", 0), ("raise", "bad luck"), ("echo", 1)], 200.0)
        assert [o.ending for o in outcomes] == [Ending.RESULT, Ending.DIED, Ending.RESULT, Ending.RAISED, Ending.RESULT]
        assert not pool.ask([], 200.0) and not pool.in_flight
    finally:
        pool.stop()


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("-v 500000", "evoattn: A process may take 0.5 GB of address space here, and a worker needs 1.2"),
        ("-n 16", "evoattn: A process may have 16 files open here, which is too few for one worker more"),
    ],
)
def test_limits_that_leave_no_room_for_a_worker_are_said_at_once(limit, said, tmp_path):
    search = f"{sys.executable} -m evoattn search --gpu l4 --offline --budget 2s --shape B=1,H=1,S=32,D=16"
    words = ["bash", "-c", f"ulimit {limit}; exec {search} --db {tmp_path / 'db.sqlite'}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and done.stderr.startswith(said) and "Traceback" not in done.stderr


def test_a_limit_that_leaves_no_room_is_an_error_in_python_too():
    code = """
import resource
from evoattn.evaluation import server
from evoattn.model.errors import FailedRun
resource.setrlimit(resource.RLIMIT_NOFILE, (14, 14))
for begin in (server.start, lambda: server.fork(print, ()), lambda: server.spawn(print, ())):
    try:
        begin()
    except FailedRun as error:
        assert "ulimit -n" in str(error)
    else:
        raise AssertionError(begin)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
