"""How expressions differ from one query and key to the next ones, and which of them say no more than a name does: a
causal mask, a window, a soft cap, slopes, a bias. Kernels of these are faster.

And between what numbers an expression of whole numbers lies over a block of queries and keys, as CUDA C++ has it: so a
predicate is known to hold for all pairs of a block, or for none, without asking each."""

import math
from typing import NamedTuple

from evoattn.model.mask import CAUSAL_LOWER_RIGHT, CAUSAL_UPPER_LEFT, FULL
from evoattn.model.score import (
    LARGEST_FLOAT,
    SCORE,
    WHOLE,
    Apply,
    Load,
    Name,
    Number,
    Table,
    Tree,
    depends_on,
    loads_pairs,
    parts,
    replaced,
)
from evoattn.model.score_cuda import member, size_member

COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
Bounds = tuple[int | None, int | None]
"""(lowest, highest) key - query that is seen; None for no bound."""
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}


def is_shift(tree: Tree) -> bool:
    """Whether an expression of the indices stays as it is where query and key move on together."""
    if (line := linear(tree)) is not None:
        return line[0] + line[1] == 0
    match tree:
        case Name(name):
            return name not in ("q", "k")
        case Apply(sign, (left, right)) if sign in COMPARISONS and linear(left) and linear(right):
            return is_shift(Apply("-", (left, right)))
        case Load(_, of, _) | Apply(_, of):
            return all(map(is_shift, of))
    return True


def loads_apart(tree: Tree) -> bool:
    """Whether an expression loads an element for each query and key that is not one for each distance of the two."""
    return any(loads_pairs(one) and not is_shift(one) for one in parts(tree) if isinstance(one, Load))


LARGEST_SCORE = 1e20
"""Of a score that is a number as the product gives it, and of what an expression may make of it."""
_LARGEST_INDEX = float(1 << 31)
LARGEST_EXPONENT = 40.0
_Range = tuple[float, float]


def is_finite(tree: Tree) -> bool:
    """Whether an expression makes a finite number of every finite score, whatever tables hold: no key is hidden by it.
    False where that is not seen."""
    found = _within(tree)
    return found is not None and max(map(abs, found)) <= LARGEST_SCORE * _LARGEST_INDEX


def _within(tree: Tree) -> _Range | None:
    """Bounds of an expression; None where it may have none. Elements of tables of floats have none."""
    match tree:
        case Number(value):
            return None if math.isinf(value) else (value, value)
        case Name(name):
            return (
                (-LARGEST_SCORE, LARGEST_SCORE) if name == SCORE else (-_LARGEST_INDEX * (name == "d"), _LARGEST_INDEX)
            )
        case Apply(sign, of):
            given = [_within(one) for one in of]
            known = [one for one in given if one is not None]
            found = _of_ranges(sign, known) if len(known) == len(given) else None
            if found is not None and all(abs(end) <= LARGEST_FLOAT for end in found):
                return found
    if tree.kind == "float":
        return None
    return (0.0, 1.0) if tree.kind == "bool" else (-_LARGEST_INDEX, _LARGEST_INDEX)


def _of_ranges(sign: str, given: list[_Range]) -> _Range | None:
    """Bounds of what an operator makes of values within these; None where it may have none, or others are as good."""
    (low, high), (least, most) = given[0], given[-1]
    match sign:
        case "+":
            return low + least, high + most
        case "-":
            return low - most, high - least
        case "*" | "/" if sign == "*" or least * most > 0:
            ends = [x * y if sign == "*" else x / y for x in (low, high) for y in (least, most)]
            return min(ends), max(ends)
        case "minus":
            return -high, -low
        case "abs":
            return 0.0, max(-low, high)
        case "max" | "min":
            of = max if sign == "max" else min
            return of(low, least), of(high, most)
        case "where":
            return min(given[1][0], least), max(given[1][1], most)
        case "exp" if high <= LARGEST_EXPONENT:
            return 0.0, math.exp(high)
        case "tanh" | "erf" | "sin" | "cos":
            return -1.0, 1.0
        case "floor":
            return low - 1, high
    return None


def linear(tree: Tree) -> tuple[int, int, int] | None:
    """The factors of query and key, and the rest, of a sum of these; None for all else."""
    match tree:
        case Number(int(value)):
            return 0, 0, value
        case Name("q"):
            return 1, 0, 0
        case Name("k"):
            return 0, 1, 0
        case Apply("minus", (of,)):
            found = linear(of)
            return None if found is None else (-found[0], -found[1], -found[2])
        case Apply("+" | "-" as sign, (left, right)):
            one, other = linear(left), linear(right)
            if one is None or other is None:
                return None
            by = 1 if sign == "+" else -1
            return one[0] + by * other[0], one[1] + by * other[1], one[2] + by * other[2]
    return None


