"""`evoattn.flash_attn` on padded and packed tensors, against the formula in float64; torch computes, on a CPU."""

import itertools

import pytest
import torch

import evoattn
from evoattn import flash_attn
from evoattn.integrations.flash_attn import version_2
from evoattn.integrations.flash_attn.cache import Cache
from tests.integrations.flash_attn_formula import Asked, drawn

HEADS, KV_HEADS, DIM = 4, 2, 16
SLOPES, SLOPES_OF_BATCH = torch.linspace(0.1, 0.9, HEADS), torch.rand(3, HEADS)
SINKS = torch.linspace(-1, 2, HEADS)
ASKED = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (5, 2)},
    "open past": {"window_size": (-1, 3)},
    "open ahead": {"window_size": (4, -1)},
    "causal window": {"causal": True, "window_size": (6, 6)},
    "window behind the diagonal": {"window_size": (9, -3)},
    "window before the diagonal": {"window_size": (-2, 8)},
    "window of nothing": {"window_size": (0, 0)},
    "chunk": {"attention_chunk": 7},
    "causal chunk": {"causal": True, "attention_chunk": 5},
    "chunks of one": {"attention_chunk": 1},
    "softcap": {"softcap": 3.0},
    "slopes": {"alibi_slopes": SLOPES},
    "slopes of each batch": {"alibi_slopes": SLOPES_OF_BATCH, "causal": True},
    "sinks": {"s_aux": SINKS},
    "all": {
        "softmax_scale": 0.2,
        "causal": True,
        "window_size": (11, 0),
        "attention_chunk": 8,
        "softcap": 5.0,
        "alibi_slopes": SLOPES_OF_BATCH,
        "s_aux": SINKS,
    },
}
LENGTHS = [(1, 33), (33, 33), (20, 9), (9, 30)]


def tensors(seqlen_q, seqlen_k, batch=3, value_dim=DIM, dtype=torch.float64):
    q = drawn(batch, seqlen_q, HEADS, DIM, seed=1, dtype=dtype)
    k = drawn(batch, seqlen_k, KV_HEADS, DIM, seed=2, dtype=dtype)
    return q, k, drawn(batch, seqlen_k, KV_HEADS, value_dim, seed=3, dtype=dtype)


def near(one, other, tolerance=1e-6):
    return torch.allclose(one.double(), other.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("name", "lengths"), list(itertools.product(ASKED, LENGTHS)))
def test_padded(name, lengths):
    asked = Asked(**ASKED[name])
    q, k, v = tensors(*lengths, value_dim=24)
    out, lse = flash_attn.flash_attn_func(q, k, v, **ASKED[name], return_attn_probs=True)
    for b in range(len(q)):
        expected, sums = asked.of(q[b], k[b], v[b], b)
        assert near(out[b], expected) and near(lse[b], sums)
    assert near(flash_attn.flash_attn_func(q, k, v, **ASKED[name]), out)


@pytest.mark.parametrize("name", ASKED)
def test_gradients_of_padded(name):
    if name == "slopes of each batch":
        pytest.skip("covered by all")
    asked = Asked(**ASKED[name])
    inputs = [t.requires_grad_() for t in tensors(13, 17)]
    given = drawn(3, 13, HEADS, DIM, seed=5)
    found = torch.autograd.grad(flash_attn.flash_attn_func(*inputs, **ASKED[name]), inputs, given)
    out = torch.stack([asked.of(*(t[b] for t in inputs), b)[0] for b in range(3)])
    for mine, theirs in zip(found, torch.autograd.grad(out, inputs, given), strict=True):
        assert near(mine, theirs)


