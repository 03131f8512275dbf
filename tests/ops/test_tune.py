"""Tuning with an engine that finds what the test says: where the time goes, what replaces what, and who takes the
winners."""

import time
from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import evoattn
from evoattn.model.errors import FailedRun, WrongUse
from evoattn.model.gpu import GPUS, detect_devices
from evoattn.model.problem import AttentionProblem
from evoattn.ops.choice import CudaClock, Race
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.shapes import Shapes
from evoattn.ops.tune import tune
from evoattn.portfolio.wins import Raced, Races, Wins
from tests.ops.fake_device import WGMMA, FakeDevice, fake_runtime, tensors
from tests.ops.fake_engine import FakeEngine

H100 = GPUS["h100"]
SMALL = AttentionProblem(2, 4, 2, 37, 45, 64)
LARGE = SMALL.with_(batch=8, seqlen_q=2048, seqlen_k=2048)
OTHER = AttentionProblem(1, 8, 8, 512, 512, 128, "bf16", "causal_upper_left")
NOBODY = AttentionProblem(1, 8, 8, 512, 512, 512, window="9:0")


@pytest.fixture
def wins(tmp_path):
    """A file of wins of the test's own, behind the op with the picks of today."""
    finds = Wins(tmp_path / "wins.jsonl")
    with current.use(fake_runtime(FakeDevice(), tmp_path, current.best_known), finds):
        yield finds


def shapes():
    asked = Shapes()
    asked.add(SMALL, 100, 4.0)
    asked.add(LARGE, 3, 100.0)
    asked.add(OTHER, 10, 20.0)
    asked.add(NOBODY, 1, 1.0)
    return asked


@pytest.mark.slow
@pytest.mark.parametrize("budget, searched", [("60s", 48.0), ("20s", 11.5), ("4s", 2.0)])
def test_a_fifth_is_for_comparisons_or_what_they_take_up_to_a_half(wins, budget, searched):
    tune(shapes(), budget, gpu=H100, make_engine=FakeEngine)
    assert FakeEngine.last.seconds == pytest.approx(searched)


@pytest.mark.slow
def test_winners_are_kept_and_taken(wins):
    result = tune(shapes(), "10s", gpu=H100, make_engine=FakeEngine)
    assert [row.problem for row in result.rows] == [SMALL, LARGE, OTHER, NOBODY]
    assert [row.after_us for row in result.rows] == [5.0, 5.0, 5.0, None]
    assert result.speedup > 1.7
    assert FakeEngine.last.ended
    assert "no family serves it" in str(result)
    assert wins.find(LARGE, H100).config.params == WGMMA
    assert "your search measured 5.00 µs" in evoattn.explain(*tensors(), enable_gqa=True)
    with current.use(fake_runtime(FakeDevice(), wins.path.parent, current.best_known), Wins(wins.path)):
        assert evoattn.explain(*tensors(), enable_gqa=True).startswith("flash_wgmma BLOCK_M=64"), (
            "in another process too"
        )


@pytest.mark.slow
def test_an_interrupt_keeps_the_winners_of_what_was_compared(wins):
    stages = []

    def interrupt_the_second(progress):
        stages.append(progress.stage)
        if stages.count("comparing") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(shapes(), "10s", refresh=interrupt_the_second, gpu=H100, make_engine=FakeEngine)
    assert FakeEngine.last.ended and [wins.find(p, H100) is not None for p in (SMALL, LARGE, OTHER)] == [1, 0, 0]
    assert "your search measured 5.00 µs" in evoattn.explain(*tensors(), enable_gqa=True)


