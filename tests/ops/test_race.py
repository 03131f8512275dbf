"""A pick and its rivals race once for a size of problems, and PyTorch with them on a card that nobody measured: the
fastest runs."""

import contextlib
import dataclasses
import threading
import time
import warnings

import pytest
import torch

import evoattn
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from evoattn.ops import choice, kernels
from evoattn.ops.call import strided
from evoattn.ops.choice import BUDGET_US, CLEAR, COMPILED, LEAST_ROOM, NO_MEMORY, TOO_LONG, Race
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.torch_answer import NoKernel
from evoattn.portfolio.wins import FASTER, Raced, Races
from evoattn.search.starting import starting_configs
from tests.ops.fake_clock import FakeClock
from tests.ops.fake_device import WGMMA, FakeDevice, Pick, build, near, reference, tensors, wgmma_pick


def guess(problem, gpu):
    found = wgmma_pick(problem, gpu)
    return found and dataclasses.replace(found, estimated=True)


def test_a_clock_takes_what_the_cpu_takes_from_a_first_call(monkeypatch):
    seen, times, now = [], iter([7.0, 7.0, 7.0, 3.0, 0.5]), iter([1.0, 1.0025, 2.0, 2.01])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            seen.append("event")

        def record(self):
            seen.append("record")

        def synchronize(self):
            seen.append("wait")

        def elapsed_time(self, end):
            assert isinstance(end, Event) and end is not self
            return next(times)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append(cycles))
    monkeypatch.setattr(choice.time, "perf_counter", lambda: next(now))
    clock = choice.CudaClock()
    assert clock.first_us(lambda: seen.append("call")) == pytest.approx(4500.0)
    assert seen == ["event", "event", "record", "wait", "call", "record", "wait"]
    assert clock.first_us(lambda: None) == 1.0, "the CPU took longer than the device"
    seen.clear()
    assert clock.time_us(lambda: seen.append("call"), 3) == pytest.approx(7000 / 3)
    assert seen == ["event", "event", choice.DELAY_CYCLES, "record", "call", "call", "call", "record", "wait"]
    for name, given in (("mem_get_info", (5, 90)), ("memory_reserved", 30), ("memory_allocated", 20)):
        monkeypatch.setattr(torch.cuda, name, lambda index, given=given: given if index == 3 else None)
    assert clock.room(3) == 15


@pytest.fixture
def card(tmp_path, monkeypatch):
    """Makes a process on the card anew: (device, clock, runtime). It waits for rivals however slow the machine is."""
    monkeypatch.setattr(evoattn.ops.runtime, "LATE", 1e3)

    def make(pick=guess, build=build, cores=2, **words):
        clock = FakeClock(**words)
        clock.device = device = FakeDevice()
        device._batch = 2
        held = Race(Races(tmp_path / "data" / "races.jsonl"), clock, cores)
        return device, clock, Runtime(device, pick, tmp_path, build, race=held)

    return make


def call(seqlen_q=37, **words):
    q, k, v = tensors(seqlen_q=seqlen_q)
    return evoattn.attention(q, k, v, enable_gqa=True, **words), reference(q, k, v)


def said(seqlen_q=37):
    q, k, v = tensors(seqlen_q=seqlen_q)
    return evoattn.explain(q, k, v, enable_gqa=True)


def checked(device, before):
    """Launches since; those of the check of the kernel at its first use are among them."""
    return len(device.launches) - before


def test_the_faster_kernel_runs_from_the_first_call_on_and_in_the_next_process(card):
    device, clock, runtime = card()
    with current.use(runtime):
        assert "races PyTorch's attention at the next eager call" in said()
        answer, expected = call()
        assert near(answer, expected)
        assert [name for name, _ in clock.asked] == ["ours", "torch"] * 2, "clear after a turn"
        before = len(device.launches)
        assert near(*call()) and checked(device, before) == 1, "the second call only launches"
        assert "10.0 µs beside 20.0 µs of PyTorch's in a race on this card" in said()
    device, clock, runtime = card(us=99.0)
    with current.use(runtime):
        assert near(call(strict=True)[0], expected) and not clock.asked, "the file says who won"
        assert "10.0 µs beside 20.0 µs" in said()