@pytest.mark.parametrize("words", [{}, {"causal": True, "softmax_scale": 0.3}])
def test_widths_that_kernels_do_not_read(words):
    """Copied into wider rows, whose zeros change neither the scale nor a gradient."""
    q, k, v = (drawn(2, 9, HEADS, width, seed=width).requires_grad_() for width in (11, 11, 13))
    out, lse = flash_attn.flash_attn_func(q, k, v, **words, return_attn_probs=True)
    given = drawn(2, 9, HEADS, 13, seed=5)
    expected, sums = zip(*(Asked(**words).of(q[b], k[b], v[b], b) for b in range(2)), strict=True)
    assert out.shape == given.shape and near(out, torch.stack(expected)) and near(lse, torch.stack(sums))
    found = torch.autograd.grad(out, (q, k, v), given)
    for mine, theirs in zip(found, torch.autograd.grad(torch.stack(expected), (q, k, v), given), strict=True):
        assert mine.shape == theirs.shape and near(mine, theirs)
    with pytest.raises(RuntimeError):  # wider rows of both would be as wide
        flash_attn.flash_attn_func(q, drawn(2, 9, HEADS, 13, seed=1), v, **words)


QUERIES, KEYS = [3, 0, 17, 1], [5, 4, 23, 0]


def starts(lengths, gaps=(0, 0, 0, 0)):
    rooms = torch.tensor([a + b for a, b in zip(lengths, gaps, strict=True)])
    return torch.cat((torch.zeros(1), rooms.cumsum(0))).int()


def packed(asked, q, k, v, cu_q=None, cu_k=None):
    """(rows, output, log-sum-exp) of each sequence."""
    cu_q, cu_k = starts(QUERIES) if cu_q is None else cu_q, starts(KEYS) if cu_k is None else cu_k
    for i, (some, seen) in enumerate(zip(QUERIES, KEYS, strict=True)):
        rows, columns = slice(int(cu_q[i]), int(cu_q[i]) + some), slice(int(cu_k[i]), int(cu_k[i]) + seen)
        yield rows, *asked.of(q[rows], k[columns], v[columns], i)


def of_four(words):
    return words | {"alibi_slopes": torch.rand(4, HEADS)} if "alibi_slopes" in words else words


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("used", ["neither", "keys", "queries", "both"])
def test_packed(name, used):
    """With room between sequences, of which nothing may be read or change an answer."""
    words = of_four(ASKED[name])
    gaps_q = (2, 1, 0, 3) if used in ("queries", "both") else (0,) * 4
    gaps_k = (1, 2, 3, 0) if used in ("keys", "both") else (0,) * 4
    cu_q, cu_k = starts(QUERIES, gaps_q), starts(KEYS, gaps_k)
    q = drawn(int(cu_q[-1]), HEADS, DIM, seed=1)
    k, v = (drawn(int(cu_k[-1]), KV_HEADS, DIM, seed=seed) for seed in (2, 3))
    given = {}
    if any(gaps_q):
        given["seqused_q"] = torch.tensor(QUERIES).int()
    if any(gaps_k):
        given["seqused_k"] = torch.tensor(KEYS).int()
    longest = max(a + b for a, b in zip(QUERIES, gaps_q)), max(a + b for a, b in zip(KEYS, gaps_k))
    for tensor in (k, v):
        for i, some in enumerate(KEYS):
            tensor[cu_k[i] + some : cu_k[i + 1]] = torch.nan
    out, lse = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, *longest, **given, **words, return_attn_probs=True
    )
    assert lse.shape == (HEADS, len(q))
    for rows, expected, sums in packed(Asked(**words), q, k, v, cu_q=cu_q, cu_k=cu_k):
        assert near(out[rows], expected) and near(lse[:, rows], sums)
    plain = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, **given, **words)
    for rows, expected, _ in packed(Asked(**words), q, k, v, cu_q=cu_q, cu_k=cu_k):
        assert near(plain[rows], expected)
    if any(gaps_q):
        unused = torch.ones(len(q), dtype=torch.bool)
        for i, some in enumerate(QUERIES):
            unused[cu_q[i] : cu_q[i] + some] = False
        assert not plain[unused].any()


