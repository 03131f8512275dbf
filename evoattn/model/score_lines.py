"""How expressions differ from one query and key to the next ones."""

from __future__ import annotations

from evoattn.model.score import Apply, Load, Name, Number, Tree

COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


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
