"""What is done to a score between the product and the softmax: an expression, and all that is printed of it.

A score `s`, scaled, becomes the value of an expression of

- `s`, and of whole numbers: `b`, `h`, `q`, `k`, the batch, the query head, the query and the key, of packed sequences
  within their own; `d`, the key of query 0's diagonal (`AttentionProblem.diagonal`);
- numbers, and `inf`;
- tables, tensors that are given beside it: `table[h, k - q + 63]`. An index outside is taken as the nearest one inside;
  `table[wrap(k - q)]` counts one below 0 from the end first, as Python does;
- `+ - * / // %`, comparisons, `& | ~` of these, and the functions of `OPERATORS`.

It is written as in Python and means there what it means here. Softcap, ALiBi's slopes and a bias are such expressions
too (`scoring.py`). A predicate is such an expression, of the indices and tables alone, that is true or
false. `OPERATORS` is the one table of what an expression may do: text, value in torch, CUDA,
derivative and cost stand in one row."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

from evoattn.model.dtype import WIDE_DTYPES

Kind = Literal["bool", "int", "float"]
SCORE = "s"
INDICES = ("b", "h", "q", "k", "d")
INTEGERS = "int32"
LONG, FLAGS = "int64", "bool"
WHOLE = {INTEGERS: "int", LONG: "long long", FLAGS: "bool"}
"""Dtypes of tables beside `WIDE_DTYPES`, in CUDA. Numbers of int64 past those of int32 are taken as the nearest."""
MOST_CHARACTERS = 4000
MOST_ELEMENTS = (1 << 31) - 1
"""Of a table: kernels count them in int32."""
LARGEST_INT, LARGEST_FLOAT = (1 << 31) - 1, 3.4e38
_TABLE = re.compile(r"([a-z_][a-z0-9_]{0,31}):([a-z0-9]+):(\d{1,9}(?:x\d{1,9}){0,3})", re.ASCII)


@dataclass(frozen=True)
class Number:
    value: float

    @property
    def kind(self) -> Kind:
        return "int" if isinstance(self.value, int) else "float"


@dataclass(frozen=True)
class Name:
    """The score or an index."""

    name: str

    @property
    def kind(self) -> Kind:
        return "float" if self.name == SCORE else "int"


@dataclass(frozen=True)
class Load:
    """An element of a table."""

    table: Table
    indices: tuple[Tree, ...]
    wraps: tuple[bool, ...]
    """Of each index: whether it counts from the end below 0."""

    @property
    def kind(self) -> Kind:
        return "bool" if self.table.dtype == FLAGS else "int" if self.table.dtype in WHOLE else "float"

    def places(self, values: Mapping[str, Any], torch: Any) -> tuple[Any, ...]:
        """The element's indices, as `evaluate` takes them."""
        return tuple(
            _inside(evaluate(index, values, torch), size, wrap)
            for index, size, wrap in zip(self.indices, values[self.table.buffer].shape, self.wraps, strict=True)
        )


@dataclass(frozen=True)
class Apply:
    """An operator and what it is applied to."""

    operator: str
    of: tuple[Tree, ...]

    @property
    def kind(self) -> Kind:
        given = [one.kind for one in self.of]
        of = OPERATORS[self.operator].kind
        return of if of != "numbers" else "float" if "float" in given else "int"


Tree = Number | Name | Load | Apply


class Table(NamedTuple):
    """A tensor that an expression loads from; contiguous."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    buffer: str
    """The name of the problem's input."""

    def describe(self) -> str:
        """E.g. `gate:fp32:12`."""
        return f"{self.name}:{self.dtype}:{'x'.join(map(str, self.shape))}"


Slopes = Callable[..., tuple["Tree | None", ...]]


