"""`evoattn.flex_attention` in compiled code: one graph for all lengths, an op in place of torch's operator, and
gradients of captured tensors."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import evoattn
from benchmarks.calls.no_device import NoDevice
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.score_lines import Bias, Slopes
from evoattn.ops import block_masks, gradients, torch_answer
from evoattn.ops.arguments import BIAS, SLOPES
from evoattn.ops.call import Call
from evoattn.ops.choice import Refusal
from evoattn.ops.given import with_added
from evoattn.ops.runtime import Runtime, current
from tests.ops.fake_device import Pick, tensors
from tests.ops.test_flex_mods import by_torch


def known_good(problem, gpu):
    """A kernel that can be, without climbs."""
    for name in ("flash_wgmma", "backward_mma"):
        for config in load_space(name, gpu).starting_configs():
            if not registry.lookup(name).why_impossible(problem, config, gpu):
                return Pick(name, config, "a test's")
    return None


class ByFormula(Runtime):
    """Chooses as on an H100, and computes by torch's formula what kernels would."""

    def __init__(self, folder):
        super().__init__(NoDevice("h100"), known_good, folder)
        self.seen = []

    def attend(self, call):
        self.seen.append(call.blocks)
        out, lse = torch_answer.answer(replace(call, return_lse=True, out=None))
        return call.out.copy_(out), lse

    def gradients(self, given):
        self.seen.append(given.grads)
        return gradients.by_torch(given)


@pytest.fixture
def runtime(tmp_path):
    torch.compiler.reset()
    with current.use(ByFormula(tmp_path)) as made:
        yield made


def documents(rows, length):
    ids = torch.arange(rows) // length
    return create_block_mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), None, None, rows, rows, "cpu", 64)


@pytest.mark.slow
def test_one_graph_serves_all_lengths_and_has_gradients_of_captured_tensors(runtime):
    """Whole ones, parts and turned ones, whatever their values are; no kernel's name or graph is of a length."""
    torch.manual_seed(1)
    graphs, gate, slopes = [], torch.randn(2, 7, requires_grad=True), (torch.randn(2) / 50).requires_grad_()
    own = evoattn.Score("s + (k - q) * t[h]", t=slopes)

    def backend(module, inputs):
        graphs.append(module)
        return aot_eager(module, inputs)

    def summed(out, lse):
        return out.float().square().sum() + lse.sum()

    def layer(q, k, v, mask, bias, most):
        score_mod = lambda s, b, h, i, j: s * gate[h, 1] + bias[h, i - j + most]
        out, aux = evoattn.flex_attention(q, k, v, score_mod, mask, return_aux=AuxRequest(lse=True))
        return summed(out, aux.lse) + evoattn.attention(q, k, v, score=own).float().square().sum()

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    first = 0
    for length in (150, 250):
        q, k, v = tensors(1, 2, 2, length, length, dtype=torch.bfloat16)
        bias, mask = torch.randn(2, 2 * length, requires_grad=True), documents(length, 37)
        found = torch.autograd.grad(compiled(q, k, v, mask, bias, length), (gate, bias, slopes))
        first = first or len(graphs)
        score_mod = lambda s, b, h, i, j, bias=bias, most=length: s * gate[h, 1] + bias[h, i - j + most]
        expected = torch.autograd.grad(summed(*by_torch(Call(q, k, v), score_mod, mask)), (gate, bias))
        sloped = by_torch(Call(q, k, v), lambda s, b, h, i, j: s + (j - i) * slopes[h], None)[0]
        expected += torch.autograd.grad(sloped.square().sum(), slopes)
        for one, exact in zip(found, expected, strict=True):
            assert (one - exact).abs().max() < 0.02 * exact.abs().max()
    assert len(graphs) == first
    once = ["64x64:2/0/2", "", ("own_t",), ("own_t0", "own_t2")]
    assert runtime.seen == 2 * once


