"""Sinks in float32 beside tensors of 16 bits are not rounded to these: an answer is as near the formula as others."""

import math

import pytest
import torch

import evoattn
from evoattn.ops import attention
from evoattn.ops.call import Call, terms_of
from evoattn.ops.runtime import current
from tests.fuzz.formula import Formula, hides
from tests.ops.fake_backward import TrainingDevice, training_runtime
from tests.ops.fake_device import CacheDevice, fake_runtime, split_kv_pick

SINKS = torch.tensor([5.515, 9.53, -3.0, 20.06, -math.inf, 0.3])
"""In bfloat16 the second and the fourth would be up to 6 % off in their weights."""
HEADS, KEYS, DIM = 6, 40, 64


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def near(found, exact, rounding=0.01):
    """Of each head, by its largest number."""
    off, size = ((one.double()).abs().amax((0, *range(2, one.dim()))) for one in (found - exact, exact))
    return (off <= rounding * size).all()


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def device(request, tmp_path):
    fake = TrainingDevice()
    runtime = training_runtime(fake, tmp_path, *([] if request.param else [lambda problem, gpu: None]))
    with current.use(runtime):
        yield fake


@pytest.mark.parametrize("causal", [False, True])
def test_the_answer_and_its_sum(device, causal):
    """Half of the queries see no key under the causal mask."""
    q, k, v = drawn(2, HEADS, 2 * KEYS, DIM), drawn(2, 2, KEYS, DIM), drawn(2, 2, KEYS, DIM + 1)[..., :DIM].contiguous()
    words = dict(sinks=SINKS, enable_gqa=True, causal="lower_right" if causal else None)
    change = [hides(lambda i, j: j > i - KEYS)] if causal else []
    exact, sums = Formula(change=change, sinks=SINKS.double()).of(q.double(), k.double(), v.double())
    out, lse = evoattn.attention(q, k, v, return_lse=True, **words)
    assert near(out, exact) and torch.allclose(lse.double(), sums, atol=1e-3)
    taken = torch.empty_like(q)
    assert evoattn.attention(q, k, v, out=taken, **words) is taken and torch.equal(taken, out)
    with pytest.raises(ValueError, match="out must be"):
        evoattn.attention(q, k, v, out=taken[:, :, 1:], **words)
    with pytest.raises(ValueError, match="sinks must have one value for each of the 6 heads"):
        evoattn.attention(q, k, v, **words | {"sinks": SINKS[:5]})


def test_gradients(device):
    leaves = [
        one.requires_grad_() for one in (drawn(1, HEADS, KEYS, DIM), drawn(1, 2, KEYS, DIM), drawn(1, 2, KEYS, DIM))
    ]
    leaves.append(SINKS.clone().requires_grad_())
    out = evoattn.attention(*leaves[:3], sinks=leaves[3], enable_gqa=True)
    wide = [one.detach().double().requires_grad_() for one in leaves]
    exact, _ = Formula(sinks=wide[3]).of(*wide[:3])
    grad = drawn(*out.shape)
    found = torch.autograd.grad(out, leaves, grad)
    expected = torch.autograd.grad(exact, wide, grad.double())
    assert near(found[0], expected[0], 0.02) and found[3].dtype == torch.float32
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 0.02 * other.abs().max()


def test_packed_sequences(device):
    q, k, v = drawn(50, HEADS, DIM), drawn(50, 2, DIM), drawn(50, 2, DIM)
    starts = torch.tensor([0, 20, 50]).int()
    out, lse = evoattn.attention_varlen(q, k, v, starts, starts, 30, 30, sinks=SINKS, return_lse=True)
    assert out.shape == q.shape and lse.shape == (HEADS, 50)
    for first, end in ((0, 20), (20, 50)):
        own = [one[first:end].transpose(0, 1)[None].double() for one in (q, k, v)]
        exact, sums = Formula(sinks=SINKS.double()).of(*own)
        assert near(out[first:end].transpose(0, 1)[None], exact)
        assert torch.allclose(lse[:, first:end].double(), sums[0], atol=1e-3)


