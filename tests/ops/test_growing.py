"""A token over a cache that grows: each length gets its own launch and answer, for little work, and plans stay few."""

import sys
from collections.abc import Callable

import pytest
import torch

import evoattn
from evoattn.model.errors import WrongUse
from evoattn.model.launch import Scalar, TensorMap
from evoattn.model.space import KernelConfig
from evoattn.ops import runtime
from evoattn.ops.choice import Choice
from evoattn.ops.given import call_of
from evoattn.ops.runtime import Runtime, current
from evoattn.portfolio.pick import lasting_pick, next_picks
from tests.ops.fake_device import FakeDevice, Pick, build, near

MOST_CALLS = 1000
"""Of Python functions, for a new length whose pick is known: 200 to 700 as measured, where before lengths were rounded
for picks it was 1,200 to 3,700. With those written in C a known length takes 40 to 100."""
KINDS = {
    "heads": dict(heads=32, kv_heads=32, dim=128),
    "grouped": dict(heads=32, kv_heads=8, dim=128),
    "window": dict(heads=32, kv_heads=8, dim=128, words=dict(window=(4095, -1))),
    "window and sinks": dict(heads=64, kv_heads=8, dim=64, words=dict(window=(127, -1), sinks=torch.zeros(64).half())),
    "sinks": dict(heads=64, kv_heads=8, dim=64, words=dict(sinks=torch.zeros(64).half())),
    "soft cap": dict(heads=16, kv_heads=8, dim=256, words=dict(softcap=50.0)),
    "wide": dict(heads=16, kv_heads=8, dim=512),
    "latent cache": dict(heads=128, kv_heads=1, dim=576, value_dim=512),
    "latent prefill's heads": dict(heads=128, kv_heads=128, dim=192, value_dim=128),
}


class Idle(FakeDevice):
    """It computes nothing."""

    def load(self, cubin: bytes) -> int:
        return 1

    def function(self, module: int, name: str) -> int:
        return 1

    def launch(self, *arguments: object) -> int:
        return 0


def right(family, problem, config, gpu, folder):
    """Machine code that was checked before."""
    from evoattn.ops.check import record_check

    cubin = build(family, problem, config, gpu, folder)
    record_check(cubin, Idle().identity(0), folder, config, "")
    return cubin


def token(keys: int, heads: int, kv_heads: int, dim: int, value_dim: int = 0, words=None):
    """A call of `evoattn.attention`: (tensors, words)."""
    query, key = torch.zeros(1, heads, 1, dim).half(), torch.zeros(1, kv_heads, keys, dim).half()
    value = key[..., :value_dim] if kv_heads == 1 else key.new_zeros(1, kv_heads, keys, value_dim or dim)
    return (query, key, value), dict(words or {}, enable_gqa=heads != kv_heads)


def calls_of(run: Callable[[], object]) -> int:
    """Calls of Python functions."""
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


@pytest.fixture
def op(tmp_path):
    made = Runtime(Idle(), lasting_pick, tmp_path, right, next_picks)
    made.estimated = True
    with current.use(made), torch.no_grad():
        yield made


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.slow
def test_a_new_length_takes_few_calls(op, kind):
    for keys in (4225, 4226):  # both of the same rounded length
        tensors, words = token(keys, **kind)
        evoattn.attention(*tensors, **words, strict=True)
    tensors, words = token(4227, **kind)
    new = calls_of(lambda: evoattn.attention(*tensors, **words, strict=True))
    known = calls_of(lambda: evoattn.attention(*tensors, **words, strict=True))
    assert known < 100 and new < MOST_CALLS


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.slow
def test_a_launch_is_of_the_very_length(op, kind):
    for keys in (4225, 4226):
        (query, key, value), words = token(keys, **kind)
        grouped = words.pop("enable_gqa")
        choice = op.choice(call_of(query, key, value, {"enable_gqa": grouped, **words}))
        assert isinstance(choice, Choice) and choice.problem.seqlen_k == keys
        first, *_ = choice.launches(None)
        numbers = [a.value for a in first.args if isinstance(a, Scalar)]
        maps = [a for a in first.args if isinstance(a, TensorMap) and a.buffer == "k"]
        assert keys in numbers and all(keys in one.shape for one in maps)