def softcap_of(tree: Tree) -> float:
    """The cap c of c · tanh(s / c); 0 where the expression is another."""
    match tree:
        case Apply("*", (Number(cap), Apply("tanh", (Apply("/", (Name("s"), Number(by))),)))) | Apply(
            "*", (Apply("tanh", (Apply("/", (Name("s"), Number(by))),)), Number(cap))
        ):
            return float(cap) if cap == by and cap > 0 else 0.0
    return 0.0


def hiding_of(tree: Tree) -> tuple[Tree, Tree] | None:
    """(condition, score) of an expression that is this score where a condition of the indices holds, else -inf; None
    where it says something else."""
    match tree:
        case Apply("where", (shown, score, Number(hidden))) if hidden == -math.inf:
            pass
        case Apply("where", (hides, Number(hidden), score)) if hidden == -math.inf:
            shown = Apply("~", (hides,))
        case Apply("+", (score, Apply("where", (shown, Number(0), Number(hidden))))) if hidden == -math.inf:
            pass
        case _:
            return None
    if depends_on(shown, SCORE) or not depends_on(score, SCORE):
        return None
    inner = hiding_of(score)
    return (shown, score) if inner is None else (Apply("&", (shown, inner[0])), inner[1])


class Bias(NamedTuple):
    """s + table[…, q, k]."""

    table: str
    by: str
    """The indices before query and key: "bh", "b", "h" or none."""


class Slopes(NamedTuple):
    """s - table[h] · |query - key + offset|, of float32."""

    table: str
    offset: int
    is_absolute: bool
    """Else query - key + offset itself, which is the same where no key behind the diagonal is seen."""


def added_of(tree: Tree) -> Bias | Slopes | None:
    """What an expression adds to a score and does no more; None where it does another thing."""
    match tree:
        case Apply("+", (Name("s"), added)) | Apply("+", (added, Name("s"))):
            sign = 1
        case Apply("-", (Name("s"), added)):
            sign = -1
        case _:
            return None
    match added:
        case Load(table, (*front, Name("q"), Name("k"))) if sign > 0:
            by = "".join(one.name for one in front if isinstance(one, Name))
            return Bias(table.name, by) if len(by) == len(front) and by in ("bh", "b", "h", "") else None
    factors: list[Tree] = []
    sign *= _factored(added, factors)
    for slope, distance in (factors, factors[::-1]) if len(factors) == 2 else ():
        match slope:
            case Load(table, (Name("h"),)) if table.dtype == "fp32":
                found = _distance(distance, sign)
                return None if found is None else Slopes(table.name, *found)
    return None


def _factored(tree: Tree, factors: list[Tree]) -> int:
    """The sign of a product, whose factors are put into a list without theirs."""
    match tree:
        case Apply("minus", (of,)):
            return -_factored(of, factors)
        case Apply("*", (left, right)):
            return _factored(left, factors) * _factored(right, factors)
    factors.append(tree)
    return 1


def _distance(tree: Tree, sign: int) -> tuple[int, bool] | None:
    """`Slopes.offset` and `is_absolute` of a distance that is added with this sign."""
    is_absolute = isinstance(tree, Apply) and tree.operator == "abs"
    found = linear(tree.of[0] if isinstance(tree, Apply) and is_absolute else tree)
    if found is None or (is_absolute and sign > 0):
        return None
    turned = found[0] if is_absolute else -sign
    if (turned * found[0], turned * found[1]) != (1, -1):
        return None
    return turned * found[2], is_absolute


def band_of(tree: Tree) -> Bounds | None:
    """The bounds of a predicate that is true within them and nowhere else; None where it says something else."""
    match tree:
        case Apply("&", (left, right)):
            low, high = None, None
            for one in (band_of(left), band_of(right)):
                if one is None:
                    return None
                low = one[0] if low is None else low if one[0] is None else max(low, one[0])
                high = one[1] if high is None else high if one[1] is None else min(high, one[1])
            return low, high
        case Apply("~", (Apply(sign, of),)) if sign in _NEGATED:
            return band_of(Apply(_NEGATED[sign], of))
        case Apply("<" | "<=" as sign, (Apply("abs", (of,)), Number(int(width)))):
            width -= sign == "<"
            inner = linear(of)
            if inner is None or inner[0] * inner[1] != -1:
                return None
            middle = -inner[2] * inner[1]  # of key - query, where the distance is 0
            return middle - width, middle + width
        case Apply(sign, (left, right)) if sign in _MIRRORED and (difference := linear(Apply("-", (left, right)))):
            of_query, of_key, constant = difference
            if of_query * of_key != -1:
                return None
            compared = sign if of_key > 0 else _MIRRORED[sign]  # of key - query + constant with 0
            constant *= of_key
            if compared in ("<", "<="):
                return None, -constant - (compared == "<")
            return -constant + (compared == ">"), None
    return None