@pytest.mark.parametrize("name", ["plain", "causal", "all", "causal chunk"])
def test_gradients_of_packed(name):
    words = of_four(ASKED[name])
    cu_q, cu_k = starts(QUERIES, (2, 1, 0, 3)), starts(KEYS, (1, 2, 3, 0))
    inputs = [drawn(int(cu_q[-1]), HEADS, DIM, seed=1), *(drawn(int(cu_k[-1]), KV_HEADS, DIM, seed=s) for s in (2, 3))]
    for tensor, cu, lengths in zip(inputs, (cu_q, cu_k, cu_k), (QUERIES, KEYS, KEYS)):
        for i, some in enumerate(lengths):
            tensor[cu[i] + some : cu[i + 1]] = torch.nan
    inputs = [t.requires_grad_() for t in inputs]
    used = dict(seqused_q=torch.tensor(QUERIES).int(), seqused_k=torch.tensor(KEYS).int())
    out = flash_attn.flash_attn_varlen_func(*inputs, cu_q, cu_k, 17, 26, **used, **words)
    given = drawn(*out.shape, seed=9)
    expected = sum(
        (answer * given[rows]).sum() for rows, answer, _ in packed(Asked(**words), *inputs, cu_q=cu_q, cu_k=cu_k)
    )
    found = torch.autograd.grad(out, inputs, given)
    for mine, theirs in zip(found, torch.autograd.grad(expected, inputs), strict=True):
        assert near(mine, theirs)


@pytest.mark.parametrize("words", [{}, {"window_size": (3, 1)}, {"softcap": 4.0, "return_attn_probs": True}])
def test_sequences_without_any_key_have_gradients_of_0(words):
    q, k, v = (t.requires_grad_() for t in tensors(7, 7))
    q, k, v = q[0], k[0, :0], v[0, :0]
    bounds, none = torch.tensor([0, 3, 7]).int(), torch.zeros(3).int()
    answer = flash_attn.flash_attn_varlen_func(q, k, v, bounds, none, 4, 4, **words)
    answer = answer if isinstance(answer, torch.Tensor) else answer[0]
    assert not answer.any()
    for tensor, grad in zip((q, k, v), torch.autograd.grad(answer.sum(), (q, k, v))):
        assert grad.shape == tensor.shape and not grad.any()


@pytest.mark.parametrize("words", [{}, {"causal": True}, {"window_size": (3, 2)}, {"softcap": 2.0}])
@pytest.mark.parametrize("lse", [False, True])
def test_one_key_passes_no_gradient_to_its_score(words, lse):
    """Not even one of rounding errors: FlashAttention's tests ask for 0."""
    q, k, v = (t.requires_grad_() for t in tensors(7, 1, dtype=torch.bfloat16))
    bounds, flat = torch.arange(4).int(), [t.flatten(0, 1) for t in (q, k, v)]
    expected = torch.cat([Asked(**words).of(q[b], k[b], v[b])[0] for b in range(3)])
    for answer in (
        flash_attn.flash_attn_func(q, k, v, **words, return_attn_probs=lse),
        flash_attn.flash_attn_varlen_func(*flat, bounds * 7, bounds, 7, 1, **words, return_attn_probs=lse),
    ):
        out = answer[0] if lse else answer
        assert near(out.reshape(-1, HEADS, DIM), expected, 1e-2)
        of_q, of_k, of_v = torch.autograd.grad(out, (q, k, v), drawn(*out.shape, seed=4).to(out.dtype))
        assert not of_q.any() and not of_k.any() and of_v.any()


@pytest.mark.parametrize("causal", [False, True])
def test_queries_of_values(causal):
    """`qv`, padded and packed, and its scale."""
    q, k, v = tensors(11, 15, value_dim=32)
    qv = drawn(3, 11, HEADS, 32, seed=7)
    out, lse = flash_attn.flash_attn_func(q, k, v, causal=causal, qv=qv, return_attn_probs=True)
    flat, bounds = [t.flatten(0, 1) for t in (q, k, v, qv)], [torch.arange(4).int() * count for count in (11, 15)]
    rows = flash_attn.flash_attn_varlen_func(*flat[:3], *bounds, 11, 15, causal=causal, qv=flat[3])
    for b in range(3):
        expected, sums = Asked(causal=causal).of(q[b], k[b], v[b], qv=qv[b])
        assert near(out[b], expected) and near(lse[b], sums) and near(rows.unflatten(0, (3, 11))[b], expected)