class Operator(NamedTuple):
    """A row of `OPERATORS`."""

    kind: Kind | Literal["numbers"]
    """Of the result; `numbers`: float where an argument is, else int."""
    takes: tuple[Kind, ...]
    """The widest kind of each argument, of bool, int and float; bool is taken by itself alone."""
    torch: Callable[..., Any]
    """(torch, values) → value; the values are tensors or Python's numbers."""
    cuda: str
    """With a place `{}` for each argument."""
    slopes: Slopes | None = None
    """The derivatives by each argument, of these arguments; None where it is 0 wherever there is one."""
    cost: tuple[float, float, float] = (0.0, 1.0, 1.0)
    """(special functions, FP32 lane operations, instructions) for each score."""


def _choose(torch: Any, condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, bool):
        return yes if condition else no
    return torch.where(condition, yes, no)


def _function(name: str) -> Callable[..., Any]:
    def value(torch: Any, x: Any) -> Any:
        if not hasattr(x, "dtype"):
            return getattr(math, name)(x)
        return getattr(torch, name)(x if x.dtype.is_floating_point else x.double())

    return value


def _binary(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda torch, x, y: function(x, y)


_F: tuple[Kind, ...] = ("float",)
_FF: tuple[Kind, ...] = ("float", "float")
_II: tuple[Kind, ...] = ("int", "int")
_BB: tuple[Kind, ...] = ("bool", "bool")
_COMPARED = (0.0, 0.0, 1.0)
_LONG_COST = (1.0, 4.0, 8.0)


OPERATORS: dict[str, Operator] = {
    "+": Operator("numbers", _FF, _binary(operator.add), "({} + {})", lambda x, y: (Number(1), Number(1))),
    "-": Operator("numbers", _FF, _binary(operator.sub), "({} - {})", lambda x, y: (Number(1), Number(-1))),
    "*": Operator("numbers", _FF, _binary(operator.mul), "({} * {})", lambda x, y: (y, x)),
    "/": Operator(
        "float",
        _FF,
        _binary(operator.truediv),
        "__fdividef({}, {})",
        lambda x, y: (divided(Number(1), y), minus(divided(x, times(y, y)))),
        (1.0, 2.0, 4.0),
    ),
    "//": Operator("int", _II, _binary(operator.floordiv), "floor_divide({}, {})", None, (0.0, 0.0, 12.0)),
    "%": Operator("int", _II, _binary(operator.mod), "floor_remainder({}, {})", None, (0.0, 0.0, 14.0)),
    "minus": Operator("numbers", _F, lambda torch, x: -x, "(-{})", lambda x: (Number(-1),)),
    "<": Operator("bool", _FF, _binary(operator.lt), "({} < {})", None, _COMPARED),
    "<=": Operator("bool", _FF, _binary(operator.le), "({} <= {})", None, _COMPARED),
    ">": Operator("bool", _FF, _binary(operator.gt), "({} > {})", None, _COMPARED),
    ">=": Operator("bool", _FF, _binary(operator.ge), "({} >= {})", None, _COMPARED),
    "==": Operator("bool", _FF, _binary(operator.eq), "({} == {})", None, _COMPARED),
    "!=": Operator("bool", _FF, _binary(operator.ne), "({} != {})", None, _COMPARED),
    "&": Operator("bool", _BB, _binary(operator.and_), "({} && {})", None, _COMPARED),
    "|": Operator("bool", _BB, _binary(operator.or_), "({} || {})", None, _COMPARED),
    "~": Operator("bool", ("bool",), lambda torch, x: x ^ True, "(!{})", None, _COMPARED),
    "where": Operator(
        "numbers",
        ("bool", "float", "float"),
        _choose,
        "({} ? {} : {})",
        lambda c, x, y: (None, where(c, Number(1), Number(0)), where(c, Number(0), Number(1))),
        _COMPARED,
    ),
    "max": Operator(
        "numbers",
        _FF,
        lambda torch, x, y: _choose(torch, x > y, x, y),
        "larger({}, {})",
        lambda x, y: (where(over(x, y), Number(1), Number(0)), where(over(x, y), Number(0), Number(1))),
    ),
    "min": Operator(
        "numbers",
        _FF,
        lambda torch, x, y: _choose(torch, x < y, x, y),
        "smaller({}, {})",
        lambda x, y: (where(over(y, x), Number(1), Number(0)), where(over(y, x), Number(0), Number(1))),
    ),
    "abs": Operator(
        "numbers",
        _F,
        lambda torch, x: abs(x),
        "magnitude({})",
        lambda x: (where(over(Number(0), x), Number(-1), Number(1)),),
    ),
    "exp": Operator(
        "float", _F, _function("exp"), "exp2_approx({} * 1.44269504f)", lambda x: (Apply("exp", (x,)),), (1.0, 3.0, 5.0)
    ),
    "log": Operator("float", _F, _function("log"), "logf({})", lambda x: (divided(Number(1), x),), (0.0, 10.0, 20.0)),
    "sqrt": Operator(
        "float", _F, _function("sqrt"), "sqrtf({})", lambda x: (divided(Number(0.5), Apply("sqrt", (x,))),), _LONG_COST
    ),
    "tanh": Operator(
        "float",
        _F,
        _function("tanh"),
        "tanhf({})",
        lambda x: (plus(Number(1), minus(times(Apply("tanh", (x,)), Apply("tanh", (x,))))),),
        (2.0, 10.0, 20.0),
    ),
    "erf": Operator(
        "float",
        _F,
        _function("erf"),
        "erff({})",
        lambda x: (times(Number(2 / math.sqrt(math.pi)), Apply("exp", (minus(times(x, x)),))),),
        (1.0, 12.0, 24.0),
    ),
    "sin": Operator("float", _F, _function("sin"), "sine({}, 0.f)", lambda x: (Apply("cos", (x,)),), (0.0, 12.0, 16.0)),
    "cos": Operator(
        "float", _F, _function("cos"), "sine({}, 0.5f)", lambda x: (minus(Apply("sin", (x,))),), (0.0, 12.0, 16.0)
    ),
    "pow": Operator(
        "float",
        _FF,
        lambda torch, x, y: x**y,
        "powf({}, {})",
        lambda x, y: (
            times(y, Apply("pow", (x, plus(y, Number(-1))))),
            times(Apply("pow", (x, y)), Apply("log", (x,))),
        ),
        (2.0, 20.0, 40.0),
    ),
    "floor": Operator("float", _F, _function("floor"), "floorf({})", None, (0.0, 0.0, 2.0)),
    "whole": Operator("int", _F, lambda torch, x: x.long() if hasattr(x, "dtype") else int(x), "int({})"),
    ">>": Operator("int", _II, _binary(operator.rshift), "({} >> {})", None, _COMPARED),
    "<<": Operator("int", _II, _binary(operator.lshift), "({} << {})", None, _COMPARED),
    "bitand": Operator("int", _II, _binary(operator.and_), "({} & {})", None, _COMPARED),
}
"""By the sign or the function's name in a text; `minus` is the sign before one number. `larger`, `smaller` and others
stand in `templates/device/score.cuh`."""
_SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.RShift: ">>",
    ast.LShift: "<<",
    ast.Invert: "~",
    ast.USub: "minus",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
FUNCTIONS = tuple(name for name in OPERATORS if name.isalpha() and name != "minus")
LOAD_COST = (0.0, 2.0, 6.0)
"""Of an element with its address, as `Operator.cost`."""


def _is(tree: Tree, value: float) -> bool:
    return isinstance(tree, Number) and tree.value == value


def plus(x: Tree, y: Tree) -> Tree:
    """x + y, without what adds nothing."""
    return y if _is(x, 0) else x if _is(y, 0) else Apply("+", (x, y))


def times(x: Tree, y: Tree) -> Tree:
    """x · y, without what changes nothing."""
    if _is(x, 0) or _is(y, 0):
        return Number(0)
    return y if _is(x, 1) else x if _is(y, 1) else Apply("*", (x, y))


def minus(x: Tree) -> Tree:
    """-x."""
    return Number(-x.value) if isinstance(x, Number) else Apply("minus", (x,))


def divided(x: Tree, y: Tree) -> Tree:
    """x / y, 0 where x is."""
    return Number(0) if _is(x, 0) else Apply("/", (x, y))


def over(x: Tree, y: Tree) -> Tree:
    """Whether x > y."""
    return Apply(">", (x, y))


def where(condition: Tree, yes: Tree, no: Tree) -> Tree:
    """`yes` where the condition holds, else `no`."""
    return yes if yes == no else Apply("where", (condition, yes, no))


@dataclass(frozen=True)
class Score:
    """An expression; `text` is it without spaces."""

    tree: Tree
    text: str
    tables: tuple[Table, ...] = ()


def parse_tables(text: str) -> tuple[Table, ...]:
    """The tables of `name:dtype:sizes+…`, e.g. `table:bf16:12x127+gate:fp32:12`. Raises `ValueError`."""
    tables: list[Table] = []
    for part in text.split("+") if text else ():
        match = _TABLE.fullmatch(part)
        if not match:
            raise ValueError(f"{part!r} is no table, which is written like gate:fp32:12x64 with up to four sizes")
        name, dtype, sizes = match[1], match[2], tuple(int(size) for size in match[3].split("x"))
        if dtype not in (*WIDE_DTYPES, *WHOLE):
            raise ValueError(f"table {name} must be of {', '.join((*WIDE_DTYPES, *WHOLE))}, not {dtype}")
        if name in (SCORE, *INDICES, *FUNCTIONS, "inf", "wrap") or name in {table.name for table in tables}:
            raise ValueError(f"a table cannot be called {name}: that name is taken")
        if not 0 < math.prod(sizes) <= MOST_ELEMENTS:
            raise ValueError(f"table {name} must have 1 to {MOST_ELEMENTS} elements")
        tables.append(Table(name, dtype, sizes, f"own_{name}"))
    return tuple(tables)


@cache
def parse_score(text: str, tables: str | tuple[Table, ...] = "", several: bool = False) -> Score:
    """The expression of a text, with tables as `parse_tables` reads them; `several`: others may use these tables, too.
    Raises `ValueError`, whose message says what is wrong in one sentence without a full stop."""
    made, names = _parsed(text, tables, several)
    if made.tree.kind == "bool":
        raise ValueError(f"{text!r} is true or false, not a score; write where(…, s, -inf) to hide keys")
    if SCORE not in names:
        raise ValueError(f"{text!r} has no s, the score that it changes")
    return made


@cache
def parse_predicate(text: str, tables: str | tuple[Table, ...] = "", several: bool = False) -> Score:
    """As `parse_score`, of a predicate."""
    made, names = _parsed(text, tables, several)
    if made.tree.kind != "bool":
        raise ValueError(f"{text!r} is not true or false")
    if SCORE in names:
        raise ValueError(f"{text!r} has s, and a predicate is of the indices and tables alone")
    return made


def _parsed(text: str, tables: str | tuple[Table, ...], several: bool) -> tuple[Score, set[str]]:
    """An expression, and the names in it. Raises `ValueError`."""
    known = {table.name: table for table in (parse_tables(tables) if isinstance(tables, str) else tables)}
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"an expression has {MOST_CHARACTERS} characters at most, not {len(text)}")
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"{text!r} is no expression") from None
    try:
        tree = _tree(parsed, known)
        every = tuple(parts(tree))
        names = {one.name for one in every if isinstance(one, Name)}
        names |= {one.table.name for one in every if isinstance(one, Load)}
        plain = ast.unparse(parsed).replace(" ", "")
    except RecursionError:
        raise ValueError("an expression is nested too deeply") from None
    if not several and (unused := [name for name in known if name not in names]):
        raise ValueError(f"{text!r} does not use the table {unused[0]}")
    return Score(tree, plain, tuple(known.values())), names


