"""Expressions of scores as CUDA C++ has them."""

from __future__ import annotations

import math

from evoattn.model.score import INDICES, LONG, OPERATORS, WHOLE, Apply, Load, Name, Number, Table, Tree


def in_cuda(tree: Tree, floats: bool = True) -> str:
    """The expression in CUDA C++, where the score and the indices have their names, tables and their sizes those of
    `member` and `size_member`; `floats`: as a float, also where it is a whole number."""
    if floats and isinstance(tree, Number) and not math.isinf(tree.value):
        return f"{float(tree.value)!r}f"
    return f"float({_in_cuda(tree)})" if floats and tree.kind == "int" else _in_cuda(tree)


def _in_cuda(tree: Tree) -> str:
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
        case Apply(name, of):
            wide = tree.kind == "float" or any(one.kind == "float" for one in of)
            return OPERATORS[name].cuda.format(*(in_cuda(one, wide and one.kind != "bool") for one in of))


def place_in_cuda(element: Load) -> str:
    """Where an element lies in its table."""
    place = ""
    for number, (index, wrap) in enumerate(zip(element.indices, element.wraps, strict=True)):
        size = size_member(element.table, number)
        inside = f"{'wrapped' if wrap else 'inside'}({_in_cuda(index)}, {size})"
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
