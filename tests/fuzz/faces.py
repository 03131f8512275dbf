"""The faces of evoattn beside plain calls, each drawn over its arguments: expressions, FlexAttention's language, 8
bits."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import evoattn
from tests.fuzz.asked import Asked, Draw
from tests.fuzz.formula import Formula, comparable
from tests.fuzz.training import FP32_GRADIENTS, differentiated, gradients, packed_gradients
from tests.fuzz.variants import band, formula_of, offset_of

Face = Callable[[Draw], Asked]
OURS: Any = evoattn
"""Words are drawn, of which no checker of types can say whether they fit."""


def _scores(draw: Draw, q: Tensor, k: Tensor) -> tuple[str, dict[str, Tensor]]:
    """An expression and its tables, which is PyTorch's too when its functions are."""
    batch, heads, rows = q.shape[:3]
    keys = k.shape[2]
    tables = {
        "rel": draw.numbers(heads, rows + keys, dtype=torch.float32),
        "gate": draw.numbers(heads, dtype=draw.pick("gate", torch.float16, torch.float32, torch.bfloat16)).abs(),
        "doc": draw.ints(0, 3, batch, max(rows, keys)),
        "pad": draw.ints(0, 1, batch, keys).bool(),
        "lens": draw.ints(0, keys, batch),
        "far": draw.numbers(heads, 17),
    }
    texts = (
        "s + rel[h, q + k] * gate[h]",
        "where(doc[b, q] == doc[b, k], s, s - 1.5)",
        "where((k < lens[b]) | (k == 0), s * gate[h], -inf)",
        "s + far[h, (3 * q + k) % 17]",
        "s - gate[h] * log(1 + abs(q - k))",
        "min(max(s, -2), 3) + sin(k * 0.1)",
        "where((q // 5) == (k // 7), s, s - 0.25 * h)",
        "s * exp(0 - abs(s)) + sqrt(abs(q - k) + b)",
        "where(pad[b, k] & ((q - k) % 3 != 1), tanh(s) * 4, s)",
        "where((q >> 4) == (k >> 4), s, where(k < 4, s + 1, -inf))",
        "s + far[h, whole(floor(min(16, abs(q - k) / 9)))]",
        "s + erf(s) * pow(gate[h], 2)",
    )
    text = draw.pick("score", *texts)
    return text, {name: one for name, one in tables.items() if f"{name}[" in text}


def _as_tensor(x: Any, like: Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x, device=like.device, dtype=like.dtype)


