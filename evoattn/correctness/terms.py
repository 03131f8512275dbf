"""What is done to the scores of the reference between the product and the softmax, and the inputs that it takes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from evoattn.correctness import sequences
from evoattn.correctness.sequences import make_key_terms
from evoattn.model.dtype import DTYPES
from evoattn.model.mask import MaskKind
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import SCALES
from evoattn.model.score import FLAGS, SCORE, WHOLE, Apply, Load, Table, Tree, evaluate, parts
from evoattn.model.scoring import Scoring

OWN_NUMBERS = 4
"""Values of a table of whole numbers: of documents, say, of which keys and queries share some."""
DIVIDES, LEAST_NUMBER = ("/", "//", "%"), 0.5
"""Operators, and the least of a single fp32 number or one that is divided by."""
SINK_SPREAD = 3.0
"""Standard deviation of sinks: of normal ones few are above the largest score of a row."""


def torch_dtype(problem: AttentionProblem, tensor: str = "o") -> torch.dtype:
    """The dtype of a tensor of the problem in torch: that of O, and of what is added to scores, unless said."""
    dtype: torch.dtype = getattr(torch, problem.element_of(tensor).torch)
    return dtype


def qkv(
    problem: AttentionProblem, tensors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v out of the inputs of a problem; v is a view of k where it lies within."""
    k = tensors["k"]
    if problem.rotary_apart:
        return tensors["q"], torch.cat((tensors["v"], k), -1), tensors["v"]
    return tensors["q"], k, k[..., : problem.head_dim_v] if problem.shared_kv else tensors["v"]