VARIANTS = {
    "window": (dict(window=(9, 0), is_causal=True), {}),
    "softcap": (dict(softcap=30.0), {}),
    "sinks": (dict(sinks=torch.zeros(4, dtype=torch.float16)), {}),
    "slopes": (dict(alibi_slopes=torch.ones(4)), {}),
    "bias": (dict(bias=torch.zeros(4, 37, 45, dtype=torch.float16)), {}),
    "keys in use": (dict(seqused_k=torch.tensor([45, 9], dtype=torch.int32)), {}),
    "values of another width": ({}, dict(value_dim=128)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("scale", [None, 0.25])
def test_winners_of_what_was_captured_are_taken(tmp_path, name, scale):
    words, sizes = VARIANTS[name]
    q, k, v = tensors()
    v = v.repeat(1, 1, 1, sizes.get("value_dim", 64) // 64)
    words = words | {"enable_gqa": True, "scale": scale}
    device, finds = FakeDevice(), Wins(tmp_path / "wins.jsonl")
    with current.use(fake_runtime(device, tmp_path, lambda *about: finds.find(*about)), finds):
        with evoattn.capture() as asked:
            evoattn.attention(q, k, v, **words)
        assert len(asked) == 1 and not device.launches
        tune(asked, "10s", gpu=H100, make_engine=FakeEngine)
        assert "your search measured 5.00 µs" in evoattn.explain(q, k, v, **words)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [None, 0.25])
def test_winners_of_packed_sequences_pages_and_functions_are_taken(tmp_path, scale):
    q, k = torch.randn(40, 4, 64).half(), torch.randn(60, 2, 64).half()
    starts = torch.tensor([0, 8, 40], dtype=torch.int32), torch.tensor([0, 20, 60], dtype=torch.int32)
    packed = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "max_seqlen_q": 32, "max_seqlen_k": 40}
    queries, pages = torch.randn(2, 1, 4, 64).half(), torch.randn(6, 16, 2, 64).half()
    cache = {"block_table": torch.tensor([[4, 0], [5, 1]]).int(), "seqused_k": torch.tensor([30, 9]).int()}
    ids, dense = torch.arange(200) // 90, tensors(seqlen_q=200, seqlen_k=200)
    mask = create_block_mask(lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), None, None, 200, 200, "cpu")
    said_by = {"score_mod": lambda s, b, h, i, j: s * (h + 1), "block_mask": mask, "enable_gqa": True, "scale": scale}
    finds = Wins(tmp_path / "wins.jsonl")
    with current.use(fake_runtime(FakeDevice(), tmp_path, lambda *about: finds.find(*about)), finds):
        with evoattn.capture() as asked:
            evoattn.flex_attention(*dense, **said_by)
            evoattn.attention_varlen(q, k, k, *packed.values(), causal=True, scale=scale)
            evoattn.attention_paged(queries, pages, pages, *cache.values(), scale=scale)
        asked.save(tmp_path / "SHAPES.json")
        tune(Shapes.load(tmp_path / "SHAPES.json"), "10s", gpu=H100, make_engine=FakeEngine)
        said = [
            evoattn.explain(q, k, k, causal=True, scale=scale, **packed),
            evoattn.explain(queries, pages, pages, scale=scale, **cache),
            evoattn.explain(*dense, **said_by),
        ]
    assert all("your search measured 5.00 µs" in sentence for sentence in said), said


ONE_QUERY = SMALL.with_(seqlen_q=1, mask="causal_lower_right")


@pytest.mark.slow
def test_a_win_for_a_shape_is_found_by_its_calls(wins):
    """A last query sees every key, and a window of more keys than there are hides none: calls say neither."""
    said = [ONE_QUERY, SMALL.with_(mask="causal_lower_right", window="99:0"), ONE_QUERY.with_(window="9:0")]
    result = tune(said, "10s", gpu=H100, make_engine=FakeEngine)
    assert [(row.problem.mask, row.problem.window) for row in result.rows] == [
        ("full", ""),
        ("causal_lower_right", ""),
        ("full", "9:0"),
    ]
    q, k, v = tensors()
    words = dict(enable_gqa=True, causal=True)
    for query, window in ((q[:, :, :1], None), (q, (99, -1)), (q[:, :, :1], (9, -1))):
        assert "your search measured" in evoattn.explain(query, k, v, **words, window=window), window


def test_what_training_asks_for_is_found_for_itself(wins):
    """Kernels of one problem's passes, with a log-sum-exp and without."""
    passes = [SMALL, SMALL.with_(lse=True), SMALL.with_(op="backward"), SMALL.with_(op="backward", deterministic=True)]
    rows = tune(passes[:2], "10s", gpu=H100, make_engine=FakeEngine).rows
    assert all(row.after.startswith("flash_wgmma") for row in rows)
    finds = Wins(wins.path)
    assert [finds.find(problem, H100) is not None for problem in passes] == [True, True, False, False]


def test_the_progress_is_told(wins):
    told = []
    tune([SMALL], "10s", gpu=H100, make_engine=FakeEngine, refresh=told.append)
    assert [progress.stage for progress in told] == ["starting workers", "searching", "comparing"]
    assert told[-1].measured == 3


