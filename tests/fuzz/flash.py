"""FlashAttention's functions, calls that promise the same bits, and different calls at once, drawn over their
arguments."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

import evoattn
from evoattn import flash_attn
from tests.fuzz.asked import HEAD_DIMS, Asked, Draw, bits
from tests.fuzz.faces import Face
from tests.fuzz.formula import Formula, comparable, hides
from tests.fuzz.training import FP32_GRADIENTS

OURS: Any = evoattn
FLASH: Any = flash_attn
"""Words are drawn, of which no checker of types can say whether they fit."""
PAGES = (0, 0, 1, 2, 4, 8, 16, 16, 24, 32, 48, 64, 128, 256, 512)


def _words(draw: Draw, batch: int, heads: int, *, packed: bool = False) -> dict[str, Any]:
    """Arguments that all of the functions have."""
    words: dict[str, Any] = {"causal": draw.chance("causal", 0.6)}
    if draw.chance("windowed", 0.25):
        words["window_size"] = draw.pick("window_size", (9, 0), (70, 5), (-1, 3), (0, 0))
    if draw.chance("capped", 0.15):
        words["softcap"] = draw.pick("softcap", 4.0, 30.0)
    if draw.chance("chunked", 0.15):
        words["attention_chunk"] = draw.pick("attention_chunk", 1, 11, 64)
    if draw.chance("scaled", 0.25):
        words["softmax_scale"] = 0.2
    if draw.chance("sinks", 0.15):
        words["s_aux"] = draw.numbers(heads)
    elif draw.chance("alibi", 0.2):
        of_batch = not packed and draw.chance("of batches", 0.4)
        words["alibi_slopes"] = torch.rand((batch, heads) if of_batch else heads, generator=draw.generator)
        words["alibi_slopes"] = words["alibi_slopes"].to(draw.device)
    return words


def _formula(words: dict[str, Any], offset: int, sequence: int, width: int) -> Formula:
    """Of those words and one sequence."""
    scale = words.get("softmax_scale")
    made = Formula(width**-0.5 if scale is None else scale, sinks=words.get("s_aux"))
    if cap := words.get("softcap"):
        made.change.append(lambda s, b, h, i, j: cap * torch.tanh(s / cap))
    if (slopes := words.get("alibi_slopes")) is not None:
        own = slopes if slopes.dim() == 1 else slopes[sequence]
        made.change.append(lambda s, b, h, i, j: s - own.to(s.dtype)[h] * (i + offset - j).abs())
    past, ahead = words.get("window_size", (-1, -1))
    ahead, chunk = 0 if words["causal"] else ahead, words.get("attention_chunk", 0)

    def hidden(i: Tensor, j: Tensor) -> Tensor:
        middle = i + offset
        which = torch.zeros_like(i + j, dtype=torch.bool)
        which = which | (j > middle + ahead) if ahead >= 0 else which
        which = which | (j < middle - past) if past >= 0 else which
        if chunk:
            first = middle - middle % chunk
            which = which | (j < first) | (j >= first + chunk)
        return which

    made.change.append(hides(hidden))
    return made


def _of_one(words: dict[str, Any], b: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output `[rows, heads, dim]` and log-sum-exp `[heads, rows]` of one sequence of such tensors."""
    made = _formula(words, len(k) - len(q), b, q.shape[-1])
    if not len(k):
        none = q.new_zeros(*q.shape[:2], v.shape[-1]) + 0 * q.sum()
        sums = words.get("s_aux")
        return none, q.new_full(q.shape[1::-1], -math.inf) if sums is None else sums.to(q)[:, None].expand(
            q.shape[1::-1]
        )
    out, lse = made.of(*(one.transpose(0, 1)[None] for one in (q, k, v)))
    return out[0].transpose(0, 1), lse[0]


def dense(draw: Draw) -> Asked:
    """`flash_attn_func` with gradients."""
    batch, heads, kv_heads, rows, keys, dim = draw.shape()
    q, k, v = (
        draw.placed(batch, h, n, dim).transpose(1, 2) for h, n in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    )
    words = _words(draw, batch, heads)
    deterministic = draw.chance("deterministic", 0.4)
    grad = draw.numbers(*q.shape)

    def asked(attend: Any, dtype: torch.dtype) -> list[Tensor]:
        own = [one.detach().to(dtype).requires_grad_() for one in (q, k, v)]
        with torch.enable_grad():
            out = attend(*own)
            return [out.detach(), *torch.autograd.grad(out, own, grad.to(dtype))]

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([_of_one(words, b, q[b], k[b], v[b])[0] for b in range(batch)])

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return FLASH.flash_attn_func(q, k, v, deterministic=deterministic, **words)

    return Asked(
        draw.describe(),
        lambda: asked(ours, draw.dtype),
        lambda dtype: asked(formula, dtype),
        [q, k, v, grad],
        factor=3,
        part=FP32_GRADIENTS if draw.dtype == torch.float32 else 0.0,
        same_bits=deterministic,
        graphs=False,
    )


