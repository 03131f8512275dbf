"""The peers are made ready beside the search, timed while the board is theirs alone, and timed again in the final."""

import pytest

from evoattn.engine.device import Device
from evoattn.engine.devices import Devices
from evoattn.engine.finals import BEGINS_AFTER, Final, Referee
from evoattn.engine.progress import Progress
from evoattn.engine.tools import SearchError, Tools
from evoattn.evaluation.process import Ending
from evoattn.evaluation.workers import START_TRIES, BaseWorker, WorkerFailed
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Timing
from evoattn.timing.protocol import FinalResult


class FakeWorker(BaseWorker):
    """Ends a task when it is told to."""

    def __init__(self, ready=True):
        super().__init__()
        self.ready, self.tasks, self.endings, self.stopped = ready, [], [], False

    def submit(self, tag, task, seconds):
        self._begin(tag)
        self.tasks.append(task)

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
