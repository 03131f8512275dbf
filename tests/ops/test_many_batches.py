"""More batches than a grid of CUDA has, as of windows of images: in parts, by kernels where these take the parts."""

import pytest
import torch

import evoattn
from evoattn.ops import torch_answer
from evoattn.ops.runtime import current
from tests.ops.fake_backward import TrainingDevice, pick_either, training_runtime
from tests.ops.fake_device import near, tensors

MOST, BATCH = 3, 7
HEADS, QUERIES, KEYS = 4, 37, 45


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).half()


CALLS = {
    "plain": {},
    "a log-sum-exp": dict(return_lse=True, is_causal=True),
    "a bias for all": dict(bias=drawn(1, HEADS, QUERIES, KEYS)),
    "a bias of each": dict(bias=drawn(BATCH, 1, QUERIES, KEYS), sinks=drawn(HEADS)),
    "a bias of three dimensions": dict(bias=drawn(BATCH, QUERIES, KEYS)[:HEADS]),
    "slopes of as many heads": dict(alibi_slopes=torch.rand(HEADS), window=(9, 9)),
    "keys in use": dict(seqused_k=torch.tensor([45, 1, 0, 17, 30, 44, 2]).int()),
}


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def device(request, tmp_path, monkeypatch):
    fake = TrainingDevice()
    monkeypatch.setattr(torch_answer, "MOST_BATCHES", MOST)
    few = lambda problem, gpu: pick_either(problem, gpu) if problem.batch <= MOST and request.param else None
    with current.use(training_runtime(fake, tmp_path, few)):
        yield fake


def of_each(q, k, v, words):
    """One batch after another, each alone."""
    made = []
    for b in range(len(q)):
        one = slice(b, b + 1)
        of_batch = lambda name, term: name == "seqused_k" or (name == "bias" and term.dim() == 4 and len(term) > 1)
        own = {name: term[one] if of_batch(name, term) else term for name, term in words.items()}
        made.append(evoattn.attention(q[one], k[one], v[one], enable_gqa=True, **own))
    return made


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", CALLS)
def test_the_answer_is_that_of_each_batch(device, name, layout):
    q, k, v = tensors(batch=BATCH, heads=HEADS, kv_heads=HEADS, seqlen_q=QUERIES, seqlen_k=KEYS, layout=layout)
    words = CALLS[name]
    expected = of_each(q, k, v, words)
    device.launches.clear()
    out = evoattn.attention(q, k, v, **words)
    assert len(device.launches) in (0, 3)
    if "return_lse" in words:
        out, lse = out
        expected, sums = zip(*expected, strict=True)
        assert torch.allclose(lse, torch.cat(sums), atol=1e-3)
    assert near(out, torch.cat(expected)) and out.stride() == q.stride()
    taken = torch.empty_like(q)
    answer = evoattn.attention(q, k, v, out=taken, **words)
    assert (answer[0] if "return_lse" in words else answer) is taken and torch.equal(taken, out)


@pytest.mark.parametrize("order", [(1, 2, 0, 3), (1, 0, 2, 3), (0, 2, 1, 3)])
def test_the_answer_lies_as_query_does(device, order):
    """Whatever the order of dimensions in memory: of sequences first, of heads first."""
    shape = BATCH, HEADS, QUERIES, 64
    q = torch.empty([shape[dim] for dim in order]).normal_().half().permute([order.index(dim) for dim in range(4)])
    out = evoattn.attention(q, q, q)
    assert out.stride() == q.stride() and near(out, torch.cat(of_each(q, q, q, {})))


@pytest.mark.parametrize("name", ["plain", "a bias for all", "a bias of each"])
def test_gradients_are_those_of_all(device, name):
    words = {term: value.clone().requires_grad_() for term, value in CALLS[name].items()}
    mine = [one.requires_grad_() for one in tensors(batch=BATCH, heads=HEADS, kv_heads=HEADS)]
    leaves, grad = [*mine, *words.values()], torch.randn(mine[0].shape)
    expected = torch.autograd.grad(torch.cat(of_each(*mine, words)).float(), leaves, grad)
    device.backwards.clear()
    found = torch.autograd.grad(evoattn.attention(*mine, **words).float(), leaves, grad)
    assert len(device.backwards) in (0, 3)
    assert all(torch.allclose(one, two, atol=0.02, rtol=0.01) for one, two in zip(found, expected, strict=True))


def test_what_no_part_serves_is_refused_and_explained(device):
    q, k, v = tensors(batch=BATCH, heads=HEADS, kv_heads=HEADS, dtype=torch.float32)
    with pytest.raises(evoattn.NoKernel):
        evoattn.attention(q, k, v, strict=True)
    assert evoattn.explain(q, k, v).startswith("SDPA runs")


def test_explain_names_the_kernel_of_a_part(device):
    q, k, v = tensors(batch=BATCH, heads=HEADS, kv_heads=HEADS)
    evoattn.attention(q, k, v)
    assert evoattn.explain(q, k, v).startswith("flash_wgmma" if device.launches else "SDPA runs")