def test_the_last_turn_has_the_calls_that_the_whole_budget_has_room_for(card):
    _, clock, runtime = card(us=1500.0, torch_us=1500.0)
    with current.use(runtime):
        assert near(*call())
    assert [count for _, count in clock.asked] == [1, 1, 3, 3, 2, 2, 2, 2]


@pytest.mark.parametrize("us", [20.0, 20.0 * FASTER + 0.1, 500.0])
def test_pytorch_runs_where_the_kernel_is_not_clearly_faster(card, us):
    for process in range(2):
        device, clock, runtime = card(us=us)
        with current.use(runtime):
            assert near(*call())
            before = len(device.launches)
            assert near(*call()) and checked(device, before) == 0
            assert said().startswith("SDPA runs: flash_wgmma") and f"took {us:.1f} µs beside 20.0 µs" in said()
            with pytest.raises(NoKernel, match="in a race on this card"):
                call(strict=True)
        assert bool(clock.asked) == (process == 0)


@pytest.mark.slow
def test_lengths_race_once_for_a_size(card):
    _, clock, runtime = card()
    with current.use(runtime):
        for seqlen in (*range(1025, 1153, 16), 1152):
            call(seqlen)
        assert len(clock.asked) == 4
        call(1153)
        assert len(clock.asked) == 8


@pytest.mark.parametrize(
    ("us", "torch_us", "turns"),
    [
        (10.0, 12.0, 3),
        (10.0, 10.0 * CLEAR + 1, 1),  # one turn says it all
        (1_000.0, 1_400.0, 3),
        (5_000.0, 5_100.0, 1),
        (9_000.0, 9_700.0, 0),  # took 38.9 ms when each ran twice
        (10_000.0, 20_000.0, 0),
        (3_000.0, 24_000.0, 0),
        (10_001.0, 10_001.0, None),  # the kernel alone ran, once
        (25_000.0, 1.0, None),
    ],
)
def test_a_race_takes_no_more_than_its_budget(card, us, torch_us, turns):
    _, clock, runtime = card(us=us, torch_us=torch_us)
    with current.use(runtime):
        call()
        assert clock.spent_us <= BUDGET_US
        if turns is None:
            assert len(clock.asked) == 1
            with pytest.raises(NoKernel, match=TOO_LONG):
                call(strict=True)
        else:
            assert len(clock.asked) == 2 + 2 * turns
            assert said().startswith("SDPA runs") == (us > FASTER * torch_us)


def test_what_is_too_long_by_the_card_s_peak_does_not_race(card):
    device, clock, runtime = card()
    device.gpu = dataclasses.replace(GPUS["h100"], tensor_flops_per_clock=1, boost_clock_ghz=1e-3, sm_count=1)
    with current.use(runtime):
        assert near(*call()) and not clock.asked
        with pytest.raises(NoKernel, match=TOO_LONG):
            call(strict=True)


def test_no_memory_no_race_and_a_later_call_may(card):
    _, clock, runtime = card(room=10)
    with current.use(runtime):
        assert near(*call()) and not clock.asked
        answer, _ = call()
        clock.free = LEAST_ROOM * answer.numel() * answer.element_size() - 1
        with pytest.raises(NoKernel, match=NO_MEMORY):
            call(strict=True)
        assert not clock.asked
        clock.free += 1
        call()
        assert clock.asked


def test_a_capture_takes_pytorch_and_says_so_and_a_later_call_races(card):
    device, clock, runtime = card()
    with current.use(runtime):
        device.is_capturing = True
        with pytest.warns(RuntimeWarning, match="SDPA was captured .* no kernel was raced yet"):
            assert near(*call())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()
        assert not clock.asked and not device.launches
        device.is_capturing = False
        call()
        assert clock.asked
        before = len(device.launches)
        device.is_capturing = True
        assert near(*call()) and checked(device, before) == 1, "it is captured now"


