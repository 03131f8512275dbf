"""Keys in use and pages as peers get them: no NaN, no entry of a table that cannot be read, and a right answer."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from evoattn.correctness.reference import make_answer, make_inputs
from evoattn.model.problem import AttentionProblem
from evoattn.peers import flex
from evoattn.peers.table import PEERS, Peer, PeerRefused, fa3_peer, fa4_peer, peer_call
from evoattn.peers.variants import whole_keys

USED = AttentionProblem(3, 4, 2, 5, 70, 16, seqused="8:64")


def inputs(problem):
    tensors = make_inputs(problem, 1, "cpu")
    return tensors, make_answer(problem, tensors)


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mask": "causal_lower_right"},
        {"window": "9:2"},
        {"alibi": True},
        {"bias": "bs"},
        {"mask": "causal_upper_left"},
    ],
    ids=str,
)
@pytest.mark.slow
def test_sdpa_and_flex_attention_are_right(page, fields):
    problem = USED.with_(page=page, **fields)
    tensors, answer = inputs(problem)
    assert peer_call(PEERS["math"], problem, tensors, answer)().shape == problem.shape("o")
    flexible = Peer(lambda p, t: flex.make(p, t, compiler=lambda function: function), "torch")
    if problem.alibi or (page and problem.bias):
        with pytest.raises(PeerRefused, match="FlexAttention is not asked for slopes"):
            peer_call(flexible, problem, tensors, answer)
    else:
        assert peer_call(flexible, problem, tensors, answer)().shape == problem.shape("o")


def test_a_peer_without_pages_gathers_them_at_each_call():
    problem = USED.with_(page=16)
    tensors, _ = inputs(problem)
    keys = whole_keys(problem, tensors)
    (first, _), (second, _) = keys(), keys()
    assert first.shape == (3, 2, 70, 16) and torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    alone = whole_keys(USED, inputs(USED)[0])
    assert alone()[0].data_ptr() == alone()[0].data_ptr()


def with_kvcache(q, k_cache, v_cache, causal, num_splits, cache_seqlens, page_table=None, softmax_scale=None):
    """What FlashAttention 3's function of that name computes, `[batch, seqlen, heads, head_dim]` in and out."""
    assert num_splits == 0 and not k_cache.isnan().any() and not v_cache.isnan().any()
    if page_table is not None:
        assert page_table.dtype == torch.int32 and k_cache.shape[1] == 16 and k_cache.is_contiguous()
        k_cache, v_cache = (cache[page_table].flatten(1, 2) for cache in (k_cache, v_cache))
    out = torch.empty_like(q)
    for b, keys in enumerate(cache_seqlens.tolist()):
        parts = (t[b : b + 1].transpose(1, 2) for t in (q, k_cache[:, :keys], v_cache[:, :keys]))
        mask = torch.ones(q.shape[1], keys, dtype=torch.bool).tril(keys - q.shape[1]) if causal else None
        out[b] = scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    return out, None


def interface(name):
    return SimpleNamespace(flash_attn_with_kvcache=with_kvcache, CONFIG={"build_flags": {}})


@pytest.mark.parametrize("mask", ["full", "causal_lower_right"])
@pytest.mark.parametrize("page", [0, 16])
def test_flash_attention_3_gets_them_by_its_function_for_caches(mask, page):
    problem = USED.with_(mask=mask, page=page, layout="bshd")
    assert peer_call(fa3_peer(interface), problem, *inputs(problem))().shape == problem.shape("o")


@pytest.mark.parametrize("page", [0, 16])
def test_flash_attention_4_gets_them_by_its_function_for_several_lengths(page):
    def varlen(q, k, v, causal, seqused_k, page_table=None):
        return with_kvcache(q, k, v, causal, 0, seqused_k, page_table)

    problem = USED.with_(mask="causal_lower_right", page=page, layout="bshd")
    load = lambda name: SimpleNamespace(flash_attn_varlen_func=varlen)
    assert peer_call(fa4_peer(load), problem, *inputs(problem))().shape == problem.shape("o")


def test_what_flash_attention_does_not_take_is_said():
    upper = USED.with_(mask="causal_upper_left", seqlen_q=70)
    with pytest.raises(PeerRefused, match="causal_lower_right"):
        fa3_peer(interface).make(upper, inputs(upper)[0])
