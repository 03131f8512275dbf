"""Keys in use, pages and packed sequences as peers get them: no NaN, no copy, no entry of a table that cannot be read,
and a right answer; what they would compute otherwise is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from evoattn.correctness.reference import make_answer, make_inputs
from evoattn.model.problem import AttentionProblem
from evoattn.peers import flex, torch_varlen
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


PACKED = AttentionProblem(3, 4, 2, 37, 53, 16, varlen="37+1+20/53+9+1", mask="causal_lower_right", layout="bshd")


def attend(q, k, v, starts_q, starts_k, causal, scale):
    """A sequence at a time, `[total, heads, head_dim]` in and out."""
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    out, ends_q, ends_k = torch.empty_like(q), starts_q.tolist(), starts_k.tolist()
    for first, end, first_k, end_k in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        parts = [t.transpose(0, 1) for t in (q[first:end], k[first_k:end_k], v[first_k:end_k])]
        mask = torch.ones(end - first, end_k - first_k, dtype=torch.bool)
        mask = mask.tril(end_k - first_k - end + first) if causal else mask
        part = scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1)
        out[first:end] = part.masked_fill(~mask.any(-1)[:, None, None], 0)
    return out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False, num_splits=1
):
    """What FlashAttention 3's function of that name computes."""
    assert (max_seqlen_q, max_seqlen_k, num_splits) == (37, 53, 0) and cu_seqlens_q.dtype == torch.int32
    return attend(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale)


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """Torch's since 2.11."""
    assert (max_q, max_k, enable_gqa) == (37, 53, True) and window_size in ((-1, 0), (-1, -1))
    return attend(query, key, value, cu_seq_q, cu_seq_k, window_size[1] == 0, scale)


def older_varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    """Torch's of 2.10."""
    return attend(query, key, value, cu_seq_q, cu_seq_k, is_causal, None)


def load_fa3(name):
    if name != "flash_attn_interface":
        raise ModuleNotFoundError(f"No module named '{name}'")
    return SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_func=None)


def torch_peer(function):
    return Peer(lambda problem, tensors: torch_varlen.make(problem, tensors, lambda: function), "torch")


@pytest.mark.parametrize("mask", ["causal_lower_right", "full"])
@pytest.mark.parametrize("peer", [fa3_peer(load_fa3), torch_peer(varlen_attn), torch_peer(older_varlen_attn)])
def test_they_are_right(peer, mask):
    problem = PACKED.with_(mask=mask)
    tensors = make_inputs(problem, 1, "cpu")
    out = peer_call(peer, problem, tensors, make_answer(problem, tensors))()
    assert out.shape == problem.shape("o")


@pytest.mark.parametrize(
    "raised, words",
    [
        (torch.cuda.OutOfMemoryError("2 GiB"), "It needs more device memory than is free."),
        (KeyError("q"), "'q'"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_peer_that_fails_is_none(raised, words):
    def fails(problem, tensors):
        raise raised

    peer = replace(PEERS["math"], make=fails)
    with pytest.raises(PeerRefused, match=words):
        peer_call(peer, PACKED, {}, {})


@pytest.mark.parametrize(
    "peer, problem, words",
    [
        (fa3_peer(load_fa3), PACKED.with_(mask="causal_upper_left"), "another one than this"),
        (torch_peer(varlen_attn), PACKED.with_(mask="causal_upper_left"), "another one than this"),
        (torch_peer(varlen_attn), PACKED.with_(softcap=3.0), "varlen_attn has no softcap"),
        (torch_peer(varlen_attn), PACKED.with_(varlen=""), "packed sequences only"),
        (torch_peer(older_varlen_attn), PACKED.with_(window="9:0"), "has no windows"),
        (torch_peer(older_varlen_attn), PACKED.with_(scale=0.5), "has no scale"),
        (PEERS["math"], PACKED, "SDPA has no varlen"),
        (PEERS["flex"], PACKED.with_(alibi=True), "slopes or expressions of different lengths"),
    ],
)
def test_what_they_do_not_compute_is_refused(peer, problem, words):
    tensors = make_inputs(problem, 1, "cpu")
    with pytest.raises(PeerRefused, match=words):
        peer_call(peer, problem, tensors, None)
