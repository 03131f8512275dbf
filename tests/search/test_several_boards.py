"""A search on several GPUs, by fakes that answer after a set time."""

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest

from evoattn.engine.budget import Budget
from evoattn.engine.devices import GAUGE_TRIES, Devices
from evoattn.engine.progress import Progress
from evoattn.engine.scale import EVERY, LATEST, Reference, Scale
from evoattn.engine.tools import SearchError
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import Gauge
from evoattn.evaluation.workers import Outcome
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import FAMILIES
from evoattn.fleet.base import visible_as
from evoattn.model.errors import WrongUse
from evoattn.model.gpu import GPUS, DetectedDevice, GpuError
from evoattn.model.records import CompiledKernel, Evaluation, Timing, TrialState
from evoattn.search import machines
from evoattn.search.request import SearchWords, choose_boards, read_words
from tests.search.search_fakes import FakeBoard, KilledBoard, NeverGauges, SlowBoard, cost
from tests.search.studies_of_fakes import fakes, make_search, space_of

SPACE = dict(WARPS="4,8", STAGES="1,2", KEY_WARPS="1")
FAST_AND_SLOW = ("fast-1", "slow-1.25")


@pytest.fixture
def slow_boards(tmp_path, monkeypatch):
    """Makes the tools of a search whose boards begin together."""

    def made(names):
        (tmp_path / "missing").mkdir()
        for name in names:
            (tmp_path / "missing" / name).touch()
        monkeypatch.setenv("MISSING", str(tmp_path / "missing"))
        return fakes(SlowBoard)

    return made


def boards_of(trials) -> Counter:
    return Counter(t.timings[0].protocol["board"] for t in trials)


@pytest.mark.slow
def test_times_of_two_boards_are_ranked_by_a_common_reference(storage, slow_boards):
    tools = slow_boards(FAST_AND_SLOW)
    running = make_search(storage, space_of(**SPACE), tools, jobs=2, boards=FAST_AND_SLOW)
    progress = running.run(Budget(trials=24))
    trials = list(storage.iter_trials(running.study))
    assert set(boards_of(trials)) == set(FAST_AND_SLOW)
    first = next(t for t in trials if "reference" not in t.timings[0].protocol)
    factors = {name: progress.speeds[name] / progress.speeds["fast-1"] for name in FAST_AND_SLOW}
    assert factors == {"fast-1": 1.0, "slow-1.25": pytest.approx(1.25)}
    unit = progress.speeds["fast-1"]
    for trial in trials:
        timing = trial.timings[0]
        board = timing.protocol["board"]
        assert timing.samples_us[0] == pytest.approx(cost(trial.config) * float(board.rpartition("-")[2]))
        assert timing.median_us == pytest.approx(cost(trial.config) / unit)
        assert timing.protocol.get("reference", first.number) == first.number
    best = storage.leaderboard(running.study, 1)[0]
    assert cost(best.config) == min(cost(t.config) for t in trials)
    assert best.timing.protocol["stage"] == "final" and best.timing.board_factor == 1.0


@pytest.mark.slow
def test_a_resumed_study_keeps_its_reference_on_one_board_too(storage):
    spaces = space_of(**SPACE)
    make_search(storage, spaces, fakes(FakeBoard), boards=FAST_AND_SLOW).run(Budget(trials=6))
    study = storage.find_study("fake")
    known = next(iter(storage.iter_trials(study)))
    resumed = make_search(storage, spaces, fakes(FakeBoard), boards=("later-2",))
    progress = resumed.run(Budget(trials=4))
    latest = list(storage.iter_trials(study))[6:]
    used = {t.timings[0].protocol["reference"] for t in latest}
    assert len(used) == 1 and storage.trial(used.pop()).study_id == known.study_id
    scale = progress.speeds["later-2"] / 2
    assert all(t.timings[0].median_us == pytest.approx(cost(t.config) / scale) for t in latest)