def text_of(tree: Tree) -> str:
    """The expression as `parse_score` and `parse_predicate` read it."""
    match tree:
        case Number(value):
            text = "inf" if math.isinf(value) else repr(abs(value))
            return f"(-{text})" if value < 0 else text
        case Name(name):
            return name
        case Load(table, indices, wraps):
            places = (f"wrap({text_of(i)})" if wrap else text_of(i) for i, wrap in zip(indices, wraps, strict=True))
            return f"{table.name}[{','.join(places)}]"
        case Apply(name, of):
            given = [text_of(one) for one in of]
            if name in FUNCTIONS:
                return f"{name}({','.join(given)})"
            return (
                f"({given[0]}{name}{given[1]})" if len(given) > 1 else f"({'-' if name == 'minus' else name}{given[0]})"
            )


def _tree(node: ast.expr, tables: Mapping[str, Table]) -> Tree:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            if abs(value) > (LARGEST_INT if isinstance(value, int) else LARGEST_FLOAT):
                raise ValueError(f"{value} is larger than what kernels count with")
            return Number(value)
        case ast.Name(id="inf"):
            return Number(math.inf)
        case ast.Name(id=name) if name in (SCORE, *INDICES):
            return Name(name)
        case ast.Name(id=name):
            raise ValueError(f"{name} is unknown; there are {SCORE}, {', '.join(INDICES)}, inf and the tables")
        case ast.Subscript(value=ast.Name(id=name), slice=place) if name in tables:
            given = place.elts if isinstance(place, ast.Tuple) else [place]
            wraps = tuple(isinstance(one, ast.Call) and ast.unparse(one.func) == "wrap" for one in given)
            plain = (
                one.args[0] if isinstance(one, ast.Call) and wrap and one.args else one
                for one, wrap in zip(given, wraps, strict=True)
            )
            return load(tables[name], tuple(_tree(one, tables) for one in plain), wraps)
        case ast.UnaryOp(op=sign, operand=of) if type(sign) in _SIGNS:
            found = applied(_SIGNS[type(sign)], (_tree(of, tables),))
            return minus(found.of[0]) if found.operator == "minus" else found
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SIGNS:
            return applied(_SIGNS[type(op)], (_tree(left, tables), _tree(right, tables)))
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _SIGNS for op in ops):
            sides = [_tree(one, tables) for one in (left, *others)]
            pairs = [applied(_SIGNS[type(op)], (sides[i], sides[i + 1])) for i, op in enumerate(ops)]
            both: Tree = pairs[0]
            for pair in pairs[1:]:
                both = applied("&", (both, pair))
            return both
        case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in FUNCTIONS:
            return applied(name, tuple(_tree(one, tables) for one in given))
    raise ValueError(f"{ast.unparse(node)!r} is nothing that a score can be made of; there are {' '.join(OPERATORS)}")


