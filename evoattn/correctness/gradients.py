"""The exact gradients of attention, a few heads and rows at a time, and what honest arithmetic may make of them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from evoattn.correctness import sequences, terms
from evoattn.correctness.sequences import with_pairs
from evoattn.correctness.terms import torch_dtype
from evoattn.model.backward import MADE, parse_grads
from evoattn.model.problem import AttentionProblem
from evoattn.model.score import SCORE, Load, Number, Tree, derivative, elements, evaluate

Tensors = dict[str, torch.Tensor]
SCORES_AT_ONCE = 1 << 26
"""Scores of a chunk, of which five matrices are held at a time."""


@dataclass(frozen=True)
class Chunk:
    """Some query rows of some heads of a sequence, which share one K/V head, in the dtype of the arithmetic."""

    problem: AttentionProblem
    """Of the sequence: its keys are all in use."""
    place: tuple[int, slice, slice]
    """`[batch, heads, rows]` of Q among all."""
    keys: slice
    """Rows of K and V among all."""
    rows: slice
    """Of the sequence."""
    added: terms.Terms
    query: torch.Tensor
    """`[heads, rows, D]`."""
    key: torch.Tensor
    value: torch.Tensor
    """`[keys, D]`."""
    given: Tensors
    """`do` `[heads, rows, Dv]`, `delta` and `lse` `[heads, rows]`, and `dlse` if there is one."""

    @property
    def scaled(self) -> torch.Tensor:
        """Q times the scale of the softmax."""
        return self.added.scaled(self.query)

    def slope(self, tree: Tree, scores: torch.Tensor | float, by: Load | None = None) -> torch.Tensor | float:
        """The derivative of an expression, by the score or by an element of a table, where the scores are these."""
        slope = derivative(tree, by)
        if isinstance(slope, Number):
            return float(slope.value)
        found: torch.Tensor = evaluate(slope, {**self.added.values, SCORE: scores}, torch)
        return found


@dataclass
class Gradients:
    """Those of one way to compute them, by name, `[batch, heads, rows, dim]`."""

    values: Tensors
    bounds: Tensors = field(default_factory=dict)
    """The sums of the magnitudes of all that each is a sum of, by which a relative error of P is multiplied."""


def attend(
    problem: AttentionProblem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward pass in `dtype`, float32 or float64: o and the natural log-sum-exp, of `problem.shape("o")` and
    `lse_shape`; a row that sees no key has 0 and -inf, or the logarithm of its sink alone."""
    device = tensors["q"].device
    o = torch.zeros(problem.shape("o"), dtype=dtype, device=device)
    lse = torch.full(problem.lse_shape, -math.inf, dtype=dtype, device=device)
    if problem.sink:
        lse.copy_(tensors["sinks"].to(dtype)[None, :, None])
    for chunk in _chunks(problem, tensors, {}, dtype, SCORES_AT_ONCE):
        scores = chunk.added.apply(chunk.scaled @ chunk.key.T)
        sums = torch.logsumexp(chunk.added.summed(scores), -1)
        weights = (scores - sums[..., None]).exp().masked_fill(torch.isneginf(scores), 0)
        o[chunk.place] = weights.to(dtype) @ chunk.value
        lse[chunk.place] = sums.to(dtype)
    return o, lse


def exact_gradients(
    problem: AttentionProblem,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    scores_at_once: int = SCORES_AT_ONCE,
) -> Gradients:
    """The gradients of the problem's outputs in `dtype`, float32 or float64, as functions of all its inputs: `o` and
    `lse` are taken as they are given, so that they may be those of more keys than these.

    With P = exp(S - lse), dP = dO Vᵀ and delta = Σ dO · O - dlse it is dS = P (dP - delta) times the derivative of what
    is done to scores, and dV = Pᵀ dO, dQ = dS K · scale, dK = dSᵀ Q · scale (FlashAttention 2, section 2.3)."""
    given = _given(problem, tensors, dtype)
    made, bounds = (_zeros(problem, dtype, tensors["q"].device) for _ in range(2))
    for chunk in _chunks(problem, tensors, given, dtype, scores_at_once):
        raw = chunk.scaled @ chunk.key.T
        scores = chunk.added.apply(raw)
        lse, delta = (chunk.given[name][..., None] for name in ("lse", "delta"))
        weights = (scores - lse).exp().masked_fill(torch.isneginf(scores), 0).to(dtype)  # log(q - k) is float64
        products = chunk.given["do"] @ chunk.value.T
        _add(made, chunk, weights, weights * (products - delta), raw)
        _add(bounds, chunk, weights, weights * (products.abs() + delta.abs()), raw, magnitudes=True)
    of_sinks = _of_sinks(problem, tensors, given, dtype)
    return Gradients(_finished(problem, made, of_sinks), _finished(problem, bounds, of_sinks.abs()))