@pytest.mark.slow
def test_each_length_gets_its_own_answer(tmp_path):
    """Windows and sinks of a layer of gpt-oss, whose kernels read keys by tensor maps; keys are rounded to 4608."""
    generator = torch.Generator().manual_seed(3)
    query, cache = (torch.randn(1, h, n, 64, generator=generator).half() for h, n in ((64, 1), (16, 4360)))
    sinks, asked = torch.randn(64, generator=generator).half(), []

    def noted(problem, gpu):
        """With rows of one head to a tile, as the fake device reads them."""
        asked.append(lasting_pick(problem, gpu))
        return Pick(asked[-1].family, KernelConfig(asked[-1].family, asked[-1].config.params | {"GROUP_ROWS": False}))

    with current.use(Runtime(FakeDevice(), noted, tmp_path, build, next_picks)), torch.no_grad():
        for keys in (4348, 4351, 4352, 4353, 4356):
            key, value = cache[:, :8, :keys], cache[:, 8:, :keys]
            answer = evoattn.attention(query, key, value, window=(127, -1), sinks=sinks, enable_gqa=True, strict=True)
            k, v = (t[:, :, -128:].double().repeat_interleave(8, 1) for t in (key, value))
            scores = torch.cat((query.double() @ k.transpose(-1, -2) / 8, sinks.double()[None, :, None, None]), -1)
            assert near(answer, torch.softmax(scores, -1)[..., :-1] @ v), keys
    assert len({id(found) for found in asked}) == 1, "one for 4097 to 4608 keys"


def test_what_lies_ahead_of_a_single_query_is_not_said(op):
    """So that the window of a layer is the same at each length."""
    for window in ((99, -1), (99, 7), (99, 0)):
        (query, key, value), words = token(300, **KINDS["grouped"])
        with evoattn.capture() as shapes:
            evoattn.attention(query, key, value, **words, window=window, strict=True)
        assert shapes.entries[0].problem.window == "99:0"
    with evoattn.capture() as shapes:
        evoattn.attention(query, key, value, **words, window=(-1, 3), strict=True)
    assert not shapes.entries[0].problem.window


@pytest.mark.slow
def test_what_is_made_ready_up_to_a_length_waits_for_no_compiler(tmp_path):
    compiled = []

    def noted(family, problem, config, gpu, folder):
        compiled.append(config.describe())
        return right(family, problem, config, gpu, folder)

    with current.use(Runtime(Idle(), lasting_pick, tmp_path, noted, next_picks)), torch.no_grad():
        shape = "B=1,H=32,Hkv=8,Sq=1,Sk=100,D=128,dtype=fp16"
        said = evoattn.warmup(shape, up_to_keys=1500)
        assert len(said) == 1 + sum(sentence.startswith("From ") for sentence in said) >= len(compiled) > 1
        assert said[0] == evoattn.warmup(shape)[0]
        del compiled[:]
        for keys in (*range(100, 1500, 41), 1500):
            tensors, words = token(keys, **KINDS["grouped"])
            evoattn.attention(*tensors, **words, strict=True)
        assert not compiled
        with pytest.raises(WrongUse, match="a number of keys, not '8k'"):
            evoattn.warmup(shape, up_to_keys="8k")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grouped", "window"])
def test_what_is_made_ready_for_a_causal_shape_serves_its_calls(tmp_path, kind):
    """A call of one query says no mask, and no window while that hides nothing."""
    compiled = []

    def noted(family, problem, config, gpu, folder):
        compiled.append(config.describe())
        return right(family, problem, config, gpu, folder)

    with current.use(Runtime(Idle(), lasting_pick, tmp_path, noted, next_picks)), torch.no_grad():
        window = ",window=300:0" if kind == "window" else ""
        shape = f"B=1,H=32,Hkv=8,Sq=1,Sk=100,D=128,dtype=fp16,mask=causal_lower_right{window}"
        evoattn.warmup(shape, up_to_keys=900)
        assert compiled
        del compiled[:]
        for keys in (100, 290, 302, 340, 900):
            tensors, words = token(keys, **KINDS["grouped"] | {"words": dict(window=(300, -1)) if window else {}})
            evoattn.attention(*tensors, **words, causal=True, strict=True)
        assert not compiled


def test_plans_of_the_oldest_lengths_go_first(op):
    plans = [object() for _ in range(runtime.PLANS_KEPT + 1)]
    for number, plan in enumerate(plans):
        op.keep(op.plans, (number,), plan)
    kept = [number for number in range(len(plans)) if op.plans.get((number,)) is plans[number]]
    assert kept == list(range(runtime.PLANS_KEPT // 4, len(plans)))