def load(table: Table, indices: tuple[Tree, ...], wraps: tuple[bool, ...] = ()) -> Load:
    """An element of a table. Raises `ValueError` for indices of another number, or that are no whole numbers."""
    if len(indices) != len(table.shape):
        raise ValueError(f"table {table.name} has {len(table.shape)} dimensions, and {len(indices)} indices are given")
    if any(index.kind != "int" for index in indices):
        raise ValueError(f"the indices of table {table.name} must be whole numbers")
    return Load(table, indices, wraps or (False,) * len(indices))


_WIDTH: dict[Kind, int] = {"int": 1, "float": 2}


def applied(name: str, of: tuple[Tree, ...]) -> Apply:
    """An operator's value. Raises `ValueError` where it takes others."""
    takes = OPERATORS[name].takes
    if len(of) != len(takes):
        raise ValueError(f"{name} takes {len(takes)} values, not {len(of)}")
    for one, wanted in zip(of, takes, strict=True):
        if (one.kind == "bool") != (wanted == "bool") or (wanted != "bool" and _WIDTH[one.kind] > _WIDTH[wanted]):
            raise ValueError(f"{name} takes {wanted} where {one.kind} is given")
    return Apply(name, of)


def parts(tree: Tree) -> Iterator[Tree]:
    """An expression, and all that it is made of, from left to right."""
    left = [tree]
    while left:
        one = left.pop()
        yield one
        if isinstance(one, Apply | Load):
            left += reversed(one.of if isinstance(one, Apply) else one.indices)