def test_compiled_code_does_not_race(card):
    device, clock, runtime = card()
    q, k, v = tensors()
    with current.use(runtime):
        made = evoattn.ops.call.Call(q, k, v, enable_gqa=True, compiled=True)
        assert near(runtime.attend(made), reference(q, k, v)) and not clock.asked
        with pytest.raises(NoKernel, match=COMPILED):
            runtime.attend(dataclasses.replace(made, strict=True))
        call()
        before = len(device.launches)
        assert near(runtime.attend(made), reference(q, k, v)) and checked(device, before) == 1


def test_compiled_code_of_another_out_takes_what_an_eager_call_found(card):
    device, _, runtime = card()
    q, k, v = tensors()
    with current.use(runtime):
        made = evoattn.ops.call.Call(q, k, v, enable_gqa=True, compiled=True, out=torch.empty_like(q))
        runtime.attend(made)
        assert not device.launches
        call()
        before = len(device.launches)
        runtime.attend(made)
        assert checked(device, before) == 1 and near(made.out, reference(q, k, v))


def test_an_out_with_gaps_is_raced_with_gaps(card):
    _, clock, runtime = card()
    q, k, v = tensors()
    wide = torch.full((*q.shape[:3], 2 * q.shape[3]), 7.0, dtype=q.dtype)
    with current.use(runtime):
        evoattn.attention(q, k, v, enable_gqa=True, out=wide[..., : q.shape[3]])
    assert clock.asked and near(wide[..., : q.shape[3]], reference(q, k, v))
    assert (wide[..., q.shape[3] :] == 7.0).all()


def test_enable_can_skip_the_race_or_forbid_it(card):
    device, clock, runtime = card()
    with current.use(runtime):
        try:
            evoattn.enable(race=False)
            assert near(*call()) and "was measured on no" in said()
            assert not device.launches
            evoattn.enable(estimated=True)
            assert near(call(strict=True)[0], call()[0]) and device.launches
            evoattn.disable()
            assert not clock.asked and "races PyTorch" in said()
        finally:
            evoattn.disable()


def test_a_race_that_fails_leaves_pytorch_and_no_record(card):
    _, clock, runtime = card()

    def breaks(run, count):
        raise torch.OutOfMemoryError("CUDA out of memory")

    clock.time_us = breaks
    with current.use(runtime):
        assert near(*call())
        with pytest.raises(NoKernel, match="the race failed: CUDA out of memory"):
            call(strict=True)
    _, clock, runtime = card()
    with current.use(runtime):
        call()
        assert clock.asked


def test_a_call_at_an_odd_address_leaves_the_race_to_the_next(card):
    _, clock, runtime = card()
    q, k, v = tensors()
    odd = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    with current.use(runtime):
        assert near(evoattn.attention(odd, k, v, enable_gqa=True), reference(q, k, v))
        assert len(clock.asked) == 1, "the kernel did not run, and PyTorch not beside it"
        with pytest.raises(NoKernel, match="an address is no multiple"):
            evoattn.attention(odd, k, v, enable_gqa=True, strict=True)
        assert near(*call()) and len(clock.asked) > 4


def test_warmup_says_that_it_will_race_and_compiles(card):
    device, clock, runtime = card()
    with current.use(runtime):
        (sentence,) = evoattn.warmup("B=1,H=4,S=64,D=64")
        assert "races PyTorch's attention" in sentence and device.loads == 1 and not clock.asked


class Overtaken(Races):
    """Another process races, and has a result, while this one waits for its turn."""

    @contextlib.contextmanager
    def turn(self):
        with super().turn():
            self.find = lambda key: Raced((1.0,), 2.0)
            yield


def test_what_another_process_found_meanwhile_is_taken(tmp_path):
    clock, device = FakeClock(), FakeDevice()
    clock.device, device._batch = device, 2
    runtime = Runtime(device, guess, tmp_path, build, race=Race(Overtaken(tmp_path / "races.jsonl"), clock))
    with current.use(runtime):
        assert near(*call()) and not clock.asked and "1.0 µs beside 2.0 µs" in said()


RIVAL = KernelConfig("flash_wgmma", WGMMA | {"BLOCK_N": 128})


def rivals(problem, gpu, estimated=False):
    found = wgmma_pick(problem, gpu)
    return found and dataclasses.replace(found, estimated=estimated, rivals=(RIVAL,))