def gradients_of_torch(problem: AttentionProblem, tensors: Mapping[str, torch.Tensor], whole: bool = True) -> Gradients:
    """The gradients as torch's autograd computes them in the problem's dtype: scores, weights, dP and dS are rounded to
    it, all sums are float32. `whole`: the keys are all that `o` and `lse` are of, so that delta is Σ P dP, as autograd
    has it. In float32 it is the formula of `exact_gradients`."""
    dtype = torch_dtype(problem)
    if problem.dtype == "fp32":
        return exact_gradients(problem, tensors, dtype)
    given = _given(problem, tensors, torch.float32)
    made = _zeros(problem, torch.float32, tensors["q"].device)
    for chunk in _chunks(problem, tensors, given | {"do": tensors["do"]}, dtype, SCORES_AT_ONCE):
        raw = chunk.scaled @ chunk.key.T
        scores = chunk.added.apply(raw)
        extended = chunk.added.summed(scores)
        hidden = torch.isneginf(scores)
        weights = torch.softmax(extended, -1)[..., : scores.shape[-1]].masked_fill(hidden, 0)
        products, delta = (chunk.given["do"] @ chunk.value.T).float(), chunk.given["delta"]
        if whole:
            delta = (weights.float() * products).sum(-1) - chunk.given.get("dlse", 0)
        else:
            sums = torch.logsumexp(extended.float(), -1)
            share = (sums - chunk.given["lse"]).exp().masked_fill(torch.isneginf(sums), 0)
            weights = (weights * share[..., None]).to(scores.dtype)
        shifts = (weights.float() * (products - delta[..., None])).to(scores.dtype)
        _add(made, chunk, weights.to(dtype), shifts, raw)
    return Gradients(_finished(problem, made, _of_sinks(problem, tensors, given, dtype)))


