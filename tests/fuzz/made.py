"""The tensors of a drawn call, and the call itself. The tensors of a drawn call beside query, key and value: sinks,
biases and masks, and tables of pages."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import evoattn
from tests.fuzz.calls import Call

WILD = 1 << 30
"""No page has this number."""


def with_hidden(sinks: Tensor) -> Tensor:
    """Every third sink is -inf, as if there were none."""
    sinks[::3] = -math.inf
    return sinks


def bias(call: Call, numbers: Callable[..., Tensor], filled: bool) -> Tensor:
    """A bias or an `attn_mask` of the call, of four dimensions or fewer."""
    sizes = {"b": call.batch, "h": call.heads, "q": call.seqlen_q, "k": call.seqlen_k}
    made = numbers(*(size if name in call.bias else 1 for name, size in sizes.items()))
    if call.mask and filled:
        hidden = made > 0.5
        made = ~hidden if call.mask == "bool" else made.masked_fill(hidden, -math.inf)
    return _placed(made, call, tuple(sizes.values()))


def _placed(made: Tensor, call: Call, whole: tuple[int, ...]) -> Tensor:
    """The same numbers, lying as the call says; expanded, all that it is broadcast to."""
    if call.bias_places == "expanded":
        return made.expand(whole)
    if call.bias_places == "turned":
        return made.mT.contiguous().mT
    if call.bias_places == "odd start":
        room = made.new_empty(made.numel() + 3)
        return room[3:].view(made.shape).copy_(made)
    if call.bias_places == "fewer dimensions":
        while made.dim() > 2 and made.shape[0] == 1:
            made = made[0]
    return made


def table(call: Call, pages: int, used: Tensor, lengths: torch.Generator) -> Tensor:
    """The pages of each sequence, `[batch, most pages]`."""
    own = -(-call.seqlen_k // call.page)
    order = torch.randperm(pages, generator=lengths)[: call.batch * own].view(call.batch, own)
    if call.table == "shared":
        order = order[:1].expand(call.batch, -1).contiguous()
    if call.table == "wild":
        needed = (used.cpu().long() + call.page - 1) // call.page
        numbers = torch.tensor([WILD, -WILD]).repeat(own)[:own].expand(call.batch, -1)
        order = torch.where(torch.arange(own) >= needed[:, None], numbers, order)
    order = order.to(used.device, torch.int64 if call.table == "int64" else torch.int32)
    return order.mT.contiguous().mT if call.table == "turned" else order


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
LARGE = 20.0
"""Queries are so much longer where scores are large."""
POISON = 255
"""As every byte it is a NaN in all of the dtypes."""
BAND = 256
"""Elements around a given `out`: whole 16 bytes."""


@dataclass
class Made:
    """`q`, `k` and `v` as the call takes them: [batch, heads, rows, dim] of `attention`, [batch, rows, heads, dim] and
    caches of pages of `attention_paged`, [rows of all, heads, dim] of `attention_varlen`, with such caches of
    `attention_mixed`.

    `used`: keys of each batch of a cache; `starts`: where packed sequences begin, queries' and keys'."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    bias: Tensor | None = None
    used: Tensor | None = None
    table: Tensor | None = None
    starts: tuple[Tensor, Tensor] | None = None
    longest: tuple[int, int] = (0, 0)
    room: Tensor | None = None
    """The memory around `out`."""
    out: Tensor | None = None

    @property
    def inputs(self) -> list[Tensor]:
        """That no call may change."""
        own = (self.q, self.k, self.v, self.sinks, self.slopes, self.bias, self.used, self.table, *(self.starts or ()))
        return [tensor for tensor in own if tensor is not None]


