"""What attention itself does between the product of a query and a key and the softmax, as expressions (`score.py`)."""

from typing import Any, NamedTuple

from evoattn.model.score import SCORE, Load, Name, Number, Table, Tree, applied, load, parse_score, replaced

SINK = load(Table("sinks", "fp32", (1,), "sinks"), (Name("h"),))


class Scoring(NamedTuple):
    """All that a problem says of a score. The torch and the CUDA of a kernel take the factor of `scaled` into the query
    or the exponent of the softmax, which saves a product for each score."""

    scaled: Tree
    """The score, of the product of a query and a key."""
    named: Tree
    """Of a scaled score: the softcap, then what slopes or a bias add."""
    whole: Tree
    """Of a scaled score: `named`, then the problem's own expression."""
    sums: tuple[Load, ...]
    """Scores without a value, of the head alone, that each row's sum of exponentials has too."""


def scoring_of(problem: Any) -> Scoring:
    """That of a problem of attention."""
    tree: Tree = Name(SCORE)
    if cap := float(problem.softcap):
        tree = parse_score(f"{cap!r}*tanh(s/{cap!r})").tree
    added_ones = (("slopes", "fp32", "-slopes[h]*abs(q+d-k)"), ("bias", problem.answer.name, "bias[b,h,q,k]"))
    for name, dtype, added in added_ones:
        if shape := problem.term_shapes.get(name):
            tree = replaced(parse_score(f"s+{added}", (Table(name, dtype, shape, name),)).tree, Name(SCORE), tree)
    whole = replaced(problem.own_score.tree, Name(SCORE), tree) if problem.own_score else tree
    scaled = applied("*", (Name(SCORE), Number(problem.softmax_scale)))
    return Scoring(scaled, tree, whole, (SINK,) if problem.sink else ())