def _starts(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)], dtype=torch.int32, device=device)


def packed(draw: Draw) -> Asked:
    """`flash_attn_varlen_func`, of some sequences only the first rows and keys."""
    kv_heads, dim = draw.pick("kv_heads", 1, 2, 4), draw.pick("dim", *HEAD_DIMS)
    heads, count = kv_heads * draw.pick("group", 1, 2, 8), draw.pick("sequences", 1, 3, 7)
    most = draw.pick("most", 3, 64, 200)
    rows, keys = draw.ints(0, most, count).tolist(), draw.ints(0, most, count).tolist()
    rows[0], keys[0] = max(1, rows[0]), max(1, keys[0])
    words = _words(draw, count, heads, packed=True)
    q, k, v = (draw.numbers(sum(n), h, dim) for n, h in ((rows, heads), (keys, kv_heads), (keys, kv_heads)))
    of_q, of_k = _starts(rows, draw.device), _starts(keys, draw.device)
    used_q, used_k, said = rows, keys, {}
    if draw.chance("seqused_q", 0.3):
        used_q = [draw.rng.randint(0, n) for n in rows]
        said["seqused_q"] = torch.tensor(used_q, dtype=torch.int32, device=draw.device)
    if draw.chance("seqused_k", 0.3):
        used_k = [draw.rng.randint(0, n) for n in keys]
        said["seqused_k"] = torch.tensor(used_k, dtype=torch.int32, device=draw.device)
    lse = draw.chance("lse", 0.4)

    def ask() -> list[Tensor]:
        given = max(rows), max(keys)
        out = FLASH.flash_attn_varlen_func(q, k, v, of_q, of_k, *given, return_attn_probs=lse, **said, **words)
        return [_used(out[0]), comparable(_used(out[1].T))] if lse else [_used(out)]

    def _used(whole: Tensor) -> Tensor:
        firsts = of_q.tolist()
        return torch.cat([whole[firsts[b] : firsts[b] + used_q[b]] for b in range(count)])

    def right(dtype: torch.dtype) -> list[Tensor]:
        parts, at = [], (of_q.tolist(), of_k.tolist())
        for b in range(count):
            own = q[at[0][b] :][: used_q[b]], k[at[1][b] :][: used_k[b]], v[at[1][b] :][: used_k[b]]
            parts.append(_of_one(words, b, *(one.to(dtype) for one in own)))
        outs = [torch.cat([one[0] for one in parts])]
        return [*outs, comparable(torch.cat([one[1].T for one in parts]))] if lse else outs

    return Asked(draw.describe(), ask, right, [q, k, v, of_q, of_k], factor=3, graphs=False, part=2e-5)


def _rotated(rows: Tensor, cos: Tensor, sin: Tensor, first: int, step: int, interleaved: bool) -> Tensor:
    """Rotary embedding of `[rows, heads, dim]`: row i stands at position first + step · i."""
    half, out = cos.shape[1], rows.clone()
    places = first + step * torch.arange(len(rows), device=rows.device)
    c, s = (one[places].to(rows.dtype)[:, None] for one in (cos, sin))
    one = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    two = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    x, y = rows[..., one], rows[..., two]
    out[..., one], out[..., two] = x * c - y * s, x * s + y * c
    return out


