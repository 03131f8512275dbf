"""Which calls of `evoattn.flash_attn` reach kernels: on the fake device, whose answers are those of the launches."""

import itertools

import pytest
import torch

from evoattn import flash_attn
from evoattn.integrations.flash_attn import version_2
from evoattn.integrations.flash_attn.sequences import classes
from evoattn.ops.runtime import current
from tests.integrations.flash_attn_formula import Asked, drawn
from tests.ops.fake_device import CacheDevice, fake_runtime, split_kv_pick

HEADS, KV_HEADS, DIM = 4, 2, 64


def near(one, other):
    return torch.allclose(one.double(), other.double(), atol=4e-3, rtol=4e-3)


def half(*shape, seed):
    return drawn(*shape, seed=seed, dtype=torch.float16)


def once(device, call):
    """The call's answer and its one launch, after one in which the kernel is loaded and checked."""
    call()
    device.launches.clear()
    answer = call()
    (launch,) = device.launches
    return answer, launch


@pytest.fixture
def cache_device(tmp_path):
    """Kernels for keys in use and pages."""
    fake = CacheDevice()
    with current.use(fake_runtime(fake, tmp_path, split_kv_pick)):
        yield fake


WORDS = [
    {},
    {"causal": True},
    {"window_size": (11, 3)},
    {"softcap": 4.0, "causal": True},
    {"softmax_scale": 0.2},
    {"alibi_slopes": torch.linspace(0.1, 0.5, HEADS)},
    {"alibi_slopes": torch.rand(2, HEADS)},
    {"s_aux": torch.rand(HEADS)},
    {"attention_chunk": 9, "causal": True},
    {"window_size": (20, -4)},
]


@pytest.mark.parametrize("words", WORDS)
def test_padded_tensors(device, words):
    """As views: their strides are those of the caller."""
    q, k, v = half(2, 17, HEADS, DIM, seed=1), half(2, 21, KV_HEADS, DIM, seed=2), half(2, 21, KV_HEADS, DIM, seed=3)
    (out, lse), launch = once(device, lambda: flash_attn.flash_attn_func(q, k, v, **words, return_attn_probs=True))
    assert launch.addresses[:3] == (q.data_ptr(), k.data_ptr(), v.data_ptr()) and out.is_contiguous()
    for b in range(2):
        expected, sums = Asked(**words).of(q[b], k[b], v[b], b)
        assert near(out[b], expected) and near(lse[b], sums)


def test_version_2(device):
    q, k, v = (half(2, 17, HEADS, DIM, seed=seed) for seed in (1, 2, 3))
    out, _ = once(device, lambda: version_2.flash_attn_func(q, k, v, 0.0, None, True))
    assert near(out, flash_attn.flash_attn_func(q, k, v, None, True))


@pytest.mark.parametrize("words", WORDS[:3] + WORDS[7:9])
@pytest.mark.parametrize("used", [False, True])
def test_packed_sequences(device, words, used):
    queries, keys, room = [5, 0, 12], [7, 3, 20], 2 if used else 0
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(n + room for n in one)]).int() for one in (queries, keys))
    q = half(int(cu_q[-1]), HEADS, DIM, seed=1)
    k, v = (half(int(cu_k[-1]), KV_HEADS, DIM, seed=seed) for seed in (2, 3))
    given = {}
    if used:
        given = dict(seqused_q=torch.tensor(queries).int(), seqused_k=torch.tensor(keys).int())
    out, launch = once(device, lambda: flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 14, 22, **given, **words))
    assert launch.addresses[:3] == (q.data_ptr(), k.data_ptr(), v.data_ptr())
    for i, (some, seen) in enumerate(zip(queries, keys)):
        rows, columns = slice(cu_q[i], cu_q[i] + some), slice(cu_k[i], cu_k[i] + seen)
        assert near(out[rows], Asked(**words).of(q[rows], k[columns], v[columns], i)[0])


USED = [9, 0, 48]


@pytest.mark.parametrize("page", [0, 16, 32, 512])
@pytest.mark.parametrize("row", [False, True])
@pytest.mark.parametrize("appended", [False, True])
def test_caches(cache_device, page, row, appended):
    """Without a copy, also where pages are larger than those of kernels, and where sequences have other rows."""
    draw, room = torch.Generator().manual_seed(1), max(page, 64)
    k_cache, v_cache = (half(5, room, KV_HEADS, DIM, seed=seed) for seed in (1, 2))
    words, order = {}, torch.arange(3)
    if row:
        order = torch.randperm(5, generator=draw)[:3]
        words["cache_batch_idx"] = order.int()
    if page:
        table = torch.randperm(5 * (room // page), generator=draw).view(5, -1)
        words["page_table"] = (table if row else table[:3]).int()
        k_cache, v_cache = (t.view(-1, page, KV_HEADS, DIM) for t in (k_cache, v_cache))
        own = lambda t, b: t[table[order[b]]].flatten(0, 1)
    else:
        own = lambda t, b: t[order[b]]
        if not row:
            k_cache, v_cache = k_cache[:3], v_cache[:3]
    q, new = half(3, 2, HEADS, DIM, seed=3), [half(3, 2, KV_HEADS, DIM, seed=seed) for seed in (4, 5)]
    words |= dict(cache_seqlens=torch.tensor(USED).int(), causal=True)
    given = new if appended else ()
    out, _ = once(cache_device, lambda: flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, *given, **words))
    for b, count in enumerate(USED):
        count += 2 * appended
        k, v = (own(t, b)[:count] for t in (k_cache, v_cache))
        assert near(out[b], Asked(causal=True).of(q[b], k, v)[0])
        if appended:
            assert torch.equal(k[-2:], new[0][b]) and torch.equal(v[-2:], new[1][b])


def test_leftpad_and_odd_rows_are_packed_sequences(device):
    k_cache, v_cache = (half(5, 37, KV_HEADS, DIM, seed=seed) for seed in (1, 2))
    order, pad, q = torch.tensor([4, 0, 2]), torch.tensor([3, 0, 30]), half(3, 2, HEADS, DIM, seed=3)
    words = dict(cache_seqlens=torch.tensor(USED).clamp(max=37).int(), cache_batch_idx=order.int())
    words |= dict(cache_leftpad=pad.int(), causal=True)
    out, launch = once(device, lambda: flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **words))
    assert launch.addresses[1] == k_cache.data_ptr()
    for b, count in enumerate(USED):
        k, v = (t[order[b], pad[b] : min(count, 37)] for t in (k_cache, v_cache))
        assert near(out[b], Asked(causal=True).of(q[b], k, v)[0])


