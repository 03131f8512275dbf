"""Expressions of scores as CUDA C++ has them."""

import math

from evoattn.model.score import (
    INDICES,
    LONG,
    OPERATORS,
    SCORE,
    WHOLE,
    Apply,
    Load,
    Name,
    Number,
    Table,
    Tree,
    depends_on,
    has_loads,
    loads_pairs,
    replaced,
)


def in_cuda(tree: Tree, floats: bool = True, by_steps: bool = False) -> str:
    """The expression in CUDA C++, where the score and the indices have their names, tables and their sizes those of
    `member` and `size_member`; `floats`: as a float, also where it is a whole number. `by_steps`: of keys
    `first + step`, whose steps compilers know, so that a distance costs one addition of floats, exact up to 2^24."""
    if floats and isinstance(tree, Number) and not math.isinf(tree.value):
        return f"{float(tree.value)!r}f"
    if not (floats and tree.kind == "int"):
        return _in_cuda(tree, by_steps)
    return _in_steps(tree) if by_steps and depends_on(tree, "k") else f"float({_in_cuda(tree, by_steps)})"


def _in_steps(tree: Tree) -> str:
    """A whole number that differs by the key, as a float."""
    if abs(keys := _keys_of(tree) or 0) == 1:
        first = _in_cuda(replaced(tree, Name("k"), Name("first")))
        return f"(float({first}) {'+' if keys > 0 else '-'} float(step))"
    match tree:
        case Apply("abs", (x,)):
            return f"fabsf({in_cuda(x, True, True)})"
        case Apply("min" | "max" as name, of):
            return OPERATORS[name].cuda.format(*(in_cuda(one, True, True) for one in of))
    return f"float({_in_cuda(tree, True)})"


def _keys_of(tree: Tree) -> int | None:
    """How often a sum has the key; None for all else that differs by it."""
    if not depends_on(tree, "k"):
        return 0
    match tree:
        case Name("k"):
            return 1
        case Apply("minus", (x,)):
            found = _keys_of(x)
            return None if found is None else -found
        case Apply("+" | "-" as sign, (x, y)):
            one, other = _keys_of(x), _keys_of(y)
            return None if one is None or other is None else one + (other if sign == "+" else -other)
    return None


def changed_in_cuda(tree: Tree) -> str:
    """The expression's value before the kernel scales it, of a score `raw` that is not scaled: `unit` scales, and
    `term_unit` takes it back. `s` is the scaled score; keys as `in_cuda` has them by steps. What scales a score by a
    number that its row shares, and what is added to it, needs no scaling of the score."""
    if tree == Name(SCORE):
        return "raw"
    if not depends_on(tree, SCORE):
        return _unscaled(tree)
    match tree:
        case Apply("+" | "-" as sign, (x, y)):
            return f"({changed_in_cuda(x)} {sign} {changed_in_cuda(y)})"
        case Apply("minus", (x,)):
            return f"(-{changed_in_cuda(x)})"
        case Apply("where", (condition, x, y)):
            return f"({in_cuda(condition, False, True)} ? {changed_in_cuda(x)} : {changed_in_cuda(y)})"
        case Apply("*", (x, y)) if not depends_on(y, SCORE):
            return f"({changed_in_cuda(x)} * {in_cuda(y, True, True)})"
        case Apply("*", (x, y)) if not depends_on(x, SCORE):
            return f"({in_cuda(x, True, True)} * {changed_in_cuda(y)})"
        case Apply("/", (x, y)) if not depends_on(y, SCORE):
            return _quotient(changed_in_cuda(x), y)
    return f"({in_cuda(tree, True, True)} * term_unit)"