@pytest.mark.parametrize("boards", [("a",), ("a", "b")])
def test_workers_of_several_boards_begin_with_what_the_study_compared_them_by(storage, boards):
    running = make_search(storage, space_of(**SPACE), fakes(FakeBoard))
    running.fleet = mock.Mock(boards=boards)
    with (
        mock.patch.multiple("evoattn.search.study", Devices=mock.DEFAULT, Compilers=mock.DEFAULT) as made,
        mock.patch("evoattn.search.finalists.reference", return_value="a kernel") as asked,
    ):
        running._start_workers()
    assert asked.call_args.args == (*running._kept, len(boards) > 1)
    made["Devices"].start.assert_called_once_with(
        running.fleet, running.tools, (running.problem, running.gpu, "warm"), running.progress
    )
    made["Devices"].start.return_value.scale.refer_to.assert_called_once_with("a kernel")
    running.fleet.compilers.assert_called_once_with(running.tools.make_compiler, (running.gpu, False), beside=True)


@pytest.mark.slow
def test_eight_boards_work_at_once(storage, slow_boards):
    names = tuple(f"board{n}-1" for n in range(8))
    running = make_search(storage, space_of(**SPACE), slow_boards(names), jobs=2, boards=names)
    busy = set()
    progress = running.run(Budget(trials=64), lambda: busy.add(running.progress.on_device))
    trials = list(storage.iter_trials(running.study))
    assert len(trials) == 64 == progress.recorded
    assert len({t.config_id for t in trials}) == 64
    assert len(boards_of(trials)) == 8 and progress.boards == 8
    assert max(boards_of(trials).values()) <= 20
    assert max(int(text.split()[0]) for text in busy) >= 6
    assert 0 < progress.busy_share <= 1.0


@pytest.mark.slow
def test_killed_gpu_workers_cost_no_candidate(storage, tmp_path, monkeypatch):
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv("DEATHS", str(notes))
    names = ("one-1", "two-1", "three-1")
    running = make_search(storage, space_of(**SPACE), fakes(KilledBoard), boards=names)
    running.run(Budget(trials=30))
    trials = list(storage.iter_trials(running.study))
    assert [t.state for t in trials] == [TrialState.COMPLETE] * 30 and len({t.config_id for t in trials}) == 30
    deaths = [note for note in notes.iterdir() if len(note.read_text().split()) >= 3]
    assert len(deaths) >= 2, "nobody was killed"


@pytest.mark.slow
def test_a_board_that_cannot_time_the_reference_ends_the_search(storage):
    running = make_search(storage, space_of(**SPACE), fakes(NeverGauges), boards=FAST_AND_SLOW)
    with pytest.raises(
        SearchError, match=r"The board (fast-1|slow-1\.25) cannot time the reference kernel: .*no memory is left"
    ):
        running.run(Budget(trials=24))


@pytest.mark.slow
def test_a_study_of_one_board_goes_on_with_two_by_its_fastest_kernel(storage):
    make_search(storage, space_of(**SPACE), fakes(FakeBoard), boards=("first-1",)).run(Budget(trials=3))
    [fastest, *_] = storage.leaderboard(study := storage.find_study("fake"), 3, finalists_first=False)
    make_search(storage, space_of(**SPACE), fakes(FakeBoard), boards=FAST_AND_SLOW).run(Budget(trials=2))
    latest = list(storage.iter_trials(study))[3:]
    assert {t.timings[0].protocol["reference"] for t in latest} == {fastest.number}