class Maker:
    """Makes the tensors of a call on a device; `filled=False` leaves large ones as they come, for their shapes only."""

    def __init__(self, call: Call, device: str, filled: bool = True) -> None:
        self.call, self.device, self.filled = call, device, filled
        self.dtype = DTYPES[call.dtype]
        self.generator = torch.Generator(device).manual_seed(call.seed)
        self.lengths = torch.Generator().manual_seed(call.seed)

    def made(self) -> Made:
        """All of them."""
        call = self.call
        made = {"attention": self._plain, "paged": self._paged, "varlen": self._varlen, "mixed": self._mixed}[call.op]()
        if call.sink:
            made.sinks = with_hidden(self._numbers(call.heads))
        if call.alibi:
            made.slopes = torch.linspace(0.01, 0.5, call.heads, device=self.device)
        if call.bias:
            made.bias = bias(call, self._numbers, self.filled)
        if self.filled:
            self._special(made)
        self._give_out(made)
        return made

    def _numbers(self, *shape: int) -> Tensor:
        if not self.filled:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device=self.device).to(self.dtype)

    def _ints(self, low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high + 1, (count,), generator=self.lengths).tolist()

    def _placed(self, batch: int, heads: int, rows: int, dim: int, kv: bool) -> Tensor:
        """[batch, heads, rows, dim], lying as the call says."""
        places = self.call.places
        if places == "bshd":
            return self._numbers(batch, rows, heads, dim).transpose(1, 2)
        if places == "sbhd":
            return self._numbers(rows, batch, heads, dim).permute(1, 2, 0, 3)
        if places == "wide":
            return self._numbers(batch, heads, rows, dim + 16)[..., :dim]
        if places == "every other":
            return self._numbers(batch, heads, 2 * rows, dim)[:, :, ::2]
        if places in ("late", "odd start"):
            start = 64 if places == "late" else 3
            whole = self._numbers(start + batch * heads * rows * dim)
            return whole[start:].view(batch, heads, rows, dim)
        if places == "expanded" and kv:
            return self._numbers(1, heads, rows, dim).expand(batch, -1, -1, -1)
        if places == "expanded heads" and kv:
            return self._numbers(batch, 1, rows, dim).expand(-1, heads, -1, -1)
        if places == "expanded rows" and kv:
            return self._numbers(batch, heads, 1, dim).expand(-1, -1, rows, -1)
        if places == "expanded columns" and kv:
            return self._numbers(batch, heads, rows, 1).expand(-1, -1, -1, dim)
        if places == "columns":
            return self._numbers(batch, heads, dim, rows).transpose(2, 3)
        return self._numbers(batch, heads, rows, dim)

    def _qkv(self, batch: int, rows_q: int, rows_k: int) -> tuple[Tensor, Tensor, Tensor]:
        call = self.call
        if call.places == "fused" and rows_q == rows_k and call.head_dim == call.value_dim:
            heads = call.heads, call.kv_heads, call.kv_heads
            fused = self._numbers(batch, rows_q, sum(heads), call.head_dim).transpose(1, 2)
            q, k, v = fused.split(heads, dim=1)
            return q, k, v
        return (
            self._placed(batch, call.heads, rows_q, call.head_dim, False),
            self._placed(batch, call.kv_heads, rows_k, call.head_dim, True),
            self._placed(batch, call.kv_heads, rows_k, call.value_dim, True),
        )

    def _used(self) -> Tensor:
        call = self.call
        lengths = self._ints(0, call.seqlen_k, call.batch)
        longest = [call.seqlen_k, *lengths[1:]][: call.batch]
        return torch.tensor(longest, dtype=torch.int32, device=self.device)

    def _plain(self) -> Made:
        made = Made(*self._qkv(self.call.batch, self.call.seqlen_q, self.call.seqlen_k))
        if self.call.seqused:
            made.used = self._used()
        return made

    def _paged(self) -> Made:
        call = self.call
        pages = call.batch * -(-call.seqlen_k // call.page) + 3
        q = self._placed(call.batch, call.seqlen_q, call.heads, call.head_dim, False)
        k = self._placed(pages, call.page, call.kv_heads, call.head_dim, True)
        v = self._placed(pages, call.page, call.kv_heads, call.value_dim, True)
        used = self._used()
        return Made(q, k, v, used=used, table=table(call, pages, used, self.lengths))

    def _mixed(self) -> Made:
        """Some of the batches have one query, some none."""
        call, made = self.call, self._paged()
        most = [(1, 1, 0, call.seqlen_q)[kind] for kind in self._ints(0, 3, call.batch)]
        queries = [min(length, end) for length, end in zip(self._ints(0, call.seqlen_q, call.batch), most, strict=True)]
        queries[-1] = max(1, queries[-1])
        made.q = self._placed(1, sum(queries), call.heads, call.head_dim, False)[0]
        starts = torch.tensor([0, *queries]).cumsum(0).to(self.device, torch.int32)
        made.starts, made.longest = (starts, starts), (call.seqlen_q, 0)
        return made

    def _varlen(self) -> Made:
        call = self.call
        queries = self._ints(0, call.seqlen_q, call.batch)
        keys = queries if call.seqlen_q == call.seqlen_k else self._ints(0, call.seqlen_k, call.batch)
        queries[-1], keys[-1] = max(1, queries[-1]), max(1, keys[-1])  # tensors of no row are another matter
        q, k, v = (t[0].transpose(0, 1) for t in self._qkv(1, sum(queries), sum(keys)))
        starts = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (queries, keys)]
        first, second = (one.to(self.device) for one in starts)
        return Made(q, k, v, starts=(first, second), longest=(call.seqlen_q, call.seqlen_k))

    def _special(self, made: Made) -> None:
        """Scores that need rescaling, or are all the same; what lies behind the keys in use is NaN."""
        call = self.call
        if call.numbers == "large":
            made.q *= LARGE
        own = call.op == "attention" and not call.places.startswith("expanded")
        if call.numbers == "late key" and own:
            made.k[:, :, -1] *= LARGE
        if call.numbers == "equal keys" and own:
            made.k.copy_(made.k[:, :, :1].clone())
        if call.numbers in ("nan", "inf") and made.k.shape[0]:
            made.k[0, 0, call.seqlen_k // 2, 1] = float(call.numbers)
        if made.used is not None and own:
            behind = torch.arange(call.seqlen_k, device=self.device) >= made.used[:, None]
            for tensor in (made.k, made.v):
                tensor.masked_fill_(behind[:, None, :, None], math.nan)

    def _give_out(self, made: Made) -> None:
        """`out` in the midst of poisoned memory."""
        call = self.call
        if call.out == "query":
            made.out = made.q
        elif call.out:
            shape = *made.q.shape[:-1], call.value_dim
            size = math.prod(shape) * (2 if call.out == "every other column" else 1)
            made.room = torch.empty(BAND + size + BAND, dtype=self.dtype, device=self.device)
            made.out = within(made.room, shape, call.out)


def within(room: Tensor, shape: tuple[int, ...], out: str) -> Tensor:
    """The tensor between the bands of `room`; in another order of dimensions two by two, or every other column."""
    inner = room[BAND:-BAND]
    *front, a, b, dim = shape
    if out == "every other column":
        return inner.view(*front, a, b, 2 * dim)[..., ::2]
    return inner.view(shape) if out != "other order" else inner.view(*front, b, a, dim).transpose(-3, -2)


def called(call: Call, made: Made, strict: bool, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The answer of the op, and the log-sum-exp where the call wants it."""
    common: dict[str, Any] = {"softcap": call.softcap, "sinks": made.sinks, "alibi_slopes": made.slopes, "out": out}
    common["strict"] = strict
    if call.op == "paged":
        assert made.table is not None and made.used is not None
        words = common | {"causal": call.is_causal, "scale": call.scale, "window": call.window}
        words["return_lse"] = call.lse
        answer = evoattn.attention_paged(made.q, made.k, made.v, made.table, made.used, **words)
        return answer if isinstance(answer, tuple) else (answer, None)
    if call.op == "mixed":
        assert made.starts is not None and made.table is not None and made.used is not None
        words = common | {"causal": call.is_causal, "scale": call.scale, "window": call.window, "return_lse": call.lse}
        pages = made.k, made.v, made.table, made.used
        answer = evoattn.attention_mixed(made.q, *pages, made.starts[0], made.longest[0], **words)
        return answer if isinstance(answer, tuple) else (answer, None)
    if call.op == "varlen":
        assert made.starts is not None
        words = common | {"causal": call.is_causal, "scale": call.scale, "window": call.window}
        answer = evoattn.attention_varlen(
            made.q, made.k, made.v, *made.starts, *made.longest, return_lse=call.lse, **words
        )
    else:
        words = common | {"causal": call.is_causal and call.causal, "scale": call.scale}
        words |= {"window": call.window, "seqused_k": made.used, "return_lse": call.lse, "enable_gqa": True}
        words["attn_mask" if call.mask else "bias"] = made.bias
        answer = evoattn.attention(made.q, made.k, made.v, **words)
    return answer if isinstance(answer, tuple) else (answer, None)


def explained(call: Call, made: Made) -> str:
    """What `evoattn.explain` says of the call."""
    words: dict[str, Any] = {"softcap": call.softcap, "sinks": made.sinks, "alibi_slopes": made.slopes}
    words |= {"causal": call.is_causal, "scale": call.scale, "window": call.window, "return_lse": call.lse}
    if call.op == "mixed" and made.starts is not None:
        words |= {"block_table": made.table, "seqused_k": made.used, "cu_seqlens_q": made.starts[0]}
        words["max_seqlen_q"] = made.longest[0]
    elif made.starts is not None:
        words |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), made.starts, strict=True))
        words |= dict(zip(("max_seqlen_q", "max_seqlen_k"), made.longest, strict=True))
    elif made.table is not None:
        words |= {"block_table": made.table, "seqused_k": made.used}
    else:
        words |= {"seqused_k": made.used, "causal": call.is_causal and call.causal, "enable_gqa": True}
        words["attn_mask" if call.mask else "bias"] = made.bias
    return evoattn.explain(made.q, made.k, made.v, **words)
