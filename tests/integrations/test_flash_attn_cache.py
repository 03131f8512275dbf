"""`flash_attn_with_kvcache` of `evoattn.flash_attn` and packed queries over caches, against the formula in float64.

Caches are full of NaN where nothing may be read, and are compared in full after keys were appended."""

import itertools

import pytest
import torch

from evoattn import flash_attn
from evoattn.integrations.flash_attn import version_2
from evoattn.integrations.flash_attn.cache import Cache
from evoattn.integrations.flash_attn.sequences import MOST_PADDING, classes
from tests.integrations.flash_attn_formula import Asked, drawn, turned

HEADS, KV_HEADS, DIM, BATCH = 4, 2, 32, 4
USED = [7, 0, 41, 23]
PAD = [2, 0, 17, 23]
ROOM = 48
ASKED = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 1)},
    "all": {
        "causal": True,
        "window_size": (20, 0),
        "attention_chunk": 11,
        "softcap": 4.0,
        "alibi_slopes": torch.rand(BATCH, HEADS),
        "s_aux": torch.rand(HEADS),
        "softmax_scale": 0.25,
    },
}
QUERIES = [3, 1, 0, 6]


def near(one, other, tolerance=1e-6):
    return torch.allclose(one.double(), other.double(), atol=tolerance, rtol=tolerance)