def test_the_first_right_kernel_compares_boards_which_may_fail_but_not_in_a_row():
    devices = Devices(("a", "b"), [worker(True, False), worker(True, False)], Progress(), 5.0, lambda: None)
    fails = Outcome(None, Ending.RAISED, "no memory is left", 0.1)
    times = Outcome(None, Ending.RESULT, Timing((11.0,), {}), 0.1)
    built, timed_on_b = reference(0.0).kernel, Evaluation(TrialState.COMPLETE, timings=(Timing((9.0,), {"x": 1}),))
    said = lambda: devices.scale.mark("b", timed_on_b).timings[0].protocol
    assert said() == {"x": 1, "board": "b", "board_factor": 1.0}
    for state, us in ((TrialState.WRONG_RESULT, 9.0), (TrialState.COMPLETE, 10.0), (TrialState.COMPLETE, 11.0)):
        timed = SimpleNamespace(state=state, timing=Timing((us,), {}), number=7)
        devices.learn(devices.first, SimpleNamespace(built=built), timed)
    assert devices.scale.reference == Reference(built, 7, 10.0), "the first that is right"
    for ending in (*[fails] * (GAUGE_TRIES - 1), times) * 2:
        for device in devices.devices:
            devices._gauged(device, ending)
    assert devices._progress.speeds == {"a": 1.1, "b": 1.1}
    assert said() == {"x": 1, "board": "b", "board_factor": 1.1, "reference": 7}
    with pytest.raises(SearchError, match="The board a cannot time the reference kernel: no memory is left"):
        for _ in range(GAUGE_TRIES):
            devices._gauged(devices.first, fails)


def reference(us: float) -> Reference:
    family = FAMILIES["flash_mma"]
    config = space_of(**SPACE)["flash_mma"].starting_configs()[0]
    return Reference(BuiltKernel(family, config, GPUS["h100"], CompiledKernel(b"", "", None)), 1, us)


def test_a_board_is_measured_at_first_and_now_and_then_by_the_median_of_its_latest_times():
    scale = Scale(("a", "b"))
    done = Evaluation(TrialState.COMPLETE, timings=(Timing((30.0,), {"stage": "screen"}),))
    assert not scale.due("a") and scale.mark("a", done).timing.median_us == 30.0 and scale.speeds == {}
    scale.refer_to(reference(10.0), "a")
    assert not scale.due("a") and scale.due("b") and scale.factor("b") == 1.0
    for us in (12.0, 12.0, 99.0):
        scale.took("b", us)
    assert scale.factor("b") == pytest.approx(1.2) and scale.mark("b", done).timing.median_us == pytest.approx(25.0)
    for _ in range(EVERY):
        scale.mark("a", done)
    assert scale.due("a") and not scale.due("b")
    for _ in range(LATEST):
        scale.took("a", 11.0)
    assert scale.factor("a") == pytest.approx(1.1) and not scale.due("a")


def worker(ready: bool, busy: bool) -> SimpleNamespace:
    return SimpleNamespace(ready=ready, busy=busy, idle=ready and not busy)


def test_what_boards_say_of_themselves():
    progress, asked = Progress(), []
    workers = [worker(False, False), worker(True, False), worker(True, True)]
    several = Devices(("a", "b", "c"), workers, progress, 5.0, lambda: None)
    assert (several.state, several.busy, several.compared, progress.boards) == ("1 of 3 busy", 1, True, 3)
    assert several.for_final.board == "b" and several.first.board == "a"
    several.referee.go_on = asked.append
    assert not [*several.free()], "a candidate is timed, and may become the reference"
    workers[2].busy, workers[2].idle, progress.recorded = False, True, 7
    assert [one.board for one in several.free()] == ["b", "c"] and asked == [0, 7]
    for one, state in ((workers[0], "starting"), (worker(True, True), "busy"), (worker(True, False), "waiting")):
        alone = Devices(("a",), [one], Progress(), 5.0, lambda: None)
        assert alone.state == state and not alone.compared and alone.for_final is alone.first
    alone.scale.refer_to(reference(10.0), "a")
    assert alone.compared, "the study had several before"


