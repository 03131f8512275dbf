"""What people write in FlexAttention's language: each is traced, and means what torch makes of it in float64. Where
FlexAttention's name is ours, and what a call of it should take."""

import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import _identity, noop_mask

import evoattn
from benchmarks.flex.mods import MODS, Shape
from benchmarks.flex.served import said_of
from evoattn.cost.cost import scores
from evoattn.families.registry import load_space, lookup
from evoattn.model.gpu import GPUS
from evoattn.model.paths import ROOT
from evoattn.model.score import LARGEST_FLOAT, evaluate, parse_score
from evoattn.ops import block_masks, flex, mods
from evoattn.ops.call import Call
from evoattn.ops.choice import Choice, Refusal
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import by_formula
from evoattn.portfolio.pick import canonical
from tests.ops.fake_device import tensors

SHAPES = {"square": Shape(2, 4, 200, 200), "more keys": Shape(2, 4, 77, 301), "few queries": Shape(2, 4, 3, 130)}


def by_torch(call, score_mod, mask):
    """The answer and the log-sum-exp of torch's FlexAttention, uncompiled, in float64."""
    q, k, v = (t.double() for t in (call.query, call.key, call.value))
    lists = (noop_mask,) if mask is None else block_masks.authoritative(mask, k.shape[2]).as_tuple()
    out, lse2, _ = math_attention(q, k, v, score_mod or _identity, lists, q.shape[-1] ** -0.5, {})
    return out, lse2 * torch.log(torch.tensor(2.0, dtype=torch.float64))


