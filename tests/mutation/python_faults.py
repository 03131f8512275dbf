"""The faults: what can be changed at one place of a Python source."""

import ast
import copy
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}


GUARDS = ("strict", "stacklevel", "daemon")
"""Keywords of `zip`, of warnings and of threads: without them all else is as it was, but where the program itself has a
fault, for the line that a warning names, and as the process ends."""
SYMMETRIC = ("min", "max", "minimum", "maximum", "gcd", "lcm", "transpose", "times", "equal", "allclose", "isclose")
"""Functions that do not tell their arguments apart."""
KEYED = ("get", "pop", "setdefault", "add", "discard")
"""Methods of dicts and sets, whose first argument is a key."""


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], None]]]:
    """(what, how) of each fault that can be planted at this very node; `how` changes a copy of it in place."""
    yield from _of_operators(node)
    yield from _of_keys(node)
    yield from _of_names(node)
    if isinstance(node, ast.Call):
        for place, keyword in enumerate(node.keywords):
            if keyword.arg and keyword.arg not in GUARDS:
                yield f"without {keyword.arg}=", lambda n, place=place: n.keywords.pop(place)


def _of_keys(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], None]]]:
    """A tuple that may be a key, as it is kept under a name, given back, looked up or added, without one part."""
    found: ast.AST | None = None
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Return, ast.NamedExpr)):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        found = None if any(isinstance(target, (ast.Tuple, ast.List)) for target in targets) else node.value
    elif isinstance(node, ast.Subscript):
        found = node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KEYED and node.args:
        found = node.args[0]
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        found = node.left
    if isinstance(found, ast.Tuple) and len(found.elts) > 1:
        way = next(name for name, value in ast.iter_fields(node) if value is found or _is_first(value, found))
        for place, part in enumerate(found.elts):
            yield (
                f"key without {ast.unparse(part)[:40]}",
                lambda n, place=place, way=way: _first(getattr(n, way)).elts.pop(place),
            )


def _is_first(value: object, node: ast.AST) -> bool:
    return isinstance(value, list) and bool(value) and value[0] is node


def _first(value: ast.AST | list[ast.AST]) -> ast.AST:
    return value[0] if isinstance(value, list) else value


def _of_names(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], None]]]:
    """Of arguments, operands or parts in a row, one that names what its neighbour does: `k.stride(), k.stride()`."""
    for way in ("args", "elts", "values"):
        row = getattr(node, way, None)
        if not isinstance(row, list) or not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            continue
        for place, (one, other) in enumerate(pairwise(row), 1):
            if one is None or not _named(one) or _shape(one) != _shape(other) or ast.dump(one) == ast.dump(other):
                continue
            yield (
                f"{ast.unparse(other)[:30]} → {ast.unparse(one)[:30]}",
                lambda n, way=way, place=place: getattr(n, way).__setitem__(
                    place, copy.deepcopy(getattr(n, way)[place - 1])
                ),
            )


def _named(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Name) for inner in ast.walk(node))


def _shape(node: ast.AST) -> str:
    """The expression, whatever its names are."""
    return re.sub(r"Name\(id='\w+'", "Name(", ast.dump(node))


def _of_operators(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], None]]]:
    """Comparisons, arithmetic, conditions, constants and the order of arguments."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        other = COMPARISONS[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} → {other.__name__}", lambda n: setattr(n, "ops", [other()])
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _joins_text(node):
        swapped = ARITHMETIC[type(node.op)]
        yield f"{type(node.op).__name__} → {swapped.__name__}", lambda n: setattr(n, "op", swapped())
    if isinstance(node, ast.BoolOp):
        junction = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} → {junction.__name__}", lambda n: setattr(n, "op", junction())
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} → {not node.value}", lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        for step in (1, -1):
            yield f"{node.value} → {node.value + step}", lambda n, step=step: setattr(n, "value", n.value + step)
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield "negated condition", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    if isinstance(node, ast.Call) and len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args):
        if getattr(node.func, "id", getattr(node.func, "attr", "")) in SYMMETRIC:
            return
        yield "first two arguments swapped", lambda n: n.args.__setitem__(slice(0, 2), n.args[1::-1])


def _joins_text(node: ast.BinOp) -> bool:
    return any(isinstance(side, (ast.JoinedStr, ast.List, ast.Tuple)) for side in (node.left, node.right))


def _removable(node: ast.AST) -> bool:
    """A statement that can go: a call, an assignment to an attribute or item, `+=`, `continue`, `raise`."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
    return isinstance(node, (ast.AugAssign, ast.Continue, ast.Raise, ast.Delete))


def _left_out(tree: ast.Module) -> set[int]:
    """Ids of the nodes that are not mutated: in annotations, decorators, assertions, names of types and guards, and the
    numbers of constants of a module or a class and of defaults, which are choices: a test of one would only say it
    again."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        defaults = [*node.defaults, *node.kw_defaults] if isinstance(node, ast.arguments) else []
        skipped |= {id(one) for one in defaults if isinstance(one, ast.Constant) and _is_number(one.value)}
        parts = [
            node if isinstance(node, ast.Assert) else None,
            getattr(node, "annotation", None),
            node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) else None,
            getattr(node, "returns", None),
            *getattr(node, "decorator_list", []),
            *([node] if isinstance(node, ast.keyword) and node.arg in GUARDS else []),
        ]
        skipped |= {id(inner) for part in parts if part is not None for inner in ast.walk(part)}
    fields = [field for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for field in node.body]
    for node in (*tree.body, *fields):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            union = isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.BitOr)
            alias = isinstance(node.value, ast.Subscript) or union
            numbers = [n for n in ast.walk(node.value) if isinstance(n, ast.Constant) and _is_number(n.value)]
            skipped |= {id(inner) for inner in (ast.walk(node) if alias else numbers)}
    return skipped


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@cache
def faults_of(path: Path) -> list[tuple[int, str, Callable[[], str]]]:
    """(line, change, how to make the source) of every mutant of a file: to make one takes some 20 ms."""
    tree = ast.parse(path.read_text())
    skipped, found = _left_out(tree), []
    for index, node in enumerate(ast.walk(tree)):
        if id(node) in skipped or not hasattr(node, "lineno"):
            continue
        changes = list(_changes(node))
        if _removable(node):
            changes.append(("removed: " + ast.unparse(node)[:60], lambda n: None))
        found += [(node.lineno, what, partial(_changed, tree, index, what, how)) for what, how in changes]
    return found


def _changed(tree: ast.AST, index: int, what: str, how: Callable[[ast.AST], None]) -> str:
    """The source of a tree with one node changed, the `index`-th of its walk."""
    changed = copy.deepcopy(tree)
    twin = list(ast.walk(changed))[index]
    if what.startswith("removed: "):
        _replace(changed, twin, ast.copy_location(ast.Pass(), twin))
    else:
        how(twin)
    return ast.unparse(ast.fix_missing_locations(changed))


def _replace(tree: ast.AST, old: ast.AST, new: ast.stmt) -> None:
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and any(item is old for item in value):
                value[[item is old for item in value].index(True)] = new
                return
