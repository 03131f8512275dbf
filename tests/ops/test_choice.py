"""Where the picked kernel cannot serve a call as its tensors lie, the next one that can is taken."""

import dataclasses

import pytest
import torch

import evoattn
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.ops.call import StridedProblem
from evoattn.ops.choice import Choice, Refusal, choose
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.torch_answer import NoKernel
from evoattn.portfolio.pick import next_picks, pick
from tests.ops.fake_device import WGMMA, CacheDevice, Pick, build, near, split_kv_pick

GPU = GPUS["h100"]
APART = 8
"""Elements between batches of keys beside whole rows: tensor maps of keys in use cannot step over them."""


def wgmma(problem, gpu):
    return Pick("flash_wgmma", load_space("flash_wgmma", gpu).make_config(WGMMA))


def both(problem, gpu):
    return [wgmma(problem, gpu), split_kv_pick(problem, gpu)]


def cache_call(batch=3, keys=70, dim=64):
    """Query, key, value and keys in use, K and V with APART elements between batches."""
    made = torch.Generator().manual_seed(4)
    q = torch.randn(batch, 4, 2, dim, generator=made).half()
    step = 2 * keys * dim + APART
    k, v = (
        torch.randn(batch * step, generator=made).half().as_strided((batch, 2, keys, dim), (step, keys * dim, dim, 1))
        for _ in "kv"
    )
    return q, k, v, torch.tensor([keys, 31, 1], dtype=torch.int32)


def attend(strict=False):
    q, k, v, used = cache_call()
    return evoattn.attention(q, k, v, enable_gqa=True, seqused_k=used, strict=strict)


def test_the_next_kernel_that_can_serve_the_strides_runs(tmp_path):
    device = CacheDevice()
    expected = attend()
    with current.use(Runtime(device, wgmma, tmp_path, build, both)):
        assert near(attend(strict=True), expected)
        q, k, v, used = cache_call()
        said = evoattn.explain(q, k, v, enable_gqa=True, seqused_k=used)
    assert said.startswith("split_kv ") and "flash_wgmma" in said and "whole rows apart" in said
    assert device.launches


@pytest.mark.parametrize("others", [None, lambda problem, gpu: [], lambda problem, gpu: [wgmma(problem, gpu)]])
def test_where_none_can_the_first_ones_reason_is_told(tmp_path, others):
    said = pytest.raises(NoKernel, match=r"flash_wgmma .* cannot serve this call: .* whole rows apart")
    with current.use(Runtime(CacheDevice(), wgmma, tmp_path, build, others)), said:
        attend(strict=True)


def strided_cache(batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim):
    """What the op asks for a cache as in `cache_call`."""
    sizes = batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim
    problem = AttentionProblem(*sizes, seqused=f"0:{seqlen_k}")
    strides = tuple(problem.strides(t) for t in "qkvo")
    apart = tuple((s[0] + APART, *s[1:]) if i in (1, 2) else s for i, s in enumerate(strides))
    return StridedProblem(**problem.to_dict(), strides_of=apart)


def test_an_estimated_kernel_is_taken_where_these_are_allowed_alone():
    problem = strided_cache(3, 4, 2, 2, 70, 64)

    def guesses(problem, gpu):
        return [dataclasses.replace(other, estimated=True) for other in both(problem, gpu)]

    assert isinstance(choose(problem, GPU, wgmma, False, guesses), Refusal)
    allowed = choose(problem, GPU, wgmma, True, guesses)
    assert isinstance(allowed, Choice) and allowed.family.name == "split_kv"


def test_others_that_fail_cost_a_warning():
    def fails(problem, gpu):
        raise ValueError("the portfolio is damaged")

    with pytest.warns(RuntimeWarning, match="the portfolio is damaged"):
        assert isinstance(choose(strided_cache(3, 4, 2, 2, 70, 64), GPU, wgmma, False, fails), Refusal)


def test_the_portfolio_has_a_kernel_for_such_strides():
    """Of 64 queries over a cache: its first kernels are flash_wgmma's, and the others of the class need no tensor
    maps."""
    problem = strided_cache(4, 32, 8, 64, 4096, 128)
    first = pick(problem.as_searched, GPU)
    assert first.family == "flash_wgmma"
    assert isinstance(choose(problem, GPU, pick, True), Refusal)
    chosen = choose(problem, GPU, pick, True, next_picks)
    assert isinstance(chosen, Choice) and chosen.family.name == "split_kv"
    able = [other for other in next_picks(problem.as_searched, GPU) if other.family == "split_kv"]
    assert chosen.config == able[0].config, "the most promising one"
    assert all(other.estimated == first.estimated for other in able)