@pytest.mark.parametrize(("rival_us", "wins"), [(5.0, True), (10.0 * FASTER + 0.01, False), (90.0, False)])
def test_the_faster_of_a_pick_and_its_rival_runs_here_and_in_the_next_process(card, rival_us, wins):
    for process in range(2):
        device, clock, runtime = card(rivals, rival_us=rival_us)
        with current.use(runtime):
            assert "in a race" not in said() or process
            assert near(*call(strict=True))
            before = len(device.launches)
            assert near(*call(strict=True)) and checked(device, before) == 1
            ours, other = f"{10.0:.1f} µs", f"{rival_us:.1f} µs"
            first, second = (other, ours) if wins else (ours, other)
            kernel = "BLOCK_N=128" if wins else "BLOCK_N=64"
            assert kernel in said().split(" runs: ")[0] and f"it took {first} beside {second} of flash" in said()
        assert [who for who, _ in clock.asked[:2]] == ([] if process else ["ours", "rival"])


def test_a_card_that_nobody_measured_races_all_of_them(card):
    for _ in range(2):
        _, clock, runtime = card(lambda *of: rivals(*of, estimated=True), torch_us=7.0)
        with current.use(runtime):
            call()
            assert "took 5.0 µs beside 10.0 µs of flash_wgmma" in said() and " and 7.0 µs of PyTorch's" in said()
    assert not clock.asked
    _, clock, runtime = card(lambda *of: rivals(*of, estimated=True), torch_us=5.0)
    with current.use(runtime):
        call(80)
        assert said(80).startswith("SDPA runs") and {who for who, _ in clock.asked} == {"ours", "rival", "torch"}


def test_who_asks_for_no_race_has_the_pick(card):
    _, clock, runtime = card(rivals)
    with current.use(runtime):
        try:
            evoattn.enable(race=False)
            assert near(*call(strict=True)) and "BLOCK_N=64" in said()
            evoattn.disable()
            torch.use_deterministic_algorithms(True)
            assert near(*call(strict=True)) and "BLOCK_N=64" in said()
        finally:
            torch.use_deterministic_algorithms(False)
            evoattn.disable()
        assert not clock.asked
    _, clock, runtime = card(rivals, cores=1)
    with current.use(runtime):
        assert near(*call(strict=True)) and not clock.asked


def test_bits_that_every_batch_has_do_not_depend_on_times(card):
    problem = AttentionProblem(2, 4, 2, 37, 45, 64, "fp16", "full", batch_invariant=True)
    genes = WGMMA | registry.lookup("flash_wgmma").recipe(problem, GPUS["h100"])
    kernels = [KernelConfig("flash_wgmma", genes | {"BLOCK_M": rows}) for rows in (64, 128)]
    _, clock, runtime = card(lambda *_: Pick("flash_wgmma", kernels[0], rivals=tuple(kernels[1:])))
    with current.use(runtime):
        call(batch_invariant=True)
        assert not clock.asked
    _, clock, runtime = card(lambda *_: Pick("flash_wgmma", kernels[0], rivals=tuple(kernels[1:])))
    with current.use(runtime):
        call()
        assert clock.asked


@pytest.mark.parametrize("why", ["compiled", "memory", "address", "long"])
def test_a_size_that_began_without_a_race_keeps_its_pick_in_this_process(card, why):
    us = 16_000.0 if why == "long" else 10.0
    device, clock, runtime = card(rivals, room=10 if why == "memory" else 1 << 40, us=us)
    q, k, v = tensors()
    odd = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    asked = evoattn.ops.call.Call(odd if why == "address" else q, k, v, enable_gqa=True, compiled=why == "compiled")
    with current.use(runtime):
        assert near(runtime.attend(asked), reference(q, k, v))
        before, clock.free, timed = len(device.launches), 1 << 40, len(clock.asked)
        runtime.forget()
        assert near(*call(strict=True)) and checked(device, before) == 1 and len(clock.asked) == timed
        assert "BLOCK_N=64" in said().split(" runs: ")[0]
    device, clock, runtime = card(rivals)
    with current.use(runtime):
        assert near(*call(strict=True)) and clock.asked, "the next process races"