def _unscaled(tree: Tree) -> str:
    """As `changed_in_cuda`, of what has no score: the factor goes where a row shares it."""
    match tree:
        case Number(value) if math.isinf(value):
            return in_cuda(tree)
        case Apply("minus", (x,)):
            return f"(-{_unscaled(x)})"
        case Apply("*", (x, y)) if not depends_on(x, "k"):
            return f"({_unscaled(x)} * {in_cuda(y, True, True)})"
        case Apply("*", (x, y)) if not depends_on(y, "k"):
            return f"({_unscaled(y)} * {in_cuda(x, True, True)})"
        case Apply("where", (condition, x, y)) if isinstance(x, Number) or isinstance(y, Number):
            return f"({in_cuda(condition, False, True)} ? {_unscaled(x)} : {_unscaled(y)})"
    return f"({in_cuda(tree, True, True)} * term_unit)"


def _quotient(x: str, y: Tree) -> str:
    """By a number that a row shares it is a product."""
    if isinstance(y, Number) and 1e-30 < abs(y.value) < 1e30:
        return f"({x} * {1 / y.value!r}f)"
    divisor = in_cuda(y, True, True)
    return f"__fdividef({x}, {divisor})" if depends_on(y, "k") else f"({x} * __fdividef(1.f, {divisor}))"


def _in_cuda(tree: Tree, by_steps: bool = False) -> str:
    match tree:
        case Number(value):
            if math.isinf(value):
                return "-NEGATIVE_INFINITY" if value > 0 else "NEGATIVE_INFINITY"
            return str(value)
        case Name(name):
            return name
        case Load(table):
            element = f"{member(table)}[{place_in_cuda(tree)}]"
            return (
                f"to_int({element})"
                if table.dtype == LONG
                else element
                if table.dtype in WHOLE
                else f"to_float({element})"
            )
        case Apply("//" | "%" as sign, (x, y)) if is_natural(x) and is_natural(y):  # one multiplication by a constant
            return f"int(unsigned({_in_cuda(x)}) {sign[0]} unsigned({_in_cuda(y)}))"
        case Apply("&" | "|" as sign, (x, y)) if has_loads(y) and not loads_pairs(y):
            # Both sides: what a row's keys share, or a key's rows, is read once where no condition is before it.
            return f"({_in_cuda(x, by_steps)} {sign} {_in_cuda(y, by_steps)})"
        case Apply("/", (x, y)) if by_steps and depends_on(x, "k") | depends_on(x, SCORE):
            return _quotient(in_cuda(x, True, True), y)
        case Apply(name, of):
            wide = tree.kind == "float" or any(one.kind == "float" for one in of)
            given = (in_cuda(one, wide and one.kind != "bool", by_steps) for one in of)
            return OPERATORS[name].cuda.format(*given)


def inside_in_cuda(index: Tree, wraps: bool, size: str) -> str:
    """The index of an element along a dimension of this size."""
    return f"{'wrapped' if wraps else 'inside'}({_in_cuda(index)}, {size})"


def place_in_cuda(element: Load) -> str:
    """Where an element lies in its table."""
    place = ""
    for number, (index, wrap) in enumerate(zip(element.indices, element.wraps, strict=True)):
        size = size_member(element.table, number)
        inside = inside_in_cuda(index, wrap, size)
        place = inside if not place else f"({place} * {size} + {inside})"
    return place


def member(table: Table) -> str:
    """What a table is called in CUDA, where some names are words of the language."""
    return f"t_{table.name}"


def size_member(table: Table, dimension: int) -> str:
    """What the size of a dimension of a table is called in CUDA."""
    return f"n_{table.name}_{dimension}"


def is_natural(tree: Tree) -> bool:
    """Whether a whole number is surely not below 0."""
    match tree:
        case Number(value):
            return value >= 0
        case Name(name):
            return name in INDICES[:4]
        case Apply("+" | "*" | "//" | "min" | "bitand" | ">>", of):
            return all(map(is_natural, of))
        case Apply("%", (_, divisor)):
            return is_natural(divisor)
        case Apply("max", of):
            return any(map(is_natural, of))
        case Apply("where", (_, yes, no)):
            return is_natural(yes) and is_natural(no)
        case Apply("abs"):
            return True
    return isinstance(tree, Load) and tree.kind == "bool"
