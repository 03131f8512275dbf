"""Gradients of drawn questions: of some tensors or all, of the answer or the log-sum-exp, by autograd's ways."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import evoattn
from tests.fuzz.asked import HEAD_DIMS, LEAST, Asked, Draw
from tests.fuzz.formula import comparable, hides
from tests.fuzz.variants import formula_of, offset_of, variants

OURS: Any = evoattn
"""Words are drawn, of which no checker of types can say whether they fit."""
FP32_GRADIENTS = 3e-5
BY = ("grad", "grad", "grad", "backward", "twice", "checkpoint", "packed away", "thread")
"""How gradients are asked for."""
PROMISES = ("", "", "deterministic", "batch_invariant")
Attend = Callable[..., list[Tensor]]
"""From tensors to the answer, and the log-sum-exp where that is drawn."""


def differentiated(draw: Draw, inputs: list[Tensor], ours: Attend, right: Attend, words: dict[str, Any]) -> Asked:
    """The answers to `inputs`, which begin with query, key and value, and the gradients of some of them. `right` has
    them by the formula, in the dtype of what it is given. `words` are those of the call. A tensor that is there twice
    is one leaf."""
    query, lse = inputs[0], bool(words.get("return_lse"))
    shape = *query.shape[:-1], inputs[2].shape[-1]
    of_lse = query.shape[:-1] if query.dim() == 4 else (query.shape[1], query.shape[0])
    grads = [draw.numbers(*shape), *([draw.numbers(*of_lse, dtype=torch.float32)] if lse else ())]
    kind = draw.pick("gradient", "", "", "", "other strides", "expanded", "only lse" if lse else "")
    if kind == "other strides":
        grads[0] = grads[0].mT.contiguous().mT
    if kind == "expanded":
        grads[0] = draw.numbers(*(1 for _ in shape)).expand(shape)
    first = 1 if kind == "only lse" else 0
    wants = [True] * len(inputs)
    if draw.chance("some of them", 0.3):
        wants = [draw.rng.random() < 0.5 for _ in inputs]
        wants[0 if first else draw.rng.randrange(len(inputs))] = True
        draw.words["some of them"] = "".join("01"[one] for one in wants)
    by = draw.pick("by", *BY)

    def derived(attend: Attend, by: str, dtype: torch.dtype | None = None) -> list[Tensor]:
        own, leaves = [], dict[int, Tensor]()
        for one, wanted in zip(inputs, wants, strict=True):
            made = leaves.get(id(one))
            if made is None:
                made = leaves[id(one)] = one.detach().to(dtype or one.dtype)
            if wanted:
                made.requires_grad_()
            own.append(made)
        with torch.enable_grad():
            found, made_of = _by(by, attend, own, first, grads)
        answers = [found[0].detach(), *(comparable(one) for one in found[1:])]
        return [*answers, *(one.to(draw.dtype if dtype is None else dtype) for one in made_of)]

    return Asked(
        draw.describe(),
        lambda: derived(ours, by),
        lambda dtype: derived(right, "grad", dtype),
        [*inputs, *grads],
        factor=3 if words.get("softcap") or len(inputs) > 3 else 2,
        part=FP32_GRADIENTS if draw.dtype == torch.float32 else 0.0,
        least=LEAST * max(1.0, query.abs().max().item() / 4),
        same_bits=any(words.get(promise) for promise in PROMISES),
        graphs=by in ("grad", "twice"),
    )


def _said(draw: Draw, words: dict[str, Any]) -> dict[str, Any]:
    """The words, with what is asked of answers and gradients."""
    promise = draw.pick("promise", *PROMISES)
    return words | {"return_lse": draw.chance("lse", 0.4)} | ({promise: True} if promise else {})


def gradients(draw: Draw) -> Asked:
    """Of `OURS.attention`; what lies behind the keys in use is NaN."""
    q, k, v = draw.qkv()
    words, terms = variants(draw, (*q.shape[:3], k.shape[2]), q.shape[3])
    words = _said(draw, words | {"enable_gqa": True})
    if k.shape == v.shape and draw.chance("one tensor", 0.15):
        q, v = (k if q.shape == k.shape and draw.chance("of all three", 0.5) else q), k
    offset, used, behind = offset_of(words, q, k), words.get("seqused_k"), None
    if used is not None:
        behind = (torch.arange(k.shape[2], device=k.device) >= used[:, None])[:, None, :, None]
        if q is not k:
            for one in (k, v):
                one.masked_fill_(behind, math.nan)

    def ours(q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> list[Tensor]:
        answer = OURS.attention(q, k, v, **words | dict(zip(terms, own, strict=True)))
        return list(answer) if words["return_lse"] else [answer]

    def right(q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> list[Tensor]:
        if behind is not None:
            k, v = k.masked_fill(behind, 0), v.masked_fill(behind, 0)
        made = formula_of(words | dict(zip(terms, own, strict=True)), offset, q.dtype)
        return list(made.of(q, k, v))[: 1 + words["return_lse"]]

    return differentiated(draw, [q, k, v, *terms.values()], ours, right, words)


def packed_gradients(draw: Draw) -> Asked:
    """Of `OURS.attention_varlen`: some sequences have no queries, or no keys."""
    kv_heads, dim = draw.pick("kv_heads", 1, 2, 4), draw.pick("dim", *HEAD_DIMS)
    heads, count = kv_heads * draw.pick("group", 1, 2, 4), draw.pick("sequences", 1, 2, 5, 9)
    wide = draw.pick("value_dim", 64, 128) if draw.chance("other value_dim", 0.15) else dim
    most = draw.pick("most", 5, 64, 130, 300)
    rows = draw.ints(0, most, count).tolist()
    keys = rows if draw.chance("same", 0.5) else draw.ints(0, most, count).tolist()
    rows[-1], keys[-1] = max(1, rows[-1]), max(1, keys[-1])
    ends = [[sum(some[:n]) for n in range(count + 1)] for some in (rows, keys)]
    starts = [torch.tensor(one, dtype=torch.int32, device=draw.device) for one in ends]
    sizes = (rows, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, wide)
    q, k, v = (draw.placed(1, h, sum(n), width)[0].transpose(0, 1) for n, h, width in sizes)
    words, terms = variants(draw, (count, heads, max(rows), max(keys)), dim, dense=False)
    words = _said(draw, words)

    def ours(q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> list[Tensor]:
        said = words | dict(zip(terms, own, strict=True))
        answer = OURS.attention_varlen(q, k, v, *starts, max(rows), max(keys), **said)
        return list(answer) if words["return_lse"] else [answer]

    def right(q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> list[Tensor]:
        parts, sums = [], []
        for n in range(count):
            some = [
                one[a[n] : a[n + 1]].transpose(0, 1)[None] for one, a in zip((q, k, v), (ends[0], ends[1], ends[1]))
            ]
            made = formula_of(words | dict(zip(terms, own, strict=True)), keys[n] - rows[n], q.dtype)
            if not keys[n]:  # one that nobody sees
                some[1:] = (one.new_zeros(1, kv_heads, 1, one.shape[3]) for one in some[1:])
                made.change.append(hides(lambda i, j: j >= 0))
            out, lse = made.of(*some)
            parts.append(out[0].transpose(0, 1))
            sums.append(lse[0])
        return [torch.cat(parts), torch.cat(sums, 1)][: 1 + words["return_lse"]]

    return differentiated(draw, [q, k, v, *terms.values()], ours, right, words)


def _by(
    by: str, attend: Attend, own: list[Tensor], first: int, grads: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The answers, and what the answers from the `first` on give to all of `own` that want gradients."""
    wanted = list({id(one): one for one in own if one.requires_grad}.values())
    if by == "checkpoint":
        outputs = checkpoint(attend, *own, use_reentrant=False)
    elif by == "packed away":
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            outputs = attend(*own)
    else:
        outputs = attend(*own)
    # a row that sees nothing has no finite log-sum-exp, and no gradient of it
    ends = [outputs[0], *(one.masked_fill(torch.isinf(one), 0) for one in outputs[1:])][first:]
    given = [grad.to(end.dtype) for grad, end in zip(grads[first:], ends, strict=True) if end.requires_grad]
    ends = [end for end in ends if end.requires_grad]  # a log-sum-exp does not depend on value

    def made(keep: bool = False) -> list[Tensor | None]:
        return list(torch.autograd.grad(ends, wanted, given, retain_graph=keep, allow_unused=True))

    found: list[Tensor | None]
    if by == "backward":
        torch.autograd.backward(ends, given)
        found = [one.grad for one in wanted]
    elif by == "thread":
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(made).result()
    else:
        if by == "twice":
            made(True)
        found = made()
    return outputs, [torch.zeros_like(a) if g is None else g for g, a in zip(found, wanted, strict=True)]