F, PAIR = torch.nn.functional, torch.ones(2)
OPERATIONS = {
    "numbers": lambda s, q, k: (
        torch.rsub(s, 3.0, alpha=2) + torch.add(s, q, alpha=2) - torch.sub(k, s, alpha=0.5) - 0 - -1
    ),
    "remainders": lambda s, q, k: s % 0.7 + (q - 2 * k) % 5 + torch.remainder(-s, 1.3) + torch.remainder(q + 1, k + 2),
    "quotients": lambda s, q, k: (
        s // 0.7 + (q - 2 * k) // 3 + torch.div(q, k + 1) + torch.div(s, 2, rounding_mode="floor")
    ),
    "rounded": lambda s, q, k: s.floor() + (3 * s).ceil() + (2 * s).trunc() + q.floor() + k.ceil() + s.int() + s.sign(),
    "limits": lambda s, q, k: (
        s.clamp(-0.5, 0.7)
        + s.clamp_min(0.1)
        + s.clamp_max(0.2)
        + torch.maximum(s, -s)
        + q.clamp(2)
        + torch.minimum(q, 2 * k)
        + s.relu()
        + q.abs()
        + (k - q).abs()
        + torch.clamp(s, max=1)
    ),
    "powers": lambda s, q, k: (
        s**2
        + s**3
        + s.abs() ** 0.5
        + (q + 1.5) ** s
        + s.square()
        + (s.abs() + 1).rsqrt()
        + q**2
        + (k + 1.0).reciprocal()
        + s**1
        + (q - 2) ** 3
        + s.abs() ** 2.5
    ),
    "exponentials": lambda s, q, k: (
        s.exp() + s.exp2() + s.expm1() + (q + 1.0).log() + (k + 2.0).log2() + s.abs().log1p()
    ),
    "curves": lambda s, q, k: (
        s.tanh()
        + s.erf()
        + s.sin()
        + s.cos()
        + s.sigmoid()
        + F.silu(s)
        + F.gelu(s)
        + F.gelu(s, approximate="tanh")
        + F.softplus(s)
        + F.softplus(8 * s, 2.0, 3.0)
    ),
    "conditions": lambda s, q, k: (
        torch.where((q > 2) ^ (k <= 4), s, -s)
        + (q == k)
        + 2 * (q != k)
        + 4 * ((q > 1) & (k < 5))
        + 8 * ((q < 2) | (k >= 6))
        + torch.where(~(q > k), s, 1.0)
        + s.masked_fill(q > 3, 2.0)
        + ((q > 1) == (k > 2))
        + 2 * ((q > 1) != (k > 2))
    ),
    "logic": lambda s, q, k: (
        s * torch.logical_xor(q > 2, k)
        + torch.logical_and(q, k > 1)
        + torch.logical_or(q, k)
        + torch.logical_not(k)
        + torch.where(torch.where(q > 1, k > 2, k > 4), s, 0.0)
        + torch.where(torch.tensor(True), s, 9.0)
        + torch.where(torch.tensor(False), 9.0, k)
        + s.isinf()
    ),
    "bits": lambda s, q, k: s + (q & 3) + ((q > 1) & k) + ~k + (q >> 1) + (k << 2) + (q + k & 6),
    "made": lambda s, q, k: (
        s * torch.ones_like(s) + s.new_full((), 2.5) + torch.zeros_like(q) + torch.full_like(k, 3) + 1
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_give_what_torch_gives(name):
    function = OPERATIONS[name]
    said = mods.trace(lambda s, b, h, q, k: function(s, q, k), None, [])
    scores = torch.linspace(-2, 2, 72, dtype=torch.float64).view(8, 9)[:, torch.randperm(9)]
    indices = {"q": torch.arange(8).view(-1, 1).expand(8, 9), "k": torch.arange(9).expand(8, 9)}
    found = evaluate(parse_score(said.score).tree, {**indices, "s": scores, "b": 0, "h": 0, "d": 1}, torch)
    torch.testing.assert_close(found, function(scores, **indices), rtol=1e-6, atol=1e-6)


def test_parts_of_tables():
    table, captured = torch.arange(60.0).view(3, 4, 5), []
    part = table[1:, ::2, 1:4]
    parts = lambda s, b, h, q, k: s + part[q, ..., h, k] + table[..., 2][q][h] + table[:, q][k][h] + table[q, ..., k][h]
    said = mods.trace(parts, None, captured)
    assert said.score == "((((s+t0[q,h,k])+t1[q,h])+t2[k,q,h])+t2[q,h,k])"
    found = said.tables(captured)
    assert torch.equal(found["t0"], part) and torch.equal(found["t1"], table[..., 2])


def test_limits_of_an_expression(monkeypatch):
    """Operators and operands count, numbers that are written too; a number past the largest float is infinity."""
    functions = lambda s, b, h, q, k: s + q, lambda s, b, h, q, k: s * PAIR[h]
    for function, parts in zip(functions, (3, 4), strict=True):
        monkeypatch.setattr(mods, "MOST_PARTS", parts)
        assert mods.trace(function, None, []).score
        monkeypatch.setattr(mods, "MOST_PARTS", parts - 1)
        with pytest.raises(mods.Untraceable, match="parts at most"):
            mods.trace(function, None, [])
    monkeypatch.undo()
    factors = LARGEST_FLOAT, -2 * LARGEST_FLOAT
    largest, more = (mods.trace(lambda s, b, h, q, k, x=x: s + x, None, []).score for x in factors)
    assert "inf" not in largest and more == "(s+(-inf))"


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODS)
def test_expressions_give_what_torch_gives(name, shape):
    shape = SHAPES[shape]
    q, k, v = tensors(shape.batch, shape.heads, 2, shape.queries, shape.keys, dtype=torch.float32)
    written = MODS[name](shape)
    mask = written.block_mask(shape, 64)
    call = Call(q.double(), k.double(), v.double(), enable_gqa=True, return_lse=True, strict=True)
    made = flex.calls(Call(q, k, v, enable_gqa=True), written.score_mod, mask)
    assert not isinstance(made, str), made
    one = next(one for one in (make() for make in made) if not one.blocks)  # lists have no formula
    expected = by_torch(call, written.score_mod, mask)
    wide = replace(one, query=call.query, key=call.key, value=call.value, return_lse=True)
    out, lse = by_formula(wide)
    torch.testing.assert_close(out, expected[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.double(), expected[1], atol=1e-5, rtol=1e-5)


def said(name):
    """How a call says the function."""
    shape = Shape(2, 4, 512, 512)
    q, k, v = tensors(shape.batch, shape.heads, 4, shape.queries, shape.keys)
    written = MODS[name](shape)
    return said_of(flex.calls(Call(q, k, v), written.score_mod, written.block_mask(shape))[0]())


@pytest.mark.slow
def test_the_table_of_the_page_is_what_runs():
    table = (ROOT / "reports/flex_functions.md").read_text(encoding="utf-8").split("\n\n")[3].splitlines()[2:]
    found = {}
    for names, how in (line.removeprefix("| ").split(" | ")[:2] for line in table):
        found |= dict.fromkeys(names.replace(" ", "_").split(",_"), how)
    assert found == {name: said(name) for name in MODS}


def test_no_trace_imports_torch_s_compiler():
    """It takes seconds, and torch puts it around the dispatch of modes that do not refuse."""
    assert not hasattr(mods._Recorder.__torch_dispatch__, "__wrapped__")


WHOLE = torch.arange(200.0).view(4, 5, 10)[1:] / 100


@pytest.mark.parametrize(
    "part",
    [
        lambda q, k: WHOLE[1:][q % 2, 2, k % 10] + WHOLE[0][k % 5, 7],
        lambda q, k: WHOLE[..., k % 10][q % 3, 4] + WHOLE[q % 3, ..., 3][k % 5],
    ],
)
def test_a_part_of_a_table_is_read_where_it_lies(part):
    q, k, v = tensors(1, 2, 2, 20, 30)
    score_mod = lambda s, b, h, i, j: s + part(i, j)
    call = flex.calls(Call(q, k, v), score_mod, None)[0]()
    found, expected = by_formula(replace(call, return_lse=True)), by_torch(Call(q, k, v), score_mod, None)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-3, rtol=2e-3)


@pytest.mark.slow
def test_torch_s_name_is_ours_inside_of_a_block(device):
    q, k, v = tensors(1, 2, 2, 20, 30)
    own, seen = torch_flex.flex_attention, []

    def call():
        before = len(device.launches)
        torch_flex.flex_attention(q, k, v)
        seen.append(len(device.launches) > before)

    call()
    with evoattn.flex():
        call()
        with evoattn.flex(False):
            call()
        call()
        other = threading.Thread(target=call)
        other.start()
        other.join()
        assert torch_flex.flex_attention.__name__ == "flex_attention"
    call()
    assert seen == [False, True, False, True, False, False] and torch_flex.flex_attention is own


def test_who_replaces_our_replacement_keeps_the_name(monkeypatch):
    other = lambda *_: None
    with evoattn.flex():
        own = torch_flex.flex_attention
        monkeypatch.setattr(torch_flex, "flex_attention", other)
        with evoattn.flex():
            assert torch_flex.flex_attention is other
    assert torch_flex.flex_attention is other and own is not flex.TORCH
    monkeypatch.setattr(torch_flex, "flex_attention", flex.TORCH)
    with evoattn.flex(), evoattn.flex():
        assert torch_flex.flex_attention is own
    assert torch_flex.flex_attention is flex.TORCH


def test_what_a_call_should_take_is_what_its_pick_came_to_else_the_model_s(monkeypatch):
    gpu, space = GPUS["h100"], load_space("flash_mma", GPUS["h100"])
    config, other = space.starting_configs()[:2]
    call = flex.Call(*tensors(1, 2, 2, 100, 130))
    asked = call.problem(call.query.stride())
    problem = asked.as_searched
    choice = Choice(lookup("flash_mma"), config, asked, gpu, "", True)
    found = [choice, choice, choice, Refusal("no")]
    climbs = [{}, *({(canonical(problem), gpu): SimpleNamespace(config=one, score=7.0)} for one in (other, config))]
    monkeypatch.setattr(type(current), "climbs", lambda self: climbs.pop(0))
    with current.use(SimpleNamespace(choice=lambda one: found.pop(0))):
        model = float(scores(problem, [config], gpu)[0])
        assert [flex._us(call) for _ in range(4)] == [model, model, 7.0, math.inf] and model != 7.0