def test_a_capture_takes_the_pick_that_is_loaded(card):
    device, clock, runtime = card(rivals)
    with current.use(runtime):
        (sentence,) = evoattn.warmup("B=2,H=4,Hkv=2,Sq=37,Sk=45,D=64")
        assert "BLOCK_N=64" in sentence and device.loads == 2, "the rival, too"
        assert "it races 1 other kernel at the next eager call" in sentence
        device.is_capturing = True
        assert near(*call(strict=True))
        device.is_capturing = False
        assert near(*call(strict=True)) and not clock.asked


def test_calls_that_are_too_long_for_a_rival_leave_it_out(card):
    for _ in range(2):
        _, clock, runtime = card(lambda *of: rivals(*of, estimated=True), us=8_000.0, torch_us=9_000.0)
        with current.use(runtime):
            call()
            assert "took 8000.0 µs beside 9000.0 µs of PyTorch's" in said()
    assert not clock.asked, "and so in the next process"


def test_a_rival_that_no_compiler_makes_is_left_out(card):
    def some(family, problem, config, *others):
        if config == RIVAL:
            raise RuntimeError("no registers")
        return build(family, problem, config, *others)

    device, clock, runtime = card(rivals, build=some)
    with current.use(runtime), pytest.warns(RuntimeWarning, match="no registers; what it was to race runs"):
        assert near(*call(strict=True)) and not clock.asked
        assert near(*call(strict=True)) and "BLOCK_N=64" in said() and device.loads == 1


@pytest.mark.slow
def test_a_rival_whose_compiler_takes_long_races_in_the_next_process(card, monkeypatch):
    monkeypatch.setattr(evoattn.ops.runtime, "LATE", 0.25)
    third, made, ends = KernelConfig("flash_wgmma", WGMMA | {"BLOCK_N": 96}), threading.Event(), threading.Event()
    pick = lambda *of: dataclasses.replace(rivals(*of), rivals=(RIVAL, third))

    def slow(family, problem, config, *others):
        if config == third:
            made.set()
        elif config == RIVAL:
            ends.wait(60)
        else:  # long enough for a third's future
            assert made.wait(60) and not time.sleep(0.2)
        return build(family, problem, config, *others)

    _, clock, runtime = card(pick, build=slow, cores=3)
    with current.use(runtime):
        assert near(*call(strict=True)) and [who for who, _ in clock.asked[:2]] == ["ours", "rival"]
        assert "BLOCK_N=96" in said().split(" runs: ")[0] and "BLOCK_N=128" not in said()
        assert said().count(" beside ") == said().count(" µs of ") == 1
        ends.set()
        timed = len(clock.asked)
        assert near(*call(strict=True)) and len(clock.asked) == timed, "bits stay"
    _, clock, runtime = card(pick, cores=3)
    with current.use(runtime):
        assert near(*call(strict=True)) and [who for who, _ in clock.asked[:3]] == ["ours", "rival", "rival"]


@pytest.mark.parametrize(("ranks", "cores"), [("", 8), ("2", 4), ("16", 1), ("0", 8), ("many", 8)])
def test_ranks_of_one_host_share_its_cores(monkeypatch, ranks, cores):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(choice.os, "sched_getaffinity", lambda process: range(8))
    assert choice.own_cores() == cores


@pytest.mark.parametrize(("cores", "able"), [(1, [4, 16]), (2, [4, 8, 16]), (8, [4, 8, 8, 16])])
def test_the_same_code_with_other_splits_needs_no_core_of_its_own(tmp_path, cores, able):
    problem, gpu, family = strided(parse_shape("B=2,H=8,Hkv=1,Sk=4096,Sq=1,D=64")), GPUS["h100"], "split_kv"
    genes = load_space(family, gpu).starting_configs()[0].params | {"MERGE": "kernel", "SPLITS": 6}
    genes["WARPS"] = 4
    others = {"SPLITS": 4}, {"SPLITS": 8, "WARPS": 1}, {"SPLITS": 8, "WARPS": 2}, {"SPLITS": 16}
    made = [
        choice.Choice(registry.lookup(family), KernelConfig(family, genes | one), problem, gpu, "") for one in others
    ]
    first = dataclasses.replace(made[0], config=KernelConfig(family, genes), rivals=tuple(made))
    assert [one.has_code_of(first) for one in made] == [True, False, False, True]
    race = Race(Races(tmp_path / "races.jsonl"), FakeClock(), cores)
    assert [one.config["SPLITS"] for one in race.able(first)] == able