def test_one_tensor_of_all():
    q, k, v = tensors(12, 12)
    qkv = torch.cat((q, k, v), dim=2)
    out = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=HEADS)
    assert near(out, flash_attn.flash_attn_func(q, k, v, causal=True))
    square = torch.stack((q, q.flip(1), q.flip(2)), dim=2)
    expected = flash_attn.flash_attn_func(*square.unbind(2), window_size=(3, 0))
    assert near(flash_attn.flash_attn_qkvpacked_func(square, window_size=(3, 0)), expected)
    assert near(version_2.flash_attn_qkvpacked_func(square, 0.0, None, False, (3, 0)), expected)
    assert near(version_2.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=True), out)
    cu = torch.arange(4).int() * 12
    flat = version_2.flash_attn_varlen_qkvpacked_func(square.flatten(0, 1), cu, 12, window_size=(3, 0))
    assert near(flat.unflatten(0, (3, 12)), expected)
    flat = version_2.flash_attn_varlen_kvpacked_func(
        q.flatten(0, 1), torch.stack((k, v), 2).flatten(0, 1), cu, cu, 12, 12, causal=True
    )
    assert near(flat.unflatten(0, (3, 12)), out)
    with pytest.raises(ValueError, match="num_heads_q"):
        flash_attn.flash_attn_qkvpacked_func(qkv)


def test_results_are_those_of_each_version():
    q, k, v = tensors(12, 12)
    cu = torch.arange(4).int() * 12
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    assert isinstance(version_2.flash_attn_func(q, k, v), torch.Tensor)
    _, lse, probabilities = version_2.flash_attn_func(q, k, v, return_attn_probs=True)
    assert lse.shape == (3, HEADS, 12) and lse.dtype == torch.float32 and not probabilities.numel()
    assert len(version_2.flash_attn_varlen_func(*flat, cu, cu, 12, 12, return_attn_probs=True)) == 3
    assert len(flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)) == 2
    lengths = torch.tensor([12, 3, 5]).int()
    whole = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, return_softmax_lse=True)
    assert [tuple(t.shape) for t in whole] == [(3, 12, HEADS, DIM), (3, HEADS, 12), (0,), (0,)]
    assert len(version_2.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, return_softmax_lse=True)) == 2


def test_windows_as_tensors_and_none():
    q, k, v = tensors(9, 12)
    expected = flash_attn.flash_attn_func(q, k, v, window_size=(3, 2))
    assert near(flash_attn.flash_attn_func(q, k, v, window_size=torch.tensor([3, 2])), expected)
    expected = flash_attn.flash_attn_func(q, k, v, window_size=(-1, 2))
    assert near(flash_attn.flash_attn_func(q, k, v, window_size=(None, 2)), expected)
    assert near(flash_attn.flash_attn_func(q, k, v, window_size=None), flash_attn.flash_attn_func(q, k, v))


@pytest.mark.parametrize(
    "words", [ASKED[n] for n in ("plain", "causal", "window", "causal chunk", "chunks of one", "slopes")]
)
def test_dropout(words):
    """The share that is dropped, and the mean of many draws."""
    q, k, v = tensors(6, 10, batch=3)
    torch.manual_seed(0)
    draws = torch.stack([flash_attn.flash_attn_func(q, k, v, dropout_p=0.3, **words) for _ in range(600)])
    expected = flash_attn.flash_attn_func(q, k, v, **words)
    assert not torch.equal(draws[0], draws[1])
    assert near(draws.mean(0), expected, 0.2)
    cu_q, cu_k = torch.arange(4).int() * 6, torch.arange(4).int() * 10
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    draws = torch.stack(
        [flash_attn.flash_attn_varlen_func(*flat, cu_q, cu_k, 6, 10, dropout_p=0.3, **words) for _ in range(600)]
    )
    assert near(draws.mean(0).unflatten(0, (3, 6)), expected, 0.2)


