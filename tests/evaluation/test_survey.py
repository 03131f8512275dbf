"""Quick times: how often a call is repeated, estimates that a late CPU does not spoil, memory for all problems. A card
that is not in the table is probed; what is no bandwidth is passed over."""

import gc
from dataclasses import replace

import pytest

from evoattn.evaluation.bandwidth import CopyProbe, probed
from evoattn.evaluation.memory import Memory
from evoattn.evaluation.process import Handler
from evoattn.model.gpu import GPUS, MADE_ROW, DetectedDevice, detect_devices
from evoattn.model.shape_text import parse_shape
from evoattn.timing.timer import DIRECT_CALLS, GRAPH_UNDER_US, Clock, Repeated, Timer, repeat
from tests.timing.device_clock import CpuBackend, Kernel, Passed

SMALL, LARGE = (parse_shape(f"B=1,H=2,S={n},D=64,dtype=fp16,mask=full") for n in (100, 300))


class Stopwatch(Clock):
    """Counts what the fakes say that they take."""

    def __init__(self):
        pass

    def elapsed(self, work):
        before = Passed.us
        work()
        return Passed.us - before


@pytest.mark.parametrize("us, calls", ((20, 3), (900, 3), (20_000, 2)))
def test_a_launch_that_the_cpu_was_late_with_is_no_estimate_but_of_calls_that_take_longer_anyhow(us, calls):
    made = []

    def call():
        made.append(us)
        Passed.us += us + (3000 if len(made) == 2 and us < 10_000 else 0)  # the first only loads the kernel

    assert Stopwatch().first(call) == pytest.approx(us) and len(made) == calls


@pytest.fixture
def memory():
    made = Memory(CpuBackend(), seed=0)
    for problem in (SMALL, LARGE):
        made.reserve(problem)
    return made


def test_a_problem_has_its_shapes_apart_and_shares_memory_with_the_others(memory):
    small, large = memory.tensors(SMALL), memory.tensors(LARGE)
    assert {name: t.shape for name, t in large.items()} == {name: LARGE.shape(name) for name in "qkvo"}
    ends = [t.data_ptr() + t.nbytes for t in large.values()]
    assert all(end <= large[name].data_ptr() for end, name in zip(ends, "kv"))
    assert small["q"].data_ptr() == large["q"].data_ptr() and small["o"].data_ptr() == large["o"].data_ptr()
    assert 0.9 < float(large["v"].float().std()) < 1.1


def test_scratch_that_must_start_as_zeros_does(memory):
    kernel = Kernel(us=1.0, sizes={"counters_zeroed": 4096, "partial": 8})
    memory.prepare(kernel, SMALL)()
    assert not kernel.buffers["counters_zeroed"].any() and kernel.buffers["counters_zeroed"].numel() == 4096
    assert kernel.buffers["partial"].numel() == 16


@pytest.mark.parametrize(("first_us", "calls"), [(GRAPH_UNDER_US, 4), (400.0, 3), (1e6, DIRECT_CALLS[0])])
def test_a_long_call_is_repeated_for_about_a_millisecond(first_us, calls):
    made = []
    repeated = repeat(lambda: made.append(1), first_us, Timer(make_graph=Graph))
    repeated.work()
    assert repeated.calls == len(made) == calls


class Graph:
    """Knows whether garbage may be collected while it is captured."""

    def capture_begin(self):
        self.collects = gc.isenabled()

    def capture_end(self):
        self.collects = self.collects or gc.isenabled()

    def replay(self):
        assert not self.collects, "garbage may be modules, which cannot be unloaded during a capture"
        return "replayed"


def test_short_calls_become_a_graph_and_no_garbage_is_collected_meanwhile():
    seen = []
    repeated = repeat(lambda: seen.append(gc.isenabled()), 20.0, Timer(make_graph=Graph))
    assert repeated.calls == len(seen) == 60 and not any(seen)
    assert repeated.work() == "replayed" and gc.isenabled()


def test_a_call_is_the_mean_over_the_work():
    kernel = Kernel(us=50.0)
    loop = Repeated(lambda: [kernel.compiled({}) for _ in range(4)], 4)
    assert Stopwatch().a_call(loop) == 50.0


SPEC = replace(GPUS["l4"], name="odd", note=MADE_ROW)
DEVICE = DetectedDevice(0, "Odd", (8, 9), "13.0")


class Answers(Handler):
    """A stand-in for a card: `index` is what it answers."""

    def __init__(self, index: int) -> None:
        self._answer = float(index)

    def __call__(self, task: int) -> float:
        assert task == min(16 * SPEC.l2_bytes, int(0.2 * SPEC.dram_bytes))
        return self._answer


class Dies(Answers):
    def __call__(self, task: int) -> float:
        raise MemoryError


@pytest.mark.slow
@pytest.mark.parametrize("answer, taken", ((250, True), (50, False), (500, False)))
def test_a_plausible_answer_is_taken(answer, taken):
    found = probed(SPEC, replace(DEVICE, index=answer), Answers)
    assert found == (replace(SPEC, dram_gb_per_s=250.0) if taken else SPEC)


@pytest.mark.slow
def test_a_probe_that_fails_changes_nothing():
    assert probed(SPEC, DEVICE, Dies) == SPEC


def test_a_card_of_the_table_is_not_probed():
    assert probed(GPUS["l4"], DEVICE, Dies) is GPUS["l4"]


@pytest.mark.device
@pytest.mark.skipif(not detect_devices(), reason="there is no CUDA device here")
def test_the_device_here_copies_about_as_fast_as_its_data_sheet_says():
    device = detect_devices()[0]
    assert device.spec is not None
    measured = CopyProbe(device.index)(1 << 30)
    assert 0.6 < measured / device.spec.dram_gb_per_s < 1.05