def test_a_call_that_waits_for_no_compiler_does_not_wait_for_a_rival_s(card):
    compiled = []

    def counted(family, problem, config, *others):
        compiled.append(config["BLOCK_N"])
        return build(family, problem, config, *others)

    _, clock, runtime = card(
        lambda problem, gpu: rivals(problem, gpu) if problem.seqlen_q > 64 else guess(problem, gpu), build=counted
    )
    with current.use(runtime):
        call()
        timed = len(clock.asked)
        assert compiled == [64] and near(*call(80, strict=True))
        assert compiled == [64] and len(clock.asked) == timed


@pytest.mark.parametrize("wins", [True, False])
def test_a_rival_that_won_in_another_process_is_compiled_now_or_the_pick_stays(tmp_path, wins):
    """This process has compiled the pick before, and would have left the rival out."""

    class OthersWon(Races):
        @contextlib.contextmanager
        def turn(self):
            with super().turn():
                self.add(*self.asked, Raced((10.0, 5.0), 20.0))
                yield

        def find(self, key):
            self.asked = (key,)
            return super().find(key)

    def some(family, problem, config, *others):
        if config == RIVAL and not wins:
            raise RuntimeError("no registers")
        return build(family, problem, config, *others)

    device, clock = FakeDevice(), FakeClock()
    clock.device, device._batch = device, 2
    pick = lambda problem, gpu: (
        rivals(problem, gpu, estimated=True) if problem.seqlen_q > 64 else wgmma_pick(problem, gpu)
    )
    runtime = Runtime(device, pick, tmp_path, some, race=Race(OthersWon(tmp_path / "races.jsonl"), clock, 2))
    with current.use(runtime), contextlib.nullcontext() if wins else pytest.warns(RuntimeWarning, match="to race runs"):
        assert near(*call(strict=True)) and device.loads == 1
        assert near(*call(80, strict=True)) and not clock.asked
        assert near(*call(81, strict=True))
    assert device.loads == 1 + wins


@pytest.mark.parametrize("what", ["kept_cubin", "ThreadPoolExecutor"])
def test_what_keeps_rivals_from_being_compiled_keeps_no_call_from_its_kernel(card, monkeypatch, what):
    def none(*words):
        if words[1:] and what == "ThreadPoolExecutor" and not str(words[1]).startswith("evoattn"):
            raise AssertionError
        if words[1:]:
            raise RuntimeError("can't start new thread")
        return pool(*words)

    pool = kernels.ThreadPoolExecutor
    monkeypatch.setattr(kernels, what, none)
    _, clock, runtime = card(rivals)
    with current.use(runtime):
        assert near(*call(strict=True)) and not clock.asked


@pytest.mark.slow
@pytest.mark.parametrize("what", ["driver", "SMs"])
def test_another_card_or_driver_races_anew(card, what):
    _, clock, runtime = card()
    with current.use(runtime):
        call()
    device, clock, runtime = card()
    if what == "driver":
        device.identity = lambda index: "a fake GPU, driver 2.0"
    else:
        device.gpu = dataclasses.replace(device.gpu, sm_count=114)
    with current.use(runtime):
        call()
    assert clock.asked


def test_kernels_that_round_queries_to_8_bits_race_as_others_do(card):
    space, given = registry.load_space("fp8_wgmma", GPUS["h100"]), dict(dtype="e4m3", scales="head")
    ops = ("forward", "forward_of_bf16", "forward_in_fp16")
    problems = [strided(AttentionProblem(1, 4, 4, 512, 512, 128, op=op, **given)) for op in ops]
    first, second, *_ = starting_configs(space, problems[0], GPUS["h100"])
    _, _, runtime = card(lambda problem, gpu: Pick("fp8_wgmma", first, rivals=(second,)))
    for problem in problems:
        assert [one.config for one in runtime.choose(problem, GPUS["h100"], contends=True).rivals] == [second]
