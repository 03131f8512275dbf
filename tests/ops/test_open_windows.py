"""Windows that hide no key run the kernels of calls without one, and windows that hide one do not."""

import sys

import pytest
import torch

import evoattn
from evoattn.ops.runtime import Runtime, current
from tests.ops.fake_device import CacheDevice, fake_runtime, near, reference, split_kv_pick, tensors

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("lengths", [(37, 45), (45, 37), (37, 37)], ids=str)
@pytest.mark.parametrize("causal", [None, "upper_left", "lower_right"])
@pytest.mark.parametrize("window", [(-1, -1), [-1, -1], (44, 44), (-1, 44), (10**9, -1)], ids=str)
def test_a_window_that_hides_nothing(device, lengths, causal, window):
    q, k, v = tensors(kv_heads=4, seqlen_q=lengths[0], seqlen_k=lengths[1])
    words = dict(causal=causal)
    with evoattn.capture() as shapes:
        answer = evoattn.attention(q, k, v, **words, window=window, strict=True)
    assert torch.equal(answer, evoattn.attention(q, k, v, **words, strict=True))
    assert evoattn.explain(q, k, v, **words, window=window) == evoattn.explain(q, k, v, **words)
    assert not shapes.entries[0].problem.window


@pytest.mark.parametrize("lengths", [(37, 45), (45, 37)], ids=str)
@pytest.mark.parametrize("window", [(43, 44), (44, 43), (43, -1), (-1, 0)], ids=str)
def test_a_window_that_may_hide_a_key(device, lengths, window):
    q, k, v = tensors(kv_heads=4, seqlen_q=lengths[0], seqlen_k=lengths[1])
    with evoattn.capture() as shapes:
        answer = evoattn.attention(q, k, v, window=window, strict=True)
    assert shapes.entries[0].problem.window
    middle = torch.arange(lengths[0])[:, None] + lengths[1] - lengths[0]
    keys = torch.arange(lengths[1])
    past, ahead = (10**6 if side < 0 else side for side in window)
    seen = (keys >= middle - past) & (keys <= middle + ahead)
    expected = reference(q, k, v, attn_mask=seen).masked_fill(~seen.any(1)[:, None], 0)
    assert near(answer, expected)


@pytest.mark.parametrize("words", [{}, {"softcap": 3.0}], ids=["plain", "a soft cap"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_side_that_no_number_of_keys_reaches_is_open(tmp_path, is_causal, words):
    """Where torch answers as well: places plus such a side are beyond int64."""
    q, k, v = tensors(kv_heads=4)
    words = dict(words, is_causal=is_causal)
    with current.use(Runtime(None, current.best_known, tmp_path)):
        expected = evoattn.attention(q, k, v, **words)
        for window in ((sys.maxsize, sys.maxsize), (-1, sys.maxsize), (2**70, 2**70)):
            assert near(evoattn.attention(q, k, v, window=window, **words), expected)


def test_the_last_side_counts_under_a_causal_mask_no_more(device):
    """It is 0 there, whatever was asked for."""
    q, k, v = tensors(kv_heads=4)
    plain = evoattn.explain(q, k, v, is_causal=True)
    assert evoattn.explain(q, k, v, is_causal=True, window=(44, 3)) == plain
    assert evoattn.attention(q, k, v, is_causal=True, window=(44, 3), strict=True).equal(
        evoattn.attention(q, k, v, is_causal=True, strict=True)
    )


def test_pages_and_packed_sequences(tmp_path, device):
    q, starts = torch.randn(12, 4, 64).half(), torch.tensor([0, 5, 12], dtype=torch.int32)
    words = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=7, max_seqlen_k=7)
    for window in ((-1, -1), (11, 11)):
        assert evoattn.explain(q, q, q, **words, window=window) == evoattn.explain(q, q, q, **words)
    query, cache = torch.randn(2, 1, 4, 64).half(), torch.randn(6, 16, 4, 64).half()
    table, used = torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([40, 9], dtype=torch.int32)
    with current.use(fake_runtime(CacheDevice(), tmp_path, split_kv_pick)):
        expected = evoattn.attention_paged(query, cache, cache, table, used, strict=True)
        for window in ((-1, -1), (47, 0)):
            answer = evoattn.attention_paged(query, cache, cache, table, used, causal=True, window=window, strict=True)
            assert torch.equal(answer, expected)