def _given(problem: AttentionProblem, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Tensors:
    """The inputs that the forward pass lacks, and what each row subtracts from dP."""
    given = {name: tensors[name].to(dtype) for name in ("do", "lse", "dlse") if name in tensors}
    given["delta"] = (given["do"] * tensors["o"].to(dtype)).sum(-1) - given.get("dlse", 0)
    return given


def _zeros(problem: AttentionProblem, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Of all gradients, V's apart from K's."""
    shapes: dict[str, tuple[int, ...]] = {name: problem.shape(name) for name in MADE}
    shapes |= {f"d{name}": problem.term_shapes[name] for name in parse_grads(problem.grads)}
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}


def _finished(problem: AttentionProblem, made: Tensors, of_sinks: torch.Tensor) -> Tensors:
    """The gradients of the problem's outputs; `of_sinks` is what each row adds to that of the sinks."""
    if problem.shared_kv:
        made["dk"][..., : problem.head_dim_v] += made.pop("dv")
    if "dsinks" in made:
        made["dsinks"] = of_sinks.sum((0, 2))
    return made


def _of_sinks(
    problem: AttentionProblem, tensors: Mapping[str, torch.Tensor], given: Tensors, low: torch.dtype
) -> torch.Tensor:
    """What each row adds to the gradient of its head's sink, `[batch, heads, rows]`: the sink's weight, in `low`, by
    what is subtracted from a dP of 0; nothing of rows that are nobody's."""
    lse, sinks = given["lse"], tensors.get("sinks")
    if sinks is None:
        return torch.zeros_like(lse)
    column = sinks.to(lse.dtype)[None, :, None]
    share = (column - lse).exp().masked_fill(torch.isneginf(column) | torch.isneginf(lse), 0)
    of_rows = -share.to(low).to(lse.dtype) * given["delta"]
    of_rows[:, :, : sequences.rows_of_nobody(tensors, "cu_seqlens_q")] = 0
    return of_rows


def _chunks(
    problem: AttentionProblem,
    tensors: Mapping[str, torch.Tensor],
    given: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    scores_at_once: int,
) -> Iterator[Chunk]:
    """All chunks that have keys, of no more than `scores_at_once` scores or one row."""
    q, k, v = terms.qkv(problem, dict(tensors))
    for one in with_pairs(problem, tensors):
        alone, others = (one.alone(problem), one.inputs(tensors)) if problem.varlen else (problem, tensors)
        for b in range(alone.batch):
            own, (keys, values) = sequences.sequence(alone, b, others, k[:, :, one.keys], v[:, :, one.keys])
            if own is None:
                continue
            place = slice(one.keys.start, one.keys.start + own.seqlen_k)
            for heads, rows in _parts(own, scores_at_once):
                at = b, heads, slice(one.queries.start + rows.start, one.queries.start + rows.stop)
                key, value = (tensor[heads.start // own.group_size].to(dtype) for tensor in (keys, values))
                added = terms.terms_of(own, others, b, heads, rows, q.device)
                parts = {name: tensor[at] for name, tensor in given.items()}
                yield Chunk(own, at, place, rows, added, q[at].to(dtype), key, value, parts)


def _parts(problem: AttentionProblem, scores_at_once: int) -> Iterator[tuple[slice, slice]]:
    """(heads, rows) of each chunk of a batch: heads of one group."""
    group = problem.group_size
    rows = max(1, min(problem.seqlen_q, scores_at_once // problem.seqlen_k))
    heads = max(1, min(group, scores_at_once // (problem.seqlen_k * rows)))
    for first in range(0, problem.heads, group):
        for head in range(first, first + group, heads):
            for row in range(0, problem.seqlen_q, rows):
                yield slice(head, min(head + heads, first + group)), slice(row, min(row + rows, problem.seqlen_q))


def _add(
    made: Tensors,
    chunk: Chunk,
    weights: torch.Tensor,
    shifts: torch.Tensor,
    raw: torch.Tensor,
    magnitudes: bool = False,
) -> None:
    """Add what a chunk gives, of its P, its dS by the changed scores and its scaled scores; `magnitudes`: of all
    factors."""

    own, (batch, heads, _) = chunk.problem, chunk.place
    kv_head, dtype = heads.start // own.group_size, chunk.query.dtype
    if problem_grads := parse_grads(own.grads):
        before = (
            raw if own.own_score is None else evaluate(own.scoring.named, {**chunk.added.values, SCORE: raw}, torch)
        )
        for name in problem_grads:
            _add_term(made, name, chunk, before, shifts, magnitudes)
    slope = chunk.slope(own.scoring.whole, raw)
    moved = _times(shifts, slope, magnitudes).to(dtype)
    factors = chunk.scaled, chunk.key, chunk.given["do"]
    query, key, do = (x.abs() for x in factors) if magnitudes else factors
    parts = {"dk": moved.mT @ query, "dv": weights.mT @ do}
    made["dq"][chunk.place] = chunk.added.scaled(moved @ key).to(made["dq"].dtype)
    for name, part in parts.items():
        made[name][batch, kv_head, chunk.keys] += part.to(made[name].dtype).sum(0)


def _add_term(
    made: Tensors, name: str, chunk: Chunk, before: torch.Tensor, shifts: torch.Tensor, magnitudes: bool
) -> None:
    """Add to the gradient of an input beside q, k and v; `before` are the scores that the own expression is of."""
    own, target = chunk.problem.own_score, made[f"d{name}"]
    if name == "bias":
        slope = chunk.slope(own.tree, before) if own else 1.0
        return _add_bias(target, chunk, _times(shifts, slope, magnitudes))
    if own is None:
        return None
    for element in elements(own.tree, name):
        part = _times(shifts, chunk.slope(own.tree, before, element), magnitudes).to(target.dtype)
        places = element.places(chunk.added.values, torch)
        target.index_put_(tuple(torch.as_tensor(p, device=part.device).expand(part.shape) for p in places), part, True)
    return None


def _add_bias(bias: torch.Tensor, chunk: Chunk, part: torch.Tensor) -> None:
    """Add `[heads, rows, keys]` to the gradient of a bias, which is one for all heads or batches or for each."""
    batch, heads, _ = chunk.place
    several = bias.shape[1] > 1
    part = part.to(bias.dtype)
    target = bias[min(batch, bias.shape[0] - 1), heads if several else slice(0, 1)]
    target[:, chunk.rows, : chunk.problem.seqlen_k] += part if several else part.sum(0, keepdim=True)


def _times(shifts: torch.Tensor, slope: torch.Tensor | float, magnitudes: bool) -> torch.Tensor:
    """Their product, or its magnitude; 0 where `shifts` are: the derivative at a hidden score may be no number."""
    product = shifts * slope if isinstance(slope, float) else torch.where(shifts == 0, 0, shifts * slope)
    return product.abs() if magnitudes else product