class FarBehind(FakeEngine):
    """Today's kernels are left unproved in the comparison."""

    def result(self, times, refusals):
        found = super().result(times, refusals)
        for timing in found.timings.values():
            if timing.samples_us == (9.0,):
                timing.protocol["out"] = "far behind"
        return found


def test_what_runs_today_has_a_time_however_far_behind(wins):
    [row] = tune([SMALL], "10s", gpu=H100, make_engine=FarBehind).rows
    assert (row.before_us, row.after_us, row.gain) == (9.0, 5.0, 1.8)


def test_who_won_a_race_is_what_runs_today(wins, tmp_path):
    races = Races(tmp_path / "races.jsonl")
    races.find = lambda key: Raced((10.0, 5.0))
    runtime = Runtime(FakeDevice(), current.best_known, tmp_path, race=Race(races, CudaClock(), 2))
    rival = current.best_known(LARGE, H100).rivals[0]
    with current.use(runtime, wins):
        [row] = tune([LARGE], "10s", gpu=H100, make_engine=FakeEngine).rows
    assert row.before == f"{rival.family} {rival.id[:8]}"


class Alone(FakeEngine):
    """SDPA refuses the problem."""

    def final(self, group, index, kernels, protocol, peers):
        return self.result({k.id: self.us for k in kernels if k.params == WGMMA}, dict.fromkeys(peers, "refused"))


def test_a_win_over_nothing_says_so(wins, tmp_path):
    problem = SMALL.with_(softcap=7.0, sink=True)
    [row] = tune([problem], "10s", gpu=H100, make_engine=Alone).rows
    assert (row.before_us, row.after_us, row.gain) == (None, 5.0, 1.0)
    for finds in (wins, Wins(wins.path)):
        assert finds.find(problem, H100).why == "your search measured 5.00 µs, nothing else could be timed"


class Late(FakeEngine):
    def final(self, *arguments, **words):
        time.sleep(0.2)
        return super().final(*arguments, **words)


@pytest.mark.slow
def test_comparisons_end_with_the_budget(wins):
    result = tune(shapes(), "0.5s", gpu=H100, make_engine=Late)
    assert result.rows[0].after_us == 5.0, "the problem that takes the most time comes first"
    assert "the time was over" in result.rows[2].after
    assert wins.find(OTHER, H100) is None


class Slow(FakeEngine):
    us = 9.95


class Wrong(FakeEngine):
    wrong = "it is wrong"


@pytest.mark.slow
@pytest.mark.parametrize("engine", [Slow, Wrong])
def test_what_is_not_clearly_ahead_or_wrong_is_not_kept(wins, engine):
    result = tune(shapes(), "10s", gpu=H100, make_engine=engine)
    assert all(row.gain == 1.0 for row in result.rows)
    assert wins.find(LARGE, H100) is None
    assert result.speedup == 1.0


def test_a_second_tuning_starts_from_the_first(wins):
    tune([LARGE], "10s", gpu=H100, make_engine=FakeEngine)
    result = tune([LARGE], "10s", gpu=H100, make_engine=FakeEngine)
    assert result.rows[0].before.startswith("flash_wgmma")
    assert result.rows[0].gain == 1.0
    assert FakeEngine.last.groups[0].given[0] == ("flash_wgmma", WGMMA)


def test_one_shape_needs_no_list(wins):
    result = tune(LARGE, "10s", gpu=H100, make_engine=FakeEngine)
    assert [row.problem for row in result.rows] == [LARGE]
    assert len(evoattn.warmup("B=2,H=4,Hkv=2,Sq=37,Sk=45,D=64,dtype=fp16")) == 1


def test_wrong_use():
    with pytest.raises(WrongUse, match="not '5trials'"):
        tune([SMALL], "5trials", gpu=H100)
    for wrong in (["a shape"], None, 3, [3], [SMALL, None]):
        for call in (partial(tune, gpu=H100), evoattn.warmup):
            with pytest.raises(WrongUse):
                call(wrong)


@pytest.mark.skipif(bool(detect_devices()), reason="there is a CUDA device")
def test_without_a_device_it_fails_in_one_sentence():
    with pytest.raises(FailedRun, match="no CUDA device"):
        tune([SMALL], "5s")