def _evaluated(text: str, tables: dict[str, Tensor], s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
    """The value of an expression by Python's own reading of it, apart from evoattn's."""

    def where(c: Any, x: Any, y: Any) -> Tensor:
        return torch.where(c, _as_tensor(x, s), _as_tensor(y, s))

    names: dict[str, Any] = dict(
        where=where,
        inf=math.inf,
        exp=torch.exp,
        log=torch.log,
        sqrt=torch.sqrt,
        tanh=torch.tanh,
        sin=torch.sin,
        erf=torch.erf,
        pow=torch.pow,
        floor=torch.floor,
        whole=lambda x: x.long(),
        min=lambda x, y: torch.minimum(_as_tensor(x, y) if isinstance(y, Tensor) else x, _as_tensor(y, x)),
        max=lambda x, y: torch.maximum(_as_tensor(x, y) if isinstance(y, Tensor) else x, _as_tensor(y, x)),
        abs=torch.abs,
        s=s,
        b=b,
        h=h,
        q=q,
        k=k,
    )
    wide = {name: one.to(s.dtype) if one.is_floating_point() else one for name, one in tables.items()}
    return eval(text, names | wide)  # torch imports by the caller's builtins


def expressions(draw: Draw) -> Asked:
    """`evoattn.Score`, beside other variants, with gradients now and then, of tables too."""
    q, k, v = draw.qkv()
    text, tables = _scores(draw, q, k)
    words: dict[str, Any] = {"causal": draw.pick("causal", None, "lower_right", "upper_left"), "enable_gqa": True}
    if draw.chance("capped", 0.2):
        words["softcap"] = 10.0
    offset, made_once = offset_of(words, q, k), evoattn.Score(text, **tables)

    def formula(q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> list[Tensor]:
        now = tables | dict(zip(terms, own, strict=True))
        made = formula_of(words | {"causal": None}, offset, q.dtype)
        made.change.append(lambda s, b, h, i, j: _evaluated(text, now, s, b, h, i, j))
        if words["causal"]:
            made.change.append(band(offset, True, None))
        return [made.of(q, k, v)[0]]

    def ours(q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> list[Tensor]:
        score = evoattn.Score(text, **tables | dict(zip(terms, own, strict=True))) if own else made_once
        return [OURS.attention(q, k, v, score=score, **words)]

    if draw.chance("gradients", 0.4):
        for name, one in tables.items():
            if one.is_floating_point() and one.dtype != torch.float32:  # its gradient is rounded to its dtype
                tables[name] = one.to(draw.dtype)
        terms = {name: one for name, one in tables.items() if one.is_floating_point()}
        return differentiated(draw, [q, k, v, *terms.values()], ours, formula, words)
    terms = {}
    return Asked(
        draw.describe(),
        lambda: ours(q, k, v),
        lambda dtype: formula(*(one.to(dtype) for one in (q, k, v))),
        [q, k, v, *tables.values()],
        factor=3,
        part=FP32_GRADIENTS if draw.dtype == torch.float32 else 0.0,
    )


def flex(draw: Draw) -> Asked:
    """FlexAttention's language: functions of this file, lists of either maker."""
    q, k, v = draw.qkv()
    (batch, heads, rows, _), keys = q.shape, k.shape[2]
    n = max(rows, keys)
    doc, lens = draw.ints(0, 3, n).sort().values, draw.ints(0, keys, batch)
    slopes, far = draw.numbers(heads, dtype=torch.float32).abs(), draw.numbers(heads, 33, dtype=torch.float32)
    side, cap = draw.pick("side", 3, 40, 150), draw.pick("cap", 0.5, 2.0)
    mods: dict[str, Any] = {
        "none": None,
        "sigmoid": lambda s, b, h, i, j: s * torch.sigmoid(s),
        "slopes": lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(),
        "buckets": lambda s, b, h, i, j: s + far[h, torch.clamp((j - i) // 4 + 16, 0, 32)],
        "clamped": lambda s, b, h, i, j: torch.clamp(s, -cap, 2 * cap),
        "where": lambda s, b, h, i, j: torch.where((i // 5) == (j // 7), s, s - cap),
        "hides": lambda s, b, h, i, j: torch.where((j < lens[b]) | (j == i), s, -float("inf")),
        "wave": lambda s, b, h, i, j: s + cap * torch.sin(j * 0.1) - b,
        "squared": lambda s, b, h, i, j: 0.1 * s * s - torch.relu(s) / (1 + h),
        "capped": lambda s, b, h, i, j: 20.0 * torch.tanh(s / 20.0),
    }
    masks: dict[str, Any] = {
        "none": None,
        "causal": lambda b, h, i, j: i >= j,
        "documents": lambda b, h, i, j: (doc[i] == doc[j]) & (i >= j),
        "prefix": lambda b, h, i, j: (j < lens[b]) | (i >= j),
        "band": lambda b, h, i, j: (i - j).abs() <= side,
        "holes": lambda b, h, i, j: ((i - j) % 3 != 1) & (i + side >= j),
        "heads": lambda b, h, i, j: (h % 2 == 0) | (i - j < side) & (j <= i),
        "blocks": lambda b, h, i, j: ((i // 32) == (j // 32)) | (j < 4),
        "nothing": lambda b, h, i, j: j > i + keys,
        "chunks": lambda b, h, i, j: (i // side == j // side) & (j <= i),
    }
    score_name, mask_name = draw.pick("score_mod", *mods), draw.pick("mask_mod", *masks)
    score_mod, mask_mod = mods[score_name], masks[mask_name]
    block = draw.pick("block", 128, 128, 64, (64, 32), 16)
    maker = draw.pick("maker", OURS.create_block_mask, torch_flex.create_block_mask)
    draw.words["maker"] = maker.__module__.split(".")[0]
    derive, lse = draw.chance("gradients", 0.35), draw.chance("lse", 0.4)
    of_batch = batch if "[b]" in mask_name or mask_name == "prefix" else None
    mask = None
    if mask_mod:
        sizes = of_batch, heads if mask_name == "heads" else None, rows, keys
        mask = maker(mask_mod, *sizes, device=draw.device, BLOCK_SIZE=block)
    grad = draw.numbers(*q.shape[:-1], v.shape[-1])

    def asked(attend: Any, dtype: torch.dtype) -> list[Tensor]:
        own = [one.detach().to(dtype).requires_grad_(derive) for one in (q, k, v)]
        with torch.set_grad_enabled(derive):
            out, *sums = attend(*own)
            made = [out.detach(), *(torch.autograd.grad(out, own, grad.to(dtype)) if derive else ())]
            return [*made, *(comparable(one) for one in sums)]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out = OURS.flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_lse=lse)
        return out if lse else (out,)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Any:
        made = Formula()
        if score_mod:
            made.change.append(score_mod)
        if mask_mod:
            made.change.append(lambda s, b, h, i, j: s.masked_fill(~mask_mod(b, h, i, j), -math.inf))
        return made.of(q, k, v)[: 1 + lse]

    return Asked(
        draw.describe(),
        lambda: asked(ours, draw.dtype),
        lambda dtype: asked(formula, dtype),
        [q, k, v, doc, lens, slopes, far],
        factor=3,
        part=FP32_GRADIENTS if draw.dtype == torch.float32 else 0.0,
        same_bits=False,  # a faster kernel may be ready between two runs
        graphs=False,
    )


def eight_bit_cache(draw: Draw) -> Asked:
    """16-bit queries over keys and values of 8 bits, in one piece or in pages."""
    draw.dtype = draw.pick("dtype", torch.float16, torch.bfloat16)
    batch, heads, kv_heads, rows, keys, dim = draw.shape()
    rows = draw.pick("rows", 1, 1, 2, rows)
    q = draw.numbers(batch, heads, rows, dim)
    k, v = draw.numbers(batch, kv_heads, keys, dim), draw.numbers(batch, kv_heads, keys, dim)
    kind = draw.pick("kind", torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    granularity = draw.pick("granularity", "tensor", "head", "token")
    k8, v8, k_scale, v_scale = OURS.quantize_kv(k, v, kind, granularity)
    words: dict[str, Any] = {"causal": draw.pick("causal", None, "lower_right"), "softcap": draw.pick("cap", 0, 0, 9.0)}
    words["window"] = draw.pick("window", None, None, (50, 0))
    if draw.chance("sinks", 0.2):
        words["sinks"] = draw.numbers(heads)

    def scaled(one: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        shaped = scale[(...,) + (None,) * (4 - scale.dim())] if scale.dim() > 1 else scale
        return one.double().mul(shaped.double()).to(dtype)

    def right(dtype: torch.dtype) -> list[Tensor]:
        made = formula_of(words, keys - rows, dtype)
        return [made.of(q.to(dtype), scaled(k8, k_scale, dtype), scaled(v8, v_scale, dtype))[0]]

    def ask() -> list[Tensor]:
        return [OURS.attention(q, k8, v8, enable_gqa=True, k_scale=k_scale, v_scale=v_scale, **words)]

    inputs = [q, k8, v8, k_scale, v_scale]
    if draw.chance("paged", 0.4):
        page = draw.pick("page", 1, 8, 16, 64, 256)
        used = draw.ints(0, keys, batch)
        used[0] = keys
        own = -(-keys // page)
        order = torch.randperm(batch * own + 1, generator=draw.generator)[: batch * own].view(batch, own)
        table = order.to(draw.device, torch.int32)

        def pages(one: Tensor) -> Tensor:
            room = one.new_zeros((batch * own + 1, page, *one.shape[1:2], *one.shape[3:]))
            for b in range(batch):
                for n in range(own):
                    some = one[b, :, n * page : (n + 1) * page].transpose(0, 1)
                    room[order[b, n], : len(some)] = some
            return room

        k_pages, v_pages = (pages(one.view(torch.uint8)).view(kind) for one in (k8, v8))
        scales = {}
        for name, one in (("k_scale", k_scale), ("v_scale", v_scale)):
            scales[name] = pages(one) if granularity == "token" else one

        def ask() -> list[Tensor]:
            out = OURS.attention_paged(q.transpose(1, 2), k_pages, v_pages, table, used, **scales, **words)
            return [out.transpose(1, 2)]

        def right(dtype: torch.dtype) -> list[Tensor]:
            whole = torch.zeros_like(q, dtype=dtype)
            for b, n in enumerate(used.tolist()):
                if n:
                    made = formula_of(words, n - rows, dtype)
                    one = slice(b, b + 1)
                    keys_of, values_of = scaled(k8, k_scale, dtype)[one, :, :n], scaled(v8, v_scale, dtype)[one, :, :n]
                    whole[one] = made.of(q[one].to(dtype), keys_of, values_of)[0]
            return [whole]

    return Asked(draw.describe(), ask, right, inputs, factor=3)


def eight_bits(draw: Draw) -> Asked:
    """`attention_fp8`, beside the formula with numbers and weights that are rounded to 8 bits."""
    draw.dtype = draw.pick("dtype", torch.float16, torch.bfloat16, torch.float32)
    q, k, v = draw.qkv(value_dims=False)
    words: dict[str, Any] = {"causal": draw.pick("causal", None, "upper_left", "lower_right")}
    words["smooth_k"] = draw.chance("smooth", 0.3)
    if not words["smooth_k"]:
        words["softcap"] = draw.pick("cap", 0.0, 0.0, 20.0)
    words["window"] = draw.pick("window", None, None, (64, 0))

    def rounded(one: Tensor) -> Tensor:
        largest = one.abs().amax((-1, -2), keepdim=True) / 448
        scale = torch.where(largest > 0, largest, 1)
        return (one / scale).to(torch.float8_e4m3fn).to(torch.float64) * scale

    def right(dtype: torch.dtype) -> list[Tensor]:
        made = formula_of(words, offset_of(words, q, k), torch.float64)
        if dtype == torch.float64:
            return [made.of(q.double(), k.double(), v.double())[0]]
        low = made.of(rounded(q.double()), rounded(k.double()), rounded(v.double()))[0]
        return [low + 0.04 * low.abs().max() * torch.sign(low)]

    def ask() -> list[Tensor]:
        out = OURS.attention_fp8(q, k, v, **words)
        return [out]

    return Asked(draw.describe(), ask, right, [q, k, v], factor=3)


def quantised(draw: Draw) -> Asked:
    """`quantize_kv`, beside what it makes on a CPU: the same bits."""
    draw.dtype = draw.pick("dtype", torch.float16, torch.bfloat16, torch.float32)
    batch, _, kv_heads, _, keys, dim = draw.shape()
    k, v = draw.placed(batch, kv_heads, keys, dim), draw.placed(batch, kv_heads, keys, dim)
    if draw.chance("zeros", 0.2):
        k.zero_()
    if draw.chance("nan", 0.2):
        v[0, 0, 0, 0] = math.nan
        k[0, 0, -1, 1] = -math.inf
    kind = draw.pick("kind", torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    granularity = draw.pick("granularity", "tensor", "head", "block", "token")
    turned = granularity != "token" and draw.chance("turned", 0.3)

    def ask() -> list[Tensor]:
        return [one.float() for one in OURS.quantize_kv(k, v, kind, granularity, turned)]

    def right(dtype: torch.dtype) -> list[Tensor]:
        made = OURS.quantize_kv(k.cpu(), v.cpu(), kind, granularity, turned)
        return [one.float().to(k.device, dtype if dtype == torch.float64 else torch.float32) for one in made]

    return Asked(draw.describe(), ask, right, [k, v], exactly=True)


FACES: dict[str, Face] = {
    "gradients": gradients,
    "packed-gradients": packed_gradients,
    "expressions": expressions,
    "flex": flex,
    "8-bit-cache": eight_bit_cache,
    "8-bits": eight_bits,
    "quantised": quantised,
}