def test_packed_queries_over_a_plain_cache(device):
    k_cache, v_cache = (half(3, 64, KV_HEADS, DIM, seed=seed) for seed in (1, 2))
    bounds, q = torch.tensor([0, 4, 4, 9]).int(), half(9, HEADS, DIM, seed=3)
    words = dict(cache_seqlens=torch.tensor(USED).int(), cu_seqlens_q=bounds, max_seqlen_q=5, causal=True)
    out, _ = once(device, lambda: flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **words))
    for b, count in enumerate(USED):
        some = slice(bounds[b], bounds[b + 1])
        assert near(out[some], Asked(causal=True).of(q[some], k_cache[b, :count], v_cache[b, :count])[0])


@pytest.mark.parametrize("queries", [[2, 0, 3], [1, 1, 1], [1, 40, 1], [1, 60, 20] + [1] * 9])
@pytest.mark.parametrize("at_once", [True, False])
def test_packed_queries_over_pages(tmp_path, queries, at_once):
    """In one launch, or where no kernel takes both, in one for each class of lengths."""
    pages = [half(4 * len(queries), 16, KV_HEADS, DIM, seed=seed) for seed in (1, 2)]
    table = torch.randperm(4 * len(queries), generator=torch.Generator().manual_seed(1)).view(-1, 4)
    bounds = torch.tensor([0, *itertools.accumulate(queries)]).int()
    q, used = half(int(bounds[-1]), HEADS, DIM, seed=3), [64, 60, 33] + [7] * (len(queries) - 3)
    words = dict(seqused_k=torch.tensor(used).int(), page_table=table.int(), causal=True)
    cache_device = CacheDevice()

    def pick(problem, gpu):
        return split_kv_pick(problem, gpu) if at_once or not problem.varlen else None

    def call():
        return flash_attn.flash_attn_varlen_func(q, *pages, bounds, None, max(queries), 64, **words)

    with current.use(fake_runtime(cache_device, tmp_path, pick)):
        call()
        cache_device.launches.clear()
        out = call()
    assert len(cache_device.launches) == (1 if at_once else len(classes(len(q), len(queries), max(queries))))
    for b, count in enumerate(used):
        some = slice(bounds[b], bounds[b + 1])
        k, v = (t[table[b]].flatten(0, 1)[:count] for t in pages)
        assert near(out[some], Asked(causal=True).of(q[some], k, v)[0])


def test_a_latent_cache_is_not_copied(device):
    """V in front of K in one tensor, as DeepSeek's cache lies: kernels read each key once."""
    latent = half(2, 40, 1, 128 + 64, seed=1)
    q, qv = half(2, 3, HEADS, 64, seed=2), half(2, 3, HEADS, 128, seed=3)
    v_cache, k_cache = latent[..., :128], latent[..., 128:]
    out, launch = once(device, lambda: flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, qv=qv))
    assert launch.addresses[1] == latent.data_ptr()
    for b in range(2):
        assert near(out[b], Asked().of(q[b], k_cache[b], v_cache[b], qv=qv[b])[0])


@pytest.mark.parametrize("lse", [False, True])
def test_a_wide_v_is_served_in_parts(device, lse):
    """Columns that kernels take at once, then the rest, of a packed call too."""
    q, k, v = half(2, 17, HEADS, DIM, seed=1), half(2, 21, KV_HEADS, DIM, seed=2), half(2, 21, KV_HEADS, 320, seed=3)
    answer = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=lse)
    device.launches.clear()
    flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=lse)
    assert len(device.launches) == 2
    bounds = torch.arange(3).int()
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    packed = flash_attn.flash_attn_varlen_func(*flat, bounds * 17, bounds * 21, 17, 21, causal=True)
    for b in range(2):
        expected, sums = Asked(causal=True).of(q[b], k[b], v[b])
        assert near(answer[0][b] if lse else answer[b], expected) and near(packed.unflatten(0, (2, 17))[b], expected)
        assert not lse or near(answer[1][b], sums)