def masking_of(bounds: Bounds, seqlen_q: int, seqlen_k: int) -> tuple[str, tuple[int, int] | None] | None:
    """The mask and the window of a call that show just what lies within the bounds; None where none does."""
    low, high = bounds
    corner = seqlen_k - seqlen_q
    if high is not None and high in (0, corner):
        mask = CAUSAL_UPPER_LEFT if high == 0 else CAUSAL_LOWER_RIGHT
        past, ahead = -1 if low is None else high - low, 0
    else:
        mask = FULL
        past, ahead = -1 if low is None else corner - low, -1 if high is None else high - corner
    if (low is not None and past < 0) or (high is not None and ahead < 0):
        return None
    return mask, None if low is None and (high is None or mask != FULL) else (past, ahead)


UNKNOWN, EITHER = "Range::anything()", "Range{0, 1}"
FUNCTIONS = {
    "+": "sum_of", "-": "difference_of", "*": "product_of", "//": "quotient_of", "%": "remainder_of", ">>": "shifted",
    "bitand": "common_bits", "minus": "negative_of", "abs": "size_of", "min": "lesser_of", "max": "greater_of",
    "<": "is_less", "<=": "is_at_most", "==": "is_equal", "&": "lesser_of", "|": "greater_of", "~": "is_not",
    "where": "either_of",
}  # fmt: skip
"""Of `templates/device/score_range.cuh`."""
MOST_ADDED = 4
"""Conditions that are asked for one of several beside those that are written."""
TURNED = {">": "is_less", ">=": "is_at_most"}


def lines_of(tree: Tree) -> list[str]:
    """The body of a function of `b`, `h`, `q` and `k`, ranges each, and of a lane that returns the range of a predicate
    or a whole number; all lanes of a warp call it, with the same ranges where its template says `ALIKE`."""
    known: dict[Tree, str] = {}
    lines: list[str] = []
    result = _named(tree, known, lines)
    return [*lines, f"return {result};"]


def _named(tree: Tree, known: dict[Tree, str], lines: list[str]) -> str:
    """What has the range of an expression, after the `lines`."""
    if tree not in known:
        text = _range(tree, known, lines)
        if isinstance(tree, Apply | Load):
            lines.append(f"const Range r{len(known)} = {text};")
            text = f"r{len(known)}"
        known[tree] = text
    return known[tree]


def _all_of(tree: Tree, known: dict[Tree, str], lines: list[str]) -> str:
    """The range of what several conditions say together. Of two numbers that are equal each meets the conditions of the
    other, which ranges of their own do not know: those are asked, too."""
    parts = _conjuncts(tree)
    more: list[Tree] = []
    for equal in parts:
        match equal:
            case Apply("==", (x, y)) if x.kind == y.kind == "int":
                for one, other in ((x, y), (y, x)):
                    changed = (replaced(part, one, other) for part in parts if part is not equal)
                    more += [part for part in changed if part not in parts and part not in more]
    names = [_named(part, known, lines) for part in [*parts, *more[:MOST_ADDED]]]
    found = names[0]
    for name in names[1:]:
        found = f"lesser_of({found}, {name})"
    return found


def _conjuncts(tree: Tree) -> list[Tree]:
    match tree:
        case Apply("&", (left, right)):
            return [*_conjuncts(left), *_conjuncts(right)]
    return [tree]


def _range(tree: Tree, known: dict[Tree, str], lines: list[str]) -> str:
    match tree:
        case Number(int(value)):
            return f"Range{{{value}, {value}}}"
        case Name("b" | "h" | "q" | "k" as name):
            return name
        case Load(Table(_, dtype, (1,)) as table, (Number(0),)) if dtype in WHOLE:
            return f"Range::one(as_int({member(table)}[0]))"
        case Load(table, indices, wraps) if table.dtype in WHOLE:
            places = [_named(index, known, lines) for index in indices]
            sizes = [size_member(table, i) for i in range(len(indices))]
            inside = [
                f"inside({place}, {size}, {'true' if wrap else 'false'})"
                for place, size, wrap in zip(places, sizes, wraps, strict=True)
            ]
            line, size = inside[0], sizes[0]
            found = f"Line{{}}.of({line}, {size})"
            for line, size in zip(inside[1:], sizes[1:], strict=True):
                found = f"{found}.of({line}, {size})"
            return f"elements_of<ALIKE>({member(table)}, {found}, lane)"
        case Apply(sign, of) if all(one.kind != "float" for one in of):
            if sign == "whole":
                return _named(of[0], known, lines)
            if sign == "&":
                return _all_of(tree, known, lines)
            names = [_named(one, known, lines) for one in of]
            if sign in TURNED:
                return f"{TURNED[sign]}({names[1]}, {names[0]})"
            if sign == "!=":
                return f"is_not(is_equal({', '.join(names)}))"
            if sign in FUNCTIONS:
                return f"{FUNCTIONS[sign]}({', '.join(names)})"
    return EITHER if tree.kind == "bool" else UNKNOWN