class _Cache:
    """Keys and values of each sequence in a cache that is NaN elsewhere."""

    def __init__(self, draw: Draw, batch: int, kv_heads: int, dims: tuple[int, int], more: int) -> None:
        self.page, self.room = draw.pick("page", *PAGES), draw.pick("room", 9, 64, 130, 300)
        self.used = [min(n, max(0, self.room - more)) for n in draw.ints(0, self.room, batch).tolist()]
        self.words: dict[str, Any] = {}
        self.order = torch.arange(batch)
        count = batch
        if draw.chance("cache_batch_idx", 0.2):
            count = 2 * batch
            self.order = torch.randperm(count, generator=draw.generator)[:batch]
            self.words["cache_batch_idx"] = self.order.to(draw.device, torch.int32)
        sizes, self.table = (count, self.room), None
        if self.page:
            own = -(-self.room // self.page)
            table = torch.randperm(count * own + 2, generator=draw.generator)[: count * own].view(count, own)
            self.words[draw.pick("name", "page_table", "block_table")] = table.to(draw.device, torch.int32)
            self.table, sizes = table[self.order], (count * own + 2, self.page)
        self.k, self.v = (
            torch.full((*sizes, kv_heads, dim), math.nan, device=draw.device, dtype=draw.dtype) for dim in dims
        )
        for cache in (self.k, self.v):
            for b, n in enumerate(self.used):
                if n:
                    self.put(cache, b, 0, draw.numbers(n, kv_heads, cache.shape[-1]))
        self.words["cache_seqlens"] = torch.tensor(self.used, dtype=torch.int32, device=draw.device)

    def at(self, b: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Where rows of a sequence lie."""
        places = torch.arange(first, first + count)
        if self.table is None:
            return self.order[b].expand(count), places
        return self.table[b][places // self.page], places % self.page

    def put(self, cache: Tensor, b: int, first: int, rows: Tensor) -> None:
        """Write rows of a sequence."""
        cache[self.at(b, first, len(rows))] = rows.to(cache.dtype)


def cached(draw: Draw) -> Asked:
    """`flash_attn_with_kvcache`: pages, rows of other batches, padding, new keys, rotary embeddings, latent values."""
    kv_heads, dim = draw.pick("kv_heads", 1, 2, 4), draw.pick("dim", 32, 64, 64, 128, 128)
    heads, batch = kv_heads * draw.pick("group", 1, 4, 8), draw.pick("batch", 1, 2, 5)
    rows, more = draw.pick("rows", 1, 1, 2, 7, 40), draw.pick("new", 0, 0, 1, 3, 9)
    cache = _Cache(draw, batch, kv_heads, (dim, dim), more)
    words = _words(draw, batch, heads)
    q = draw.numbers(batch, rows, heads, dim)
    k_new, v_new = draw.numbers(2, batch, more, kv_heads, dim).unbind(0)
    given: dict[str, Any] = dict(cache.words)
    pads = [0] * batch
    if draw.chance("leftpad", 0.2):
        pads = [draw.rng.randint(0, n) for n in cache.used]
        given["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32, device=draw.device)
    turn = None  # with it numbers are rounded before scores are made, so that log-sum-exps are off
    if more and not words.get("window_size") and draw.chance("rotary", 0.5):
        half = draw.pick("half", 8, dim // 2)
        angles = torch.rand(cache.room + 60, half, generator=draw.generator).to(draw.device) * 6
        turn = angles.cos().to(draw.dtype), angles.sin().to(draw.dtype), draw.chance("interleaved", 0.5)
        given |= dict(rotary_cos=turn[0], rotary_sin=turn[1], rotary_interleaved=turn[2])
    before = cache.k.clone(), cache.v.clone()
    if more:
        given |= dict(k=k_new, v=v_new)

    def ask() -> list[Tensor]:
        kept = [one.clone() for one in before]
        out, lse, *_ = FLASH.flash_attn_with_kvcache(q, *kept, return_softmax_lse=True, **given, **words)
        return [out, *([] if turn else [comparable(lse)]), *kept]

    def right(dtype: torch.dtype) -> list[Tensor]:
        outs, sums, kept = [], [], [one.clone() for one in before]
        kept = [one.to(dtype) for one in kept]
        for b in range(batch):
            queries, new = q[b].to(dtype), k_new[b].to(dtype)
            if turn:
                new = _rotated(new, turn[0], turn[1], cache.used[b], 1, turn[2])
                queries = _rotated(queries, turn[0], turn[1], cache.used[b], int(words["causal"]), turn[2])
            for one, some in zip(kept, (new, v_new[b])):
                if more:
                    one[cache.at(b, cache.used[b], more)] = some.to(dtype)
            place = cache.at(b, pads[b], cache.used[b] + more - pads[b])
            out, lse = _of_one(words, b, queries, kept[0][place], kept[1][place])
            outs.append(out)
            sums.append(comparable(lse))
        return [torch.stack(outs), *([] if turn else [torch.stack(sums)]), *kept]

    return Asked(draw.describe(), ask, right, [q, k_new, v_new, *before], factor=3, part=2e-5)


def latent(draw: Draw) -> Asked:
    """`qv` of `flash_attn_with_kvcache`: DeepSeek's latent caches and smaller ones."""
    draw.dtype = draw.pick("dtype", torch.float16, torch.bfloat16)
    dim, wide = draw.pick("dims", (64, 512), (64, 512), (64, 256), (32, 128))
    heads, batch, rows = draw.pick("heads", 1, 16, 128), draw.pick("batch", 1, 3), draw.pick("rows", 1, 2, 4)
    cache = _Cache(draw, batch, 1, (dim, wide), 0)
    if draw.chance("side by side", 0.6):
        both = torch.cat((cache.v, cache.k), -1)
        cache.v, cache.k = both[..., :wide], both[..., wide:]
    q, qv = draw.numbers(batch, rows, heads, dim), draw.numbers(batch, rows, heads, wide)
    words: dict[str, Any] = {"causal": draw.chance("causal", 0.5)}

    def ask() -> list[Tensor]:
        return [FLASH.flash_attn_with_kvcache(q, cache.k, cache.v, qv=qv, **cache.words, **words)]

    def right(dtype: torch.dtype) -> list[Tensor]:
        outs = []
        for b in range(batch):
            place = cache.at(b, 0, cache.used[b])
            k, v = cache.k[place].to(dtype), cache.v[place].to(dtype)
            outs.append(_of_one(words, b, torch.cat((q, qv), -1)[b].to(dtype), torch.cat((k, v), -1), v)[0])
        return [torch.stack(outs)]

    return Asked(draw.describe(), ask, right, [q, qv, cache.k, cache.v])


def combined(draw: Draw) -> Asked:
    """`flash_attn_combine`: parts without any key too."""
    splits, batch = draw.pick("splits", 1, 2, 5, 33), draw.pick("batch", 1, 3)
    rows, heads, dim = draw.pick("rows", 1, 5, 130), draw.pick("heads", 1, 6), draw.pick("dim", 8, 40, 64, 128, 256)
    parts = draw.numbers(splits, batch, rows, heads, dim, dtype=torch.float32)
    sums = draw.numbers(splits, batch, rows, heads, dtype=torch.float32) * 4
    if draw.chance("without keys", 0.5):
        sums[draw.rng.randrange(splits), 0] = -math.inf
        parts[torch.isneginf(sums)] = 0
    kind = draw.pick("out_dtype", None, torch.float16, torch.bfloat16)

    def ask() -> list[Tensor]:
        out, lse = FLASH.flash_attn_combine(parts, sums, out_dtype=kind)
        return [out, comparable(lse)]

    def right(dtype: torch.dtype) -> list[Tensor]:
        own, wide = sums.double(), parts.double()
        lse = torch.logsumexp(own, 0)
        some = ~torch.isneginf(lse)
        weights = torch.where(some, torch.exp(own - torch.where(some, lse, 0)), 0)
        out = (weights[..., None] * wide).sum(0)
        return [out.to(torch.float64 if dtype == torch.float64 else kind or torch.float32), comparable(lse)]

    return Asked(draw.describe(), ask, right, [parts, sums], part=4e-6)


def same_bits(draw: Draw) -> Asked:
    """`batch_invariant=True`: a sequence alone, in batches, packed, in pages of any size, and the end of its prompt."""
    draw.dtype = draw.pick("dtype", torch.float16, torch.bfloat16)
    kv_heads, dim = draw.pick("kv_heads", 1, 2, 4), draw.pick("dim", 64, 64, 96, 128, 128, 256)
    heads = kv_heads * draw.pick("group", 1, 2, 4, 8)
    keys = draw.pick("keys", 1, 17, 64, 200, 513, 1100)
    rows = min(keys, draw.pick("rows", 1, 1, 3, 64, 129, 300))
    words: dict[str, Any] = {"window": draw.pick("window", None, None, (33, 0)), "softcap": draw.pick("cap", 0, 0, 9.0)}
    words |= {"causal": True, "batch_invariant": True}
    if draw.chance("sinks", 0.2):
        words["sinks"] = draw.numbers(heads)
    q, k, v = (draw.numbers(n, h, dim) for n, h in ((rows, heads), (keys, kv_heads), (keys, kv_heads)))
    page, others = draw.pick("page", 8, 16, 64, 256, 512), draw.pick("others", 1, 3, 8)

    def padded(one: Tensor, room: int) -> Tensor:
        whole = one.new_full((1 + others, room, *one.shape[1:]), 0.5)
        whole[others // 2, : len(one)] = one
        return whole

    room = keys + draw.pick("behind", 0, 5, 700)
    used = draw.ints(1, room, 1 + others)
    mine = others // 2
    used[mine] = keys
    of_page = -(-room // page)
    table = torch.randperm((1 + others) * of_page, generator=draw.generator).view(1 + others, of_page)
    end = draw.rng.randint(1, rows)

    def pages(one: Tensor) -> Tensor:
        whole = torch.nn.functional.pad(padded(one, room), (0, 0, 0, 0, 0, of_page * page - room))
        made = torch.empty_like(whole).view(-1, page, *one.shape[1:])
        made[table.flatten().to(one.device)] = whole.view(-1, page, *one.shape[1:])
        return made

    def ask() -> list[Tensor]:
        alone = OURS.attention(*(one.transpose(0, 1)[None] for one in (q, k, v)), enable_gqa=True, **words)
        alone = alone[0].transpose(0, 1)
        whole = [padded(q, rows), padded(k, room), padded(v, room)]
        batched = OURS.attention(*(one.transpose(1, 2) for one in whole), enable_gqa=True, seqused_k=used, **words)
        lengths = [(3, 9)] * mine + [(rows, keys)] + [(1, 77)] * (others - mine)
        ends = [_starts([one[side] for one in lengths], draw.device) for side in (0, 1)]
        filled = [
            torch.cat(
                [some.new_full((n[min(1, at)], *some.shape[1:]), 0.25) if n != (rows, keys) else some for n in lengths]
            )
            for at, some in enumerate((q, k, v))
        ]
        most = [max(one[side] for one in lengths) for side in (0, 1)]
        ragged = OURS.attention_varlen(*filled, *ends, *most, **words)[int(ends[0][mine]) :][:rows]
        caches = pages(k), pages(v), table.to(draw.device, torch.int32), used
        paged = OURS.attention_paged(padded(q[-end:], end), *caches, **words)[mine]
        counts = [1] * mine + [end] + [2] * (others - mine)
        some = torch.cat([q[-end:] if n == mine else q[:1].expand(c, -1, -1) for n, c in enumerate(counts)])
        ends_q = _starts(counts, draw.device)
        mixed = OURS.attention_mixed(some, *caches, ends_q, max(counts), **words)[int(ends_q[mine]) :][:end]
        others_of = [batched[mine].transpose(0, 1), ragged, paged, mixed]
        differ = [not torch.equal(bits(alone[-len(one) :] + 0), bits(one + 0)) for one in others_of]
        return [alone, torch.tensor([float(one) for one in differ])]

    def right(dtype: torch.dtype) -> list[Tensor]:
        own = dict(causal=True, softcap=words["softcap"], s_aux=words.get("sinks"))
        if words["window"]:
            own["window_size"] = words["window"]
        return [_of_one(own, 0, *(one.to(dtype) for one in (q, k, v)))[0], torch.zeros(4, dtype=torch.float64)]

    return Asked(draw.describe(), ask, right, [q, k, v], factor=3, graphs=False)


def at_once(draw: Draw) -> Asked:
    """Different calls by several threads, each on a stream of its own where there is one: as one after another."""
    questions = []
    for _ in range(4):
        q, k, v = draw.qkv(value_dims=False)
        words: dict[str, Any] = {"causal": draw.pick("causal", None, "lower_right"), "enable_gqa": True}
        if draw.chance("capped", 0.2):
            words["softcap"] = 9.0
        questions.append((q, k, v, words))

    def one(question: Any) -> Any:
        q, k, v, words = question
        with torch.no_grad():
            if not q.is_cuda:
                return OURS.attention(q, k, v, **words)
            with torch.cuda.stream(torch.cuda.Stream()):
                answers = [OURS.attention(q, k, v, **words) for _ in range(3)]
                torch.cuda.current_stream().synchronize()
                return answers[-1]

    def ask() -> list[Tensor]:
        if draw.device != "cpu":
            torch.cuda.synchronize()
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(one, questions))

    def right(dtype: torch.dtype) -> list[Tensor]:
        made = []
        for q, k, v, words in questions:
            own: dict[str, Any] = dict(causal=bool(words["causal"]), softcap=words.get("softcap", 0.0))
            parts = [[one[b].transpose(0, 1).to(dtype) for one in (q, k, v)] for b in range(len(q))]
            made.append(torch.stack([_of_one(own, 0, *part)[0].transpose(0, 1) for part in parts]))
        return made

    inputs = [one for question in questions for one in question[:3]]
    part = FP32_GRADIENTS if draw.dtype == torch.float32 else 0.0
    return Asked(draw.describe(), ask, right, inputs, factor=3, graphs=False, part=part)


FLASH_FACES: dict[str, Face] = {
    "flash-dense": dense,
    "flash-packed": packed,
    "flash-cached": cached,
    "flash-latent": latent,
    "flash-combined": combined,
    "same-bits": same_bits,
    "at-once": at_once,
}
