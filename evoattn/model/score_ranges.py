"""Between what numbers an expression of whole numbers lies over a block of queries and keys, as CUDA C++ has it. So a
predicate is known to hold for all pairs of a block, or for none, without asking each."""

from evoattn.model.score import WHOLE, Apply, Load, Name, Number, Table, Tree, replaced
from evoattn.model.score_cuda import member, size_member

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