class Kept:
    """A cache, and the same keys one sequence after another."""

    def __init__(self, page: int, rows: str, used=USED, room=ROOM, value_dim=DIM):
        draw = torch.Generator().manual_seed(page)
        self.used, self.page, self.room = used, page, room
        self.words = {}
        shape = (BATCH, room, KV_HEADS)
        order = torch.arange(BATCH)
        if rows == "other rows":
            shape = (2 * BATCH, room, KV_HEADS)
            order = torch.randperm(2 * BATCH, generator=draw)[:BATCH]
            self.words["cache_batch_idx"] = order.int()
        self.k, self.v = (torch.full((*shape, dim), torch.nan, dtype=torch.float64) for dim in (DIM, value_dim))
        if page:
            most = -(-room // page)
            table = torch.randperm(shape[0] * most + 3, generator=draw)[: shape[0] * most].view(shape[0], most)
            self.words["page_table"] = table.int()
            self.k, self.v = (
                torch.full((shape[0] * most + 3, page, KV_HEADS, t.shape[-1]), torch.nan, dtype=torch.float64)
                for t in (self.k, self.v)
            )
            self.table = table[order]
        self.order = order
        self.keys = [drawn(count, KV_HEADS, DIM, seed=10 + b) for b, count in enumerate(used)]
        self.values = [drawn(count, KV_HEADS, value_dim, seed=20 + b) for b, count in enumerate(used)]
        for b in range(BATCH):
            for cache, one in ((self.k, self.keys[b]), (self.v, self.values[b])):
                for position, row in enumerate(one):
                    cache[self.place(b, position)] = row

    def place(self, b: int, position: int) -> tuple[int, int]:
        if self.page:
            return int(self.table[b, position // self.page]), position % self.page
        return int(self.order[b]), position

    @property
    def seqlens(self) -> torch.Tensor:
        return torch.tensor(self.used).int()


@pytest.mark.parametrize(
    ("pages", "dim", "value_dim", "joined"), [(700, 64, 512, 512), (2, 128, 64, 192), (2, 9, 9, 9)]
)
def test_keys_beside_a_latent_stay_in_pages_where_they_are_no_wider(pages, dim, value_dim, joined):
    k, v = (torch.zeros(pages, 16, 1, size) for size in (dim, value_dim))
    found = Cache(k, v, 1, table=torch.zeros(1, 2, dtype=torch.int32)).joined()
    assert found.v.shape[-1] == value_dim and (found.k is k) == (joined == value_dim)
    assert found.k is k or found.k.shape[-1] == joined


CACHES = list(itertools.product([0, 1, 3, 16, 48], ["own rows", "other rows"]))


@pytest.mark.parametrize(("page", "rows"), CACHES)
@pytest.mark.parametrize("pad", ["from 0", "pad"])
@pytest.mark.parametrize("name", ASKED)
def test_queries_of_a_batch(page, rows, pad, name):
    kept, words = Kept(page, rows), ASKED[name]
    q = drawn(BATCH, 5, HEADS, DIM, seed=1)
    first = PAD if pad == "pad" else [0] * BATCH
    if pad == "pad":
        kept.words["cache_leftpad"] = torch.tensor(PAD).int()
    out, lse, *_ = flash_attn.flash_attn_with_kvcache(
        q, kept.k, kept.v, cache_seqlens=kept.seqlens, **kept.words, **words, return_softmax_lse=True
    )
    assert out.shape == q.shape and lse.shape == (BATCH, HEADS, 5)
    for b in range(BATCH):
        k, v = kept.keys[b][first[b] :], kept.values[b][first[b] :]
        expected, sums = Asked(**words).of(q[b], k, v, b)
        assert near(out[b], expected) and near(lse[b], sums), b
    plain = flash_attn.flash_attn_with_kvcache(q, kept.k, kept.v, cache_seqlens=kept.seqlens, **kept.words, **words)
    assert near(plain, out)


@pytest.mark.parametrize(("page", "rows"), CACHES)
@pytest.mark.parametrize("pad", ["from 0", "pad"])
@pytest.mark.parametrize("name", ASKED)
def test_packed_queries(page, rows, pad, name):
    """The call that serving engines make."""
    kept, words = Kept(page, rows), ASKED[name]
    bounds = torch.tensor([0, *itertools.accumulate(QUERIES)]).int()
    q = drawn(int(bounds[-1]) + 3, HEADS, DIM, seed=1)  # with rows behind the last sequence
    first = PAD if pad == "pad" else [0] * BATCH
    if pad == "pad":
        kept.words["cache_leftpad"] = torch.tensor(PAD).int()
    given = dict(cache_seqlens=kept.seqlens, cu_seqlens_q=bounds, max_seqlen_q=6, **kept.words, **words)
    out, lse, *_ = flash_attn.flash_attn_with_kvcache(q, kept.k, kept.v, **given, return_softmax_lse=True)
    assert out.shape == q.shape and lse.shape == (HEADS, len(q))
    plain = flash_attn.flash_attn_with_kvcache(q, kept.k, kept.v, **given)
    for b in range(BATCH):
        some = slice(int(bounds[b]), int(bounds[b + 1]))
        expected, sums = Asked(**words).of(q[some], kept.keys[b][first[b] :], kept.values[b][first[b] :], b)
        assert near(out[some], expected) and near(lse[:, some], sums) and near(plain[some], expected), b


LATER = [5, 2, 4, 1]


def rotary(columns):
    angles = torch.rand(ROOM + 20, columns // 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return torch.cos(angles), torch.sin(angles)


@pytest.mark.parametrize(("page", "rows"), CACHES)
@pytest.mark.parametrize("style", ["no rotary", "interleaved", "halves"])
@pytest.mark.parametrize("new", ["padded", "packed"])
@pytest.mark.parametrize("causal", [False, True])
def test_new_keys_are_appended(page, rows, style, new, causal):
    kept = Kept(page, rows)
    counts = [4] * BATCH if new == "padded" else LATER
    bounds = torch.tensor([0, *itertools.accumulate(counts)]).int()
    k = drawn(int(bounds[-1]), KV_HEADS, DIM, seed=4)
    v = drawn(int(bounds[-1]), KV_HEADS, DIM, seed=5)
    q = drawn(BATCH, 2, HEADS, DIM, seed=6)
    given, is_interleaved = {}, style == "interleaved"
    cos, sin = rotary(16)
    if style != "no rotary":
        given = dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=is_interleaved)
    if new == "packed":
        given["cu_seqlens_k_new"] = bounds
    shaped = [t.view(BATCH, 4, KV_HEADS, DIM) for t in (k, v)] if new == "padded" else [k, v]
    before = kept.k.clone(), kept.v.clone()
    out = flash_attn.flash_attn_with_kvcache(
        q, kept.k, kept.v, *shaped, cache_seqlens=kept.seqlens, causal=causal, **kept.words, **given
    )
    for b in range(BATCH):
        some, start = slice(int(bounds[b]), int(bounds[b + 1])), USED[b]
        new_keys, queries = k[some], q[b]
        if style != "no rotary":
            new_keys = turned(new_keys, cos, sin, start, 1, is_interleaved)
            queries = turned(queries, cos, sin, start, int(causal), is_interleaved)
        for i in range(counts[b]):
            before[0][kept.place(b, start + i)], before[1][kept.place(b, start + i)] = new_keys[i], v[some][i]
        keys, values = torch.cat((kept.keys[b], new_keys)), torch.cat((kept.values[b], v[some]))
        assert near(out[b], Asked(causal=causal).of(queries, keys, values)[0]), b
    for mine, expected in zip((kept.k, kept.v), before, strict=True):
        assert torch.allclose(mine, expected, equal_nan=True, atol=1e-6)


def test_rotary_of_packed_queries_with_places_of_their_own():
    kept = Kept(16, "own rows")
    bounds, places = torch.tensor([0, 3, 4, 4, 10]).int(), torch.tensor([1, 0, 30, 9]).int()
    q, cos_sin = drawn(12, HEADS, DIM, seed=1), rotary(DIM)
    k, v = (drawn(10, KV_HEADS, DIM, seed=seed) for seed in (4, 5))
    out = flash_attn.flash_attn_with_kvcache(
        q, kept.k, kept.v, k, v, None, *cos_sin, kept.seqlens,
        **kept.words, cu_seqlens_q=bounds, cu_seqlens_k_new=bounds, max_seqlen_q=6, rotary_seqlens=places, causal=True,
    )  # fmt: skip
    for b in range(BATCH):
        some, start = slice(int(bounds[b]), int(bounds[b + 1])), int(places[b])
        queries, new_keys = (turned(t[some], *cos_sin, start, 1, True) for t in (q, k))
        keys, values = torch.cat((kept.keys[b], new_keys)), torch.cat((kept.values[b], v[some]))
        assert near(out[some], Asked(causal=True).of(queries, keys, values)[0])


@pytest.mark.parametrize("page", [0, 16])
def test_keys_without_a_place_are_not_written(page):
    """Behind the room, in pages that the table does not name, and behind the last packed sequence."""
    kept = Kept(page, "own rows", used=[ROOM - 1, 0, ROOM, 3])
    if page:
        kept.words["page_table"][1] = -1
    bounds = torch.tensor([0, 2, 4, 6, 7]).int()
    k, v = (drawn(9, KV_HEADS, DIM, seed=seed) for seed in (4, 5))
    before = kept.k.clone(), kept.v.clone()
    q = drawn(BATCH, 1, HEADS, DIM, seed=6)
    flash_attn.flash_attn_with_kvcache(
        q, kept.k, kept.v, k, v, cache_seqlens=kept.seqlens, cu_seqlens_k_new=bounds, **kept.words
    )
    written = [(0, ROOM - 1, 0), (3, 3, 6)] if page else [(0, ROOM - 1, 0), (1, 0, 2), (1, 1, 3), (3, 3, 6)]
    for b, position, row in written:
        before[0][kept.place(b, position)], before[1][kept.place(b, position)] = k[row], v[row]
    for mine, expected in zip((kept.k, kept.v), before, strict=True):
        assert torch.equal(mine.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_nothing_is_written_where_nothing_has_a_place():
    kept = Kept(0, "own rows", used=[ROOM] * BATCH)
    before = kept.k.clone()
    k, v = (drawn(BATCH, 1, KV_HEADS, DIM, seed=seed) for seed in (4, 5))
    q = drawn(BATCH, 1, HEADS, DIM, seed=6)
    flash_attn.flash_attn_with_kvcache(q, kept.k, kept.v, k, v, cache_seqlens=kept.seqlens)
    assert torch.equal(kept.k, before)


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("page", [0, 16, 24])
@pytest.mark.parametrize("packed", [False, True])
def test_latent_caches(side_by_side, page, packed):
    """`qv`: DeepSeek's latent attention with 32 columns of V and 16 of rotary K in two tensors, or in one."""
    kept = Kept(page, "own rows", value_dim=48)
    k_cache, v_cache = kept.k, kept.v
    if side_by_side:
        both = torch.cat((kept.v, kept.k), -1)
        v_cache, k_cache = both[..., :48], both[..., 48:]
    elif page == 24:  # with room between pages, so that no page of a whole power of two is a view of them
        v_cache, k_cache = (torch.cat((one, one), 1)[:, :page] for one in (kept.v, kept.k))
    bounds = torch.tensor([0, *itertools.accumulate(QUERIES)]).int()
    q, qv = drawn(10, HEADS, DIM, seed=1), drawn(10, HEADS, 48, seed=2)
    if side_by_side:
        qv, q = torch.cat((qv, q), -1).split([48, DIM], -1)
    given = dict(cu_seqlens_q=bounds, max_seqlen_q=6)
    if not packed:
        q, qv, given = q[:8].unflatten(0, (BATCH, 2)), qv[:8].unflatten(0, (BATCH, 2)), {}
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, qv=qv, cache_seqlens=kept.seqlens, causal=True, **kept.words, **given
    )
    for b in range(BATCH):
        some = slice(int(bounds[b]), int(bounds[b + 1])) if packed else b
        expected, _ = Asked(causal=True).of(q[some], kept.keys[b], kept.values[b], qv=qv[some])
        assert near(out[some], expected)


def test_a_latent_of_512_columns_stays_apart_in_pages():
    """DeepSeek's sizes. Beside a K of 64 columns that is not apart, so wide a V is served in parts."""
    kept = Kept(16, "own rows", value_dim=512)
    q, qv = drawn(BATCH, 2, HEADS, DIM, seed=1), drawn(BATCH, 2, HEADS, 512, seed=2)
    out = flash_attn.flash_attn_with_kvcache(q, kept.k, kept.v, qv=qv, cache_seqlens=kept.seqlens, **kept.words)
    for b in range(BATCH):
        assert near(out[b], Asked().of(q[b], kept.keys[b], kept.values[b], qv=qv[b])[0])


def test_lengths_as_a_number_and_left_out():
    kept = Kept(0, "own rows", used=[ROOM] * BATCH)
    q = drawn(BATCH, 2, HEADS, DIM, seed=1)
    for count, given in ((11, {"cache_seqlens": 11}), (ROOM, {})):
        out = flash_attn.flash_attn_with_kvcache(q, kept.k, kept.v, causal=True, **given)
        for b in range(BATCH):
            expected, _ = Asked(causal=True).of(q[b], kept.keys[b][:count], kept.values[b][:count])
            assert near(out[b], expected)


@pytest.mark.parametrize("page", [1, 16])
def test_packed_queries_over_pages_by_the_varlen_function(page):
    """vLLM's call has `seqused_k`, FlashAttention 2's `cu_seqlens_k`. With gradients, and rows that are no queries."""
    kept = Kept(page, "own rows")
    bounds = torch.tensor([0, *itertools.accumulate(QUERIES)]).int()
    q = drawn(10, HEADS, DIM, seed=1).requires_grad_()
    table, words = kept.words["page_table"], ASKED["all"]
    out = flash_attn.flash_attn_varlen_func(
        q, kept.k, kept.v, bounds, None, 6, ROOM, seqused_k=kept.seqlens, block_table=table, **words
    )
    of_keys = torch.tensor([0, *itertools.accumulate(USED)]).int()
    plain = version_2.flash_attn_varlen_func(
        q, kept.k, kept.v, bounds, of_keys, 6, ROOM, causal=True, block_table=table
    )
    given, loss = drawn(10, HEADS, DIM, seed=8), 0.0
    for b in range(BATCH):
        some = slice(int(bounds[b]), int(bounds[b + 1]))
        expected, _ = Asked(**words).of(q[some], kept.keys[b], kept.values[b], b)
        loss = loss + (expected * given[some]).sum()
        assert near(out[some], expected)
        assert near(plain[some], Asked(causal=True).of(q[some], kept.keys[b], kept.values[b])[0])
    assert near(torch.autograd.grad(out, q, given)[0], torch.autograd.grad(loss, q)[0])
    fewer = torch.tensor([2, 1, 0, 4]).int()
    out = flash_attn.flash_attn_varlen_func(
        q, kept.k, kept.v, bounds, None, 6, ROOM, fewer, kept.seqlens, causal=True, block_table=table
    )
    for b in range(BATCH):
        some = slice(int(bounds[b]), int(bounds[b]) + int(fewer[b]))
        assert near(out[some], Asked(causal=True).of(q[some], kept.keys[b], kept.values[b])[0])
        assert not out[some.stop : int(bounds[b + 1])].any()


def test_prompts_and_tokens_in_one_call():
    """Lengths so uneven that several classes are launched."""
    queries = [1, 70, 1, 2, 0, 1, 9, 1, 1, 1, 1, 1]
    used = [count + 5 * b for b, count in enumerate(queries)]
    assert len(classes(sum(queries), len(queries), 70)) > 2
    pages = -(-max(used) // 16)
    table = torch.randperm(len(queries) * pages, generator=torch.Generator().manual_seed(1)).view(-1, pages)
    k, v = (drawn(table.numel(), 16, KV_HEADS, DIM, seed=seed) for seed in (1, 2))
    bounds = torch.tensor([0, *itertools.accumulate(queries)]).int()
    q = drawn(sum(queries) + 2, HEADS, DIM, seed=3)
    out, lse = flash_attn.flash_attn_varlen_func(
        q, k, v, bounds, None, 70, max(used), None, torch.tensor(used).int(), causal=True, page_table=table.int(),
        return_attn_probs=True,
    )  # fmt: skip
    for b, count in enumerate(used):
        some = slice(int(bounds[b]), int(bounds[b + 1]))
        own = [t[table[b]].flatten(0, 1)[:count] for t in (k, v)]
        expected, sums = Asked(causal=True).of(q[some], *own)
        assert near(out[some], expected) and near(lse[:, some], sums)
    assert not out[-2:].any() and torch.isneginf(lse[:, -2:]).all()


@pytest.mark.parametrize("total", [1, 7, 300, 4099])
@pytest.mark.parametrize("sequences", [1, 5, 256])
@pytest.mark.parametrize("longest", [1, 2, 3, 17, 4096])
def test_classes_hold_every_sequence_that_can_be(total, sequences, longest):
    found = classes(total, sequences, longest)
    borders = [(shorter, most) for shorter, most, _ in found]
    assert borders[0][1] >= min(longest, total) and borders[-1][0] == 0
    assert all(one[0] == other[1] for one, other in itertools.pairwise(borders))
    for shorter, most, room in found:
        assert room >= min(sequences, total // (shorter + 1))  # as many as can be longer than that
        assert room * most <= MOST_PADDING * total


def test_what_is_refused_is_said():
    kept = Kept(0, "own rows")
    q = drawn(BATCH, 1, HEADS, DIM, seed=1)
    with pytest.raises(ValueError, match="new values"):
        flash_attn.flash_attn_with_kvcache(q, kept.k, kept.v, q[:, :, :2], cache_seqlens=kept.seqlens)
    with pytest.raises(ValueError, match="max_seqlen_q"):
        flash_attn.flash_attn_with_kvcache(q[:, 0], kept.k, kept.v, cu_seqlens_q=torch.arange(5).int())
    with pytest.raises(ValueError, match="rotary_cos"):
        flash_attn.flash_attn_with_kvcache(
            q, kept.k, kept.v, cache_seqlens=kept.seqlens, rotary_cos=torch.ones(50, 30), rotary_sin=torch.ones(50, 30)
        )
    bounds = torch.arange(5).int()
    with pytest.raises(ValueError, match="dropout"):
        flash_attn.flash_attn_varlen_func(q[:, 0], kept.k, kept.v, bounds, bounds, 1, 1, dropout_p=0.1)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        flash_attn.flash_attn_varlen_func(q[:, 0], q[:, 0], q[:, 0], bounds, None, 1, 1)


def test_there_is_nothing_to_plan():
    metadata = flash_attn.get_scheduler_metadata(4, 1, 48, HEADS, KV_HEADS, DIM, torch.tensor(USED), num_splits=3)
    assert metadata.dtype == torch.int32 and not metadata.numel()