def test_dropout_of_uneven_sequences():
    """All is dropped but nothing, as p is tiny: rows stay where they belong."""
    q = drawn(sum(QUERIES), HEADS, DIM, seed=1)
    k, v = (drawn(sum(KEYS), KV_HEADS, DIM, seed=seed) for seed in (2, 3))
    out = flash_attn.flash_attn_varlen_func(
        q, k, v, starts(QUERIES), starts(KEYS), 17, 23, causal=True, dropout_p=1e-12
    )
    for rows, expected, _ in packed(Asked(causal=True), q, k, v):
        assert near(out[rows], expected)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"q_descale": torch.ones(3, 2)}, "fp8"),
        ({"dropout_p": 0.1, "softcap": 2.0}, "dropout"),
        ({"dropout_p": 0.1, "return_attn_probs": True}, "dropout"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes"),
        ({"s_aux": torch.ones(3)}, "sinks"),
        ({"softcap": -1.0}, "softcap"),
    ],
)
def test_what_is_refused_is_said(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        flash_attn.flash_attn_func(*tensors(4, 4), **words)


def test_fp8_goes_to_attention_fp8():
    q, k, v = (t.to(torch.float8_e4m3fn) for t in tensors(4, 6))
    scales = torch.full((3, KV_HEADS), 0.5)
    words = {"q_descale": scales, "v_descale": scales, "causal": True, "return_attn_probs": True}
    out, lse = flash_attn.flash_attn_func(q, k, v, **words)
    expected = [Asked(causal=True).of(q[b].float() * 0.5, k[b].float(), v[b].float() * 0.5) for b in range(3)]
    assert out.dtype == torch.bfloat16
    assert near(out, torch.stack([one[0] for one in expected]), 2e-2)
    assert near(lse, torch.stack([one[1] for one in expected]), 2e-2)
    with pytest.raises(ValueError, match="fp8"):
        flash_attn.flash_attn_func(q, k, v, alibi_slopes=torch.ones(HEADS))
    cached = flash_attn.flash_attn_with_kvcache(q, k, v, causal=True, q_descale=scales, v_descale=scales)
    assert near(cached, out, 2e-2)
    order, own = torch.tensor([2, 0, 1]), scales * torch.tensor([[1.0], [2.0], [3.0]])
    of_sequences = dict(causal=True, q_descale=scales, k_descale=own, v_descale=own)
    in_rows = flash_attn.flash_attn_with_kvcache(q, k, v, cache_batch_idx=order.int(), **of_sequences)
    assert near(in_rows, flash_attn.flash_attn_with_kvcache(q, k[order], v[order], **of_sequences), 2e-2)
    bounds = [torch.arange(4, dtype=torch.int32) * t.shape[1] for t in (q, k)]
    packed = flash_attn.flash_attn_varlen_func(
        *[t.flatten(0, 1) for t in (q, k, v)], *bounds, 4, 6, causal=True, q_descale=scales, v_descale=scales
    )
    assert near(packed.view_as(out), out, 2e-2)
    used, table = torch.full((3,), 6, dtype=torch.int32), torch.arange(3, dtype=torch.int32)[:, None]
    pages = [torch.nn.functional.pad(t.view(torch.uint8), (0, 0, 0, 0, 0, 10)).view(t.dtype) for t in (k, v)]
    paged = flash_attn.flash_attn_varlen_func(
        q.flatten(0, 1), *pages, bounds[0], None, 4, 16, seqused_k=used, page_table=table, causal=True,
        q_descale=scales, v_descale=scales,
    )  # fmt: skip
    assert near(paged.view_as(out), out, 2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype):
    q, k, v = tensors(9, 12, dtype=dtype)
    out = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert out.dtype == dtype
    expected = torch.stack([Asked(causal=True).of(q[b], k[b], v[b])[0] for b in range(3)])
    assert near(out, expected, 2e-2)


def test_combine():
    parts, sums = drawn(5, 3, 7, HEADS, DIM, seed=1).float(), drawn(5, 3, 7, HEADS, seed=2).float()
    sums[3:, 0], parts[4, 0], sums[:, 1, 2] = -torch.inf, torch.nan, -torch.inf
    out, lse = flash_attn.flash_attn_combine(parts, sums, out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16 and near(lse, torch.logsumexp(sums.double(), 0))
    weights = torch.softmax(sums.double(), 0).nan_to_num(0)[..., None]
    expected = (parts.double().nan_to_num(0) * weights).sum(0)
    assert near(out, expected, 1e-2) and not out[1, 2].any()
    mine = torch.empty(3, 7, HEADS, DIM)
    assert flash_attn.flash_attn_combine(parts, sums, mine)[0] is mine and near(mine, expected)


def test_parts_of_keys_are_combined():
    """What the log-sum-exp is for: two halves of the keys make the whole."""
    q, k, v = tensors(9, 40)
    halves = [
        flash_attn.flash_attn_func(q, t, u, return_attn_probs=True) for t, u in zip(k.split(20, 1), v.split(20, 1))
    ]
    out, _ = flash_attn.flash_attn_combine(
        torch.stack([one[0].float() for one in halves]), torch.stack([one[1].transpose(1, 2) for one in halves])
    )
    assert near(out, flash_attn.flash_attn_func(q, k, v), 1e-5)


def test_the_public_name():
    assert evoattn.flash_attn is flash_attn and "flash_attn" in evoattn.__all__


def test_longest_lengths_and_room_are_handed_on(monkeypatch):
    told = []
    rows, bounds = torch.zeros(4, 2, 16), torch.tensor([0, 4]).int()
    monkeypatch.setattr(
        version_2.version_3, "flash_attn_varlen_func", lambda *given, **more: told.append(given) or rows
    )
    version_2.flash_attn_varlen_func(rows, rows, rows, bounds, bounds, 5, 7)
    assert told[0][5:7] == (5, 7)
    pages = torch.zeros(6, 16, 2, 16)
    for table, room in ((None, 16), (torch.zeros(3, 2).int(), 32)):
        lengths = Cache(pages, pages, 3, table=table).lengths
        assert lengths.tolist() == [room] * 3 and lengths.dtype == torch.int32, "as kernels read them"


REFUSED = {
    "q must have four": lambda q: flash_attn.flash_attn_func(q[0], q[0], q[0]),
    "window_size must be": lambda q: flash_attn.flash_attn_func(q, q, q, window_size=3),
    "qv .* must have the rows": lambda q: flash_attn.flash_attn_func(q, q, q, qv=q[..., :8]),
    "names of one argument": lambda q: flash_attn.flash_attn_func(
        q, q, q, s_aux=q[0, 0, :, 0], learnable_sink=q[0, 0, :, 0]
    ),
    "without its last dimension": lambda q: flash_attn.flash_attn_combine(q, q[:, :, :1, 0]),
    "must have the shape of k": lambda q: flash_attn.flash_attn_with_kvcache(q, q, q[:, :3], qv=q),
    "must be .parts": lambda q: flash_attn.flash_attn_combine(q, q[0, 0, 0, 0]),
    "of numbers, not": lambda q: flash_attn.flash_attn_func(q, q, q, window_size=("a", 1)),
    "go together": lambda q: flash_attn.flash_attn_with_kvcache(q, q, q, rotary_cos=q[0, :, 0]),
    "k_cache must have four": lambda q: flash_attn.flash_attn_with_kvcache(q, q[0], q[0]),
    "cache_seqlens must be int32 .2.,": lambda q: flash_attn.flash_attn_with_kvcache(
        q, q, q, q, q, cache_seqlens=torch.zeros(1).int()
    ),
    "cache_leftpad must be int32 .2.,": lambda q: flash_attn.flash_attn_with_kvcache(
        q, q, q, cache_leftpad=torch.zeros(1).int()
    ),
    "cache_batch_idx must be int32 .2.,": lambda q: flash_attn.flash_attn_with_kvcache(
        q, q, q, cache_batch_idx=torch.zeros(2)
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        REFUSED[sentence](torch.zeros(2, 9, 4, 16))
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value)
