"""What attention itself does between the product of a query and a key and the softmax, as expressions (`score.py`)."""

from functools import cache
from typing import Any, NamedTuple

from evoattn.model.score import SCORE, Load, Name, Number, Table, Tree, applied, load, parse_score, replaced

CAP = Name("cap")
CAPPED = replaced(parse_score("2.0*tanh(s/2.0)").tree, Number(2.0), CAP)
"""The softcap, of a scaled score and `CAP`."""
SINK = load(Table("sinks", "fp32", (1,), "sinks"), (Name("h"),))


@cache
def added(table: Table) -> Tree:
    """What slopes or a bias, by the table's name, add to a score."""
    text = {"slopes": "s+-slopes[h]*abs(q+d-k)", "bias": "s+bias[b,h,q,k]"}[table.name]
    return parse_score(text, (table,)).tree


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
    if problem.softcap:
        tree = replaced(CAPPED, CAP, Number(float(problem.softcap)))
    for name, dtype in (("slopes", "fp32"), ("bias", problem.answer.name)):
        if shape := problem.term_shapes.get(name):
            tree = replaced(added(Table(name, dtype, shape, name)), Name(SCORE), tree)
    whole = replaced(problem.own_score.tree, Name(SCORE), tree) if problem.own_score else tree
    scaled = applied("*", (Name(SCORE), Number(problem.softmax_scale)))
    return Scoring(scaled, tree, whole, (SINK,) if problem.sink else ())