def make_terms(
    problem: AttentionProblem, generator: torch.Generator, device: torch.device | str, extreme: bool
) -> dict[str, torch.Tensor]:
    """The inputs of `AttentionProblem.term_shapes`: normal biases, sinks three times as large, the slopes of the ALiBi
    paper, lengths and pages as `sequences.make_key_terms` makes them, block lists as the problem's text says, normal
    tables, and those of whole numbers with few values; single numbers, and what is divided by, are above 0. Scales are
    made with what they scale (`eight_bits.quantised`).

    `extreme`: lengths as `make_key_terms` has them then, sinks of -inf and of 100 by turns, whose exponential
    fp32 does not hold, slopes of which every other is steep and negative, and a bias that hides all keys from the first
    query, the last half of them from the second and every third one from the fourth, and takes 10,000 from every other
    score of the third. Nothing is hidden so from an expression, which may make infinity of it or NaN, and such a row
    has no answer. The columns of a bias past the last key are NaN, and so is what no query and key read of a table."""
    made = make_key_terms(problem, generator, device, extreme) | sequences.make_block_terms(problem, device)
    heads, positive = torch.arange(problem.heads, device=device), _divisors(problem)
    for table in problem.own_tables:
        if table.buffer in made:
            continue
        whole = torch.randint(OWN_NUMBERS, table.shape, generator=generator, device=device, dtype=torch.int32)
        normal = torch.randn(table.shape, generator=generator, device=device) * (4 if extreme else 1)
        if table in positive or table.shape == (1,):
            whole, normal = whole.clamp(min=1), normal.abs() + LEAST_NUMBER
        if table.dtype == FLAGS:
            made[table.buffer] = whole > 0
        elif table.dtype in WHOLE:
            made[table.buffer] = whole.to(getattr(torch, table.dtype))
        else:
            made[table.buffer] = normal.to(getattr(torch, DTYPES[table.dtype].torch))
    for name, shape in problem.term_shapes.items():
        if name in made or name in SCALES:
            continue
        if name == "slopes":
            made[name] = torch.exp2(-8.0 * (heads + 1) / problem.heads).float()
            if extreme:
                made[name] *= torch.where(heads % 2 == 0, -8.0, 1.0)
            continue
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        values *= SINK_SPREAD if name == "sinks" else 1
        if extreme and name == "sinks":
            values = torch.where(heads % 2 == 0, float("-inf"), 100.0)
        elif extreme:
            values[..., 2:3, ::2] = -10_000
            if not problem.own_score:
                values[..., 0, :] = values[..., 1:2, problem.seqlen_k // 2 :] = values[..., 3:4, ::3] = float("-inf")
        if name == "bias":
            values[..., problem.seqlen_k :] = float("nan")
        made[name] = values.to(torch_dtype(problem))
    return made | _unread_at_nan(problem, made, device) if extreme and not problem.varlen else made


def _unread_at_nan(
    problem: AttentionProblem, made: Mapping[str, torch.Tensor], device: torch.device | str
) -> dict[str, torch.Tensor]:
    """The tables of numbers, with NaN in place of elements that no query and key read: those behind the last may."""
    sizes = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k
    ranges = (torch.arange(size, device=device).view(-1, *[1] * (3 - i)) for i, size in enumerate(sizes))
    values = {**made, **dict(zip("bhqk", ranges, strict=True)), "d": problem.diagonal}
    read: dict[str, torch.Tensor] = {}
    for load in (one for tree in _expressions(problem) for one in parts(tree) if isinstance(one, Load)):
        if made[load.table.buffer].is_floating_point():
            seen = read.setdefault(load.table.buffer, torch.zeros(load.table.shape, dtype=torch.bool, device=device))
            seen[load.places(values, torch)] = True
    return {name: made[name].masked_fill(~seen, float("nan")) for name, seen in read.items()}


def _expressions(problem: AttentionProblem) -> list[Tree]:
    """That of the problem's scores, and that of its mask, if there are any."""
    trees = [problem.own_score.tree] if problem.own_score is not None else []
    return [*trees, problem.shown] if problem.shown is not None else trees


def _divisors(problem: AttentionProblem) -> set[Table]:
    """Tables by which the problem's expressions divide."""
    every = (one for tree in _expressions(problem) for one in parts(tree) if isinstance(one, Apply))
    by = [one.of[1] for one in every if one.operator in DIVIDES]
    return {load.table for tree in by for load in parts(tree) if isinstance(load, Load)}


@dataclass(frozen=True)
class Terms:
    """What the problem does to a block of scores `[heads, rows, seqlen_k]`."""

    scoring: Scoring
    values: Mapping[str, torch.Tensor | int]
    """Those of its indices and tables."""
    visible: torch.Tensor | None
    """Bool that broadcasts over the scores; None without a mask."""
    adds: bool
    """Whether something is added, in float32 or better."""

    @property
    def may_hide(self) -> bool:
        """Whether a score may be -inf."""
        return self.visible is not None or self.adds

    def apply(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores changed, and what is hidden at -inf."""
        if self.adds:
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores = evaluate(self.scoring.whole, {**self.values, SCORE: scores}, torch)
        return scores if self.visible is None else scores.masked_fill(~self.visible, float("-inf"))

    def scaled(self, query: torch.Tensor) -> torch.Tensor:
        """A query whose products are scaled scores."""
        scaled: torch.Tensor = evaluate(self.scoring.scaled, {SCORE: query}, torch)
        return scaled

    def summed(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores, and as further columns `Scoring.sums`."""
        sums = (evaluate(one, self.values, torch).to(scores.dtype) for one in self.scoring.sums)
        return torch.cat((scores, *(one.expand(*scores.shape[:-1], 1) for one in sums)), -1)


def terms_of(
    problem: AttentionProblem,
    others: Mapping[str, torch.Tensor] | None,
    batch: int,
    heads: slice,
    rows: slice,
    device: torch.device,
) -> Terms:
    """The terms of some heads and query rows of a batch. `others` holds the problem's inputs beside q, k and v, of a
    packed sequence also its number `b`.

    Raises `KeyError` where the problem has an input that `others` lacks."""
    given = {name: (others or {})[name] for name in problem.term_shapes}
    queries = torch.arange(rows.start, rows.stop, device=device)[:, None]
    keys = torch.arange(problem.seqlen_k, device=device)
    values: dict[str, torch.Tensor | int] = {
        **given,
        "b": (others or {}).get("b", batch),
        "h": torch.arange(problem.heads, device=device)[heads, None, None],
        "q": queries,
        "k": keys,
        "d": problem.diagonal,
    }
    visible = None if problem.masking.kind is MaskKind.FULL else problem.band.sees(queries, keys)
    if problem.blocks:
        visible = sequences.visible(problem, given, batch, heads, rows)
    adds = bool(problem.alibi or problem.bias or problem.score)
    return Terms(problem.scoring, values, visible, adds)