def depends_on(tree: Tree, name: str) -> bool:
    """Whether an expression differs by an index, or by the score."""
    return any(isinstance(one, Name) and one.name == name for one in parts(tree))


def has_loads(tree: Tree) -> bool:
    """Whether an expression reads a table."""
    return any(isinstance(one, Load) for one in parts(tree))


def loads_pairs(tree: Tree) -> bool:
    """Whether an expression loads an element for each query and key."""
    return any(isinstance(one, Load) and depends_on(one, "q") and depends_on(one, "k") for one in parts(tree))


def replaced(tree: Tree, one: Tree, other: Tree) -> Tree:
    """The expression with another one wherever one stands."""
    if tree == one:
        return other
    match tree:
        case Apply(name, of):
            return Apply(name, tuple(replaced(part, one, other) for part in of))
        case Load(table, of, wraps):
            return Load(table, tuple(replaced(part, one, other) for part in of), wraps)
    return tree


def evaluate(tree: Tree, values: Mapping[str, Any], torch: Any) -> Any:
    """The value of an expression: `values` has the score, the indices, whole numbers or tensors of them that broadcast,
    and the tables by the names of their buffers, whose elements are taken in the score's dtype; `torch` is the module.
    """
    match tree:
        case Number(value):
            return value
        case Name(name):
            return values[name]
        case Load(table):
            element = values[table.buffer][tree.places(values, torch)]
            return element if table.dtype in WHOLE or SCORE not in values else element.to(values[SCORE].dtype)
        case Apply(name, of):
            return OPERATORS[name].torch(torch, *(evaluate(one, values, torch) for one in of))