def test_what_is_added_to_scores_goes_by_its_name():
    """Of slopes and a bias whose sizes are known, beside lists too; a gradient of theirs is an expression's."""
    from evoattn.ops.custom_op import calls_of

    q, k, v = tensors(2, 4, 4, 64, 64, dtype=torch.bfloat16)
    slopes, bias = torch.rand(5), torch.randn(2, 64, 64).bfloat16()
    mask, whole = documents(64, 37).as_tuple(), (64, 64, *(None,) * 8, block_masks.WHOLE, block_masks.WHOLE, None)
    seen, every = lambda b, h, i, j: (i >= j) & (j < 60), torch_flex.noop_mask
    sloped = lambda s, b, h, i, j, t: s - t[h] * (i - j).abs()
    biased = lambda s, b, h, i, j, t: s + t[b, i, j]
    for score_mod, table, term, name in ((sloped, slopes, slopes[:4], SLOPES), (biased, bias, bias[:, None], BIAS)):
        for blocks, shown in ((whole, every), (mask, seen)):
            named, own = calls_of((q, k, v), score_mod, (*blocks[:-1], shown), 0.5, [table], [])
            assert torch.equal(named.term(name), term) and own.score.text and own.blocks == named.blocks
            assert named.score is None or (not named.score.text and not named.score.tensors)
        odd = torch.empty(table.numel() + 1, dtype=table.dtype)[1:].view(table.shape)
        added = Bias("t", "b") if name == BIAS else Slopes("t", 0, True)
        at_once = with_added(Call(q, k, v), added, {"t": odd})
        assert (at_once is None) == (name == BIAS)  # of a bias at such an address kernels would read a copy
        (own,) = calls_of((q, k, v), score_mod, (*whole[:-1], every), 0.5, [table.float().requires_grad_()], [])
        assert own.score.text and own.term(name) is None


def test_kernels_are_asked_for_what_is_added_and_for_the_tables_of_the_mask(runtime, monkeypatch):
    from evoattn.ops.custom_op import calls_of, why_no_kernel

    asked, words = [], ("alibi", "bias", "predicate", "tables")
    monkeypatch.setattr(runtime, "choose", lambda problem, gpu: asked.append(problem) or Refusal("none"))
    q, k, v = tensors(2, 4, 4, 64, 64, dtype=torch.bfloat16)
    slopes, bias, ids = torch.rand(4), torch.randn(2, 64, 64).bfloat16(), (torch.arange(64) // 37).int()
    seen = lambda b, h, i, j, ids: (ids[i] == ids[j]) & (i >= j)
    blocks = (*documents(64, 37).as_tuple()[:-1], seen)
    sloped = lambda s, b, h, i, j, t: s - t[h] * (i - j).abs()
    biased = lambda s, b, h, i, j, t: s + t[b, i, j]
    for score_mod, table in ((sloped, slopes), (biased, bias)):
        for call in calls_of((q, k, v), score_mod, blocks, 0.5, [table], [ids]):
            assert why_no_kernel(call) == "none"
    predicate, of_mask = "(t1[q]==t1[k])&(q>=k)", "t1:int32:64"
    assert [tuple(getattr(one, word) for word in words) for one in asked] == [
        (True, "", predicate, of_mask),
        (False, "", predicate, f"t0:fp32:4+{of_mask}"),
        (False, "bs", predicate, of_mask),
        (False, "", predicate, f"t0:bf16:2x64x64+{of_mask}"),
    ]


def test_lists_are_of_the_lengths_of_queries_and_keys(runtime):
    from evoattn.ops.custom_op import calls_of

    q, k, v = tensors(1, 2, 2, 100, 130, dtype=torch.bfloat16)
    mask = create_block_mask(lambda b, h, i, j: (i + j) % 3 > 0, None, None, 100, 130, "cpu", 64)
    (call,) = calls_of((q, k, v), lambda s, b, h, i, j: s, mask.as_tuple(), 0.5, [], [])
    assert call.blocks == "64x64:?"


def test_compiled_code_hands_torch_s_operator_all_that_it_was_given(monkeypatch):
    given = []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr("evoattn.ops.flex.refuse", lambda _: None)
    monkeypatch.setattr("evoattn.ops.flex.TORCH", lambda *words, **named: given.append((words, named)))
    options = {"BLOCK_M": 64}
    evoattn.flex_attention("q", "k", "v", "score", "mask", 0.5, True, True, options, return_aux="aux")
    ((words, named),) = given
    assert words == ("q", "k", "v", "score", "mask", 0.5, True, True)
    assert named["return_aux"] == "aux" and options.items() < named["kernel_options"].items()


@pytest.mark.slow
def test_other_calls_are_torch_s(runtime):
    """What is no expression, and calls by torch's name."""
    q, k, v = tensors(1, 2, 2, 20, 128, dtype=torch.float32)
    odd, plain = lambda s, b, h, i, j: torch.lgamma(s.abs() + 2), lambda s, b, h, i, j: s * 2

    def called(q, k, v):
        return evoattn.flex_attention(q, k, v, odd), torch_flex.flex_attention(q, k, v, plain)

    with evoattn.flex():
        found = torch.compile(called, backend="aot_eager", fullgraph=True)(q, k, v)
    for one, score_mod in zip(found, (odd, plain), strict=True):
        torch.testing.assert_close(one, by_torch(Call(q, k, v), score_mod, None)[0].float())
    assert not runtime.seen
