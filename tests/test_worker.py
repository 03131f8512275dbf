"""Worker processes: results come back; a crash, a hang and a broken context cost one task and a respawn."""

import os
import signal
import time

import pytest

from evoattn.evaluation.workers import Ending, Handler, Worker, wait_for_any


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


def finish(worker: Worker, task, seconds: float = 20.0):
    while not worker.idle:
        wait_for_any([worker], 0.1)
        worker.poll()
    worker.submit("tag", task, seconds)
    while not (outcome := worker.poll()):
        wait_for_any([worker], 0.05)
    return outcome


@pytest.fixture(scope="module")
def worker():
    worker = Worker(Obedient)
    yield worker
    worker.stop()


def test_a_result_comes_back_from_one_process(worker):
    first, second = finish(worker, ("echo", 0)), finish(worker, ("echo", 0))
    assert first.ending is Ending.RESULT and first.tag == "tag"
    assert first.value == second.value


def test_a_death_is_told_with_what_the_task_was_about(worker):
    outcome = finish(worker, ("report and exit", ["this", "that"]))
    assert outcome.ending is Ending.DIED and outcome.doing == "that"
    assert finish(worker, ("echo", 0)).doing == ""


def test_an_exception_costs_the_task_only(worker):
    before = finish(worker, ("echo", 0)).value[1]
    outcome = finish(worker, ("raise", "bad luck"))
    assert outcome.ending is Ending.RAISED and "bad luck" in outcome.value
    assert finish(worker, ("echo", 0)).value[1] == before


@pytest.mark.parametrize(
    "task, ending, words",
    [
        (("exit", 3), Ending.DIED, "exit code 3"),
        (("hang", 60), Ending.TIMEOUT, "limit of 1 s"),
    ],
)
def test_death_and_hang_are_followed_by_a_fresh_process(worker, task, ending, words):
    before = finish(worker, ("echo", 0)).value[1]
    outcome = finish(worker, task, seconds=1.0)
    assert outcome.ending is ending and words in outcome.value
    assert finish(worker, ("echo", 0)).value[1] != before


def test_a_killed_process_is_noticed(worker):
    before = finish(worker, ("echo", 0)).value[1]
    worker.submit("tag", ("hang", 60), 30)
    os.kill(before, signal.SIGKILL)
    while not (outcome := worker.poll()):
        wait_for_any([worker], 0.05)
    assert outcome.ending is Ending.DIED and "SIGKILL" in outcome.value


def test_a_broken_handler_delivers_its_result_and_is_replaced(worker):
    outcome = finish(worker, ("break", 0))
    assert outcome.ending is Ending.RESULT and outcome.value[0] == "break"
    assert finish(worker, ("echo", 0)).value[1] != outcome.value[1]


def test_a_handler_that_cannot_start_is_counted_with_its_reason():
    worker = Worker(CannotStart)
    try:
        while worker.failures_to_start < 2:
            wait_for_any([worker], 0.1)
            assert worker.poll() is None
        assert "no device" in worker.start_failure
    finally:
        worker.stop()