def test_ends_of_tasks_go_to_whom_they_concern():
    *workers, referee_s = (mock.Mock(ready=True, busy=True, idle=False) for _ in range(4))
    boards = Devices(("a", "b", "c"), workers, Progress(), 5.0, lambda: None)
    tags, gauged = ("a candidate", "peers", Gauge(reference(1.0).kernel)), []
    ends = [Outcome(tag, Ending.RESULT, "value", 1.0) for tag in tags]
    for one, end in zip(boards.devices, ends, strict=True):
        one.poll = mock.Mock(return_value=end)
    of_peers = {"owns.side_effect": lambda end: end.tag == "peers", "take.return_value": "times"}
    boards.referee = mock.Mock(workers=[referee_s], **{"poll.return_value": "first times"}, **of_peers)
    boards._gauged = lambda *about: gauged.append(about)
    a, b, c = boards.devices
    assert [*boards.poll()] == [(a, "first times"), (a, ends[0]), (b, "times")] and gauged == [(c, ends[2])]
    assert [*boards.poll([workers[1]])] == [(b, "times")] and boards.referee.poll.call_count == 1
    boards.referee.poll.return_value = boards.referee.take.return_value = None
    a.poll.return_value = None
    assert [*boards.poll([referee_s, *workers[:2]])] == [] and len(gauged) == 1


def device(index: int, product: str = "NVIDIA H100 80GB HBM3", driver: str = "13.0", sms: int = 132) -> DetectedDevice:
    return DetectedDevice(index, product, (9, 0), driver, f"GPU-{index}", {"sm_count": sms})


def test_devices_are_named_by_number_and_are_alike():
    here = [device(0), device(1), device(2)]
    assert choose_boards(None, here) == ()
    assert [b.index for b in choose_boards("all", here)] == [0, 1, 2]
    assert [b.index for b in choose_boards("2,0", here)] == [2, 0]
    for text, words in (("0,3", "no CUDA device 3 here; --devices may name 0, 1, 2"), ("all", "leave --devices out")):
        with pytest.raises(GpuError, match=words):
            choose_boards(text, here if text != "all" else [])
    for other in (device(1, sms=114), device(1, driver="12.8"), device(1, product="NVIDIA H200")):
        with pytest.raises(GpuError, match="are of one kind"):
            choose_boards("all", [here[0], other])


def test_a_worker_sees_the_gpu_that_is_its_own_among_those_that_the_user_left(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [visible_as(n) for n in (0, 3)] == ["0", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, 5")
    assert [visible_as(n) for n in (0, 1)] == ["GPU-a", "5"]


@pytest.mark.parametrize("text", ["", "0,", "0,0", "-1", "both", "1.5"])
def test_a_list_of_devices_that_cannot_be_read_is_refused(text):
    with pytest.raises(GpuError, match="takes numbers of GPUs"):
        read_words(SearchWords(devices=text))
    with pytest.raises(GpuError, match="leave it out with --offline and with --ray"):
        read_words(SearchWords(devices="all", ray="local"))


@pytest.mark.parametrize("word", ["gpu", "sampler", "study", "devices", "ray"])
def test_a_word_that_is_no_text_is_refused(word):
    with pytest.raises(WrongUse, match=f"{word} must be text"):
        read_words(SearchWords(**{word: 3}))


def test_processes_are_of_the_boards_that_were_asked_for(monkeypatch):
    monkeypatch.setattr(machines, "LocalFleet", lambda *of: of)
    monkeypatch.setattr(machines, "detect_devices", lambda: ["a device"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    boards = [DetectedDevice(n, "NVIDIA L4", (8, 9), "13.0", uuid) for n, uuid in ((0, "GPU-a"), (2, ""))]
    with machines.machines_of(SearchWords(jobs=3)) as found:
        assert found.devices == ["a device"] and found.cluster is None
        assert found.fleet(SearchWords(jobs=3), SimpleNamespace(boards=[])) == (3,)
        named = found.fleet(SearchWords(jobs=3), SimpleNamespace(boards=boards))
    assert named == (3, ["GPU-a", "2"], ["0", "2"])