def _inside(index: Any, size: int, wrap: bool) -> Any:
    if wrap:
        index = index + (index < 0) * size
    return index.clamp(0, size - 1) if hasattr(index, "clamp") else min(max(index, 0), size - 1)


def derivative(tree: Tree, by: Name | Load | None = None) -> Tree:
    """d tree / d `by`, the score unless an element of a table is given, which counts wherever it is loaded by the same
    indices; 0 where a step or a whole number hides it, at an edge of `max`, `min` and `abs` one side's."""
    by = by or Name(SCORE)
    if tree == by:
        return Number(1)
    match tree:
        case Apply(name, of) if (slopes := OPERATORS[name].slopes) is not None:
            total: Tree = Number(0)
            for one, slope in zip(of, slopes(*of), strict=True):
                if slope is not None:
                    total = plus(total, times(slope, derivative(one, by)))
            return total
    return Number(0)


@lru_cache(maxsize=256)
def elements(tree: Tree, buffer: str) -> tuple[Load, ...]:
    """The elements of a table, by its buffer's name, that an expression differs by: each once. Kept, as a family is
    asked of each config of a problem."""
    found: dict[Load, None] = {}
    match tree:
        case Load(table) if table.buffer == buffer:
            found[tree] = None
        case Apply(_, of):
            found = {one: None for part in of for one in elements(part, buffer)}
    return tuple(one for one in found if derivative(tree, one) != Number(0))


def cost(tree: Tree) -> tuple[float, float, float]:
    """(special functions, FP32 lane operations, instructions) of an expression, as `Operator.cost`. What the keys of a
    row share is computed once for all of them, and counts as nothing."""
    if not (depends_on(tree, "k") or depends_on(tree, SCORE)):
        return 0.0, 0.0, 0.0
    match tree:
        case Load(_, indices, _):
            parts = [LOAD_COST, *map(cost, indices)]
        case Apply(name, of):
            parts = [OPERATORS[name].cost, *map(cost, of)]
        case _:
            return 0.0, 0.0, 0.0
    special, lanes, instructions = (sum(column) for column in zip(*parts, strict=True))
    return special, lanes, instructions