def test_pages(tmp_path):
    """And packed queries over them, after a call with the same sinks in 16 bits, whose plan rounds."""
    caches = drawn(5, 16, 2, DIM), drawn(5, 16, 2, DIM).flip(0)
    table, used = torch.tensor([[3, 1], [0, 4]]).int(), torch.tensor([30, 17]).int()
    q, starts = drawn(6, HEADS, DIM), torch.tensor([0, 2, 6]).int()
    pick = lambda problem, gpu: None if problem.lse else split_kv_pick(problem, gpu)
    with current.use(fake_runtime(CacheDevice(), tmp_path, pick)):
        evoattn.attention_mixed(q, *caches, table, used, starts, 4, sinks=SINKS.bfloat16(), strict=True)
        mixed = [evoattn.attention_mixed(q, *caches, table, used, starts, 4, sinks=SINKS) for _ in range(2)]
        paged = evoattn.attention_paged(q[:4].view(2, 2, HEADS, DIM), *caches, table, used, sinks=SINKS)
    assert torch.equal(*mixed)
    for b, (rows, out) in enumerate(zip((slice(0, 2), slice(2, 4)), paged, strict=True)):
        k, v = (one[table[b].long()].flatten(0, 1)[: used[b]].transpose(0, 1)[None].double() for one in caches)
        exact, _ = Formula(sinks=SINKS.double()).of(q[rows].transpose(0, 1)[None].double(), k, v)
        assert near(out.transpose(0, 1)[None], exact)
        exact, _ = Formula(sinks=SINKS.double()).of(q[starts[b] : starts[b + 1]].transpose(0, 1)[None].double(), k, v)
        assert near(mixed[0][starts[b] : starts[b + 1]].transpose(0, 1)[None], exact)


def test_autocast_does_not_round_them(device):
    """As it does not where scores and sinks are joined, which promotes."""
    q, k, v = drawn(1, HEADS, KEYS, DIM), drawn(1, 2, KEYS, DIM), drawn(1, 2, KEYS, DIM)
    exact, _ = Formula(sinks=SINKS.double()).of(q.double(), k.double(), v.double())
    with torch.autocast("cpu", torch.bfloat16):
        out = evoattn.attention(q.float(), k.float(), v.float(), sinks=SINKS, enable_gqa=True)
    assert out.dtype == torch.bfloat16 and near(out, exact)


def test_under_autocast_a_bias_may_have_its_dtype_and_explain_says_what_runs(device):
    q, bias = drawn(1, HEADS, KEYS, DIM).float(), drawn(HEADS, KEYS, KEYS)
    exact, _ = Formula(sinks=SINKS.double(), change=[lambda s, *_: s + bias.double()]).of(
        q.double(), q.double(), q.double()
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert near(evoattn.attention(q, q, q, bias=bias, sinks=SINKS), exact)
        said = evoattn.explain(q, q, q, sinks=SINKS)
        assert said == evoattn.explain(q, q, q, return_lse=True)


@pytest.mark.parametrize("return_lse", [False, True])
def test_without_gradients_the_answer_is_changed_in_place_to_the_same_bits(monkeypatch, return_lse):
    """Which takes a third of the launches."""
    out, lse, made = drawn(1, HEADS, KEYS, DIM), drawn(1, HEADS, KEYS).float() * 9, []
    lse[..., :3], out[:, :, :3] = -math.inf, 0
    monkeypatch.setattr(attention, "attend", lambda call: (made.append(out.clone()) or made[-1], lse))
    answers = []
    for sinks in (SINKS, SINKS.clone().requires_grad_()):
        call = Call(out, out, out, terms=terms_of(sinks=sinks), return_lse=return_lse)
        answers.append(attention._with_sinks(call, call))
    few, many = answers if return_lse else [(one,) for one in answers]
    assert few[0] is made[0] and all(torch.equal(*both) for both in zip(few, many, strict=True))
    assert not any(one.isnan().any() for one in few)


@pytest.mark.slow
def test_compiled_code(device):
    q, k, v = drawn(1, HEADS, KEYS, DIM), drawn(1, 2, KEYS, DIM), drawn(1, 2, KEYS, DIM)
    words = dict(sinks=SINKS, enable_gqa=True)
    run = torch.compile(lambda q, k, v: evoattn.attention(q, k, v, **words), backend="aot_eager", fullgraph=True)
    assert torch.allclose(run(q, k, v).float(), evoattn.attention(q, k, v, **words).float(), atol=2e-3, rtol=1e-2)


def test_explain_speaks_of_the_call_that_runs(device):
    q = drawn(1, HEADS, KEYS, DIM)
    said = evoattn.explain(q, q, q, sinks=SINKS)
    assert said == evoattn.explain(q, q, q, return_lse=True)
