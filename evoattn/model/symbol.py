"""Whole numbers that are not known yet: what Python works out of them is an expression, whose text is C++.

`outcomes` runs code once for each way that it can take; `merged` makes one result of them. So one function says what a
kernel is launched with, to Python and to exported C++ (`evoattn.export.host_code`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

_PLACES = {"*": 7, "+": 6, "-": 6, "<<": 5, "<": 4, ">=": 4, "==": 3, "!=": 3, "&&": 2, "?": 1}
"""How tightly operators bind in C++."""
_OPPOSITE = {">=": "<", "!=": "=="}
_LOOKED_FOR = "n"
P = ParamSpec("P")
T = TypeVar("T")
_made: dict[tuple[object, ...], Number] = {}
_known: list[dict[Number, bool]] = []
"""What the way that is taken has decided, of each `outcomes` that runs within another."""


class Number:
    """A name, or an operator and what it is applied to. Two that are made alike are one object.

    A truth value is asked for within `outcomes` alone; elsewhere it raises `TypeError`. As a key it is itself."""

    op: str
    parts: tuple[Any, ...]

    def __new__(cls, op: str, *parts: Any) -> Number:
        key = (op, *(("n", id(part)) if isinstance(part, Number) else part for part in parts))
        if key not in _made:
            _made[key] = made = super().__new__(cls)
            made.op, made.parts = op, parts
        return _made[key]

    def __hash__(self) -> int:
        return id(self)

    @property
    def is_condition(self) -> bool:
        return self.op in ("&&", *_OPPOSITE, *_OPPOSITE.values())

    @property
    def is_bound(self) -> bool:
        """Whether it is worked out of the number that a `first` looks for, and has no value outside of it."""
        return self.op == _LOOKED_FOR or (
            self.op != "first" and any(isinstance(part, Number) and part.is_bound for part in self.parts)
        )

    def __bool__(self) -> bool:
        if not self.is_condition:
            return bool(self != 0)
        if self.op in _OPPOSITE:
            return not Number(_OPPOSITE[self.op], *self.parts)
        if not _known:
            raise TypeError(f"Whether {self.text({})} holds is not known.")
        if self not in _known[-1]:
            raise _Fork(self)
        return _known[-1][self]

    def __add__(self, other: Any) -> Any:
        return self if _is(other, 0) else Number("+", self, other)

    def __radd__(self, other: Any) -> Any:
        return self if _is(other, 0) else Number("+", other, self)

    def __sub__(self, other: Any) -> Any:
        return self if _is(other, 0) else Number("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return Number("-", other, self)

    def __mul__(self, other: Any) -> Any:
        return 0 if _is(other, 0) else self if _is(other, 1) else Number("*", self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        if other is self or (self.op == "*" and other is self.parts[1]):
            return 1 if other is self else self.parts[0]
        return self if _is(other, 1) else Number("floor_div", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return 0 if _is(other, 0) else Number("floor_div", other, self)

    def __mod__(self, other: Any) -> Any:
        return 0 if _is(other, 1) else Number("floor_mod", self, other)

    def __rmod__(self, other: Any) -> Any:
        return Number("floor_mod", other, self)

    def __truediv__(self, other: Any) -> Any:
        return self if _is(other, 1) else Number("/", self, other)

    def __ceil__(self) -> Any:
        return Number("ceil_div", *self.parts) if self.op == "/" else self

    def __rlshift__(self, other: Any) -> Any:
        return Number("<<", other, self)

    def bit_length(self) -> Number:
        return Number("bit_length", self)

    def __lt__(self, other: Any) -> Any:
        return Number("<", self, other)

    def __gt__(self, other: Any) -> Any:
        return Number("<", other, self)

    def __ge__(self, other: Any) -> Any:
        return Number(">=", self, other)

    def __le__(self, other: Any) -> Any:
        return Number(">=", other, self)

    def __eq__(self, other: Any) -> Any:
        return self is other or Number("==", self, other)

    def __ne__(self, other: Any) -> Any:
        return self is not other and Number("!=", self, other)

    def __str__(self) -> str:
        return self.text({})

    def __format__(self, form: str) -> str:
        """In a sentence."""
        return "so many" if self.parts else self.op

    def text(self, names: dict[Number, str], whole: bool = True) -> str:
        """In C++, with `names` in place of some parts, and unless it is the `whole` of them in place of itself."""
        if not whole and self in names:
            return names[self]
        parts = [part.text(names, False) if isinstance(part, Number) else repr(part).lower() for part in self.parts]
        if not parts:
            return self.op
        if self.op == "first":
            parts[3] = f"[&](int64_t {_LOOKED_FOR}) {{ return {parts[3]}; }}"
        if self.op not in _PLACES:
            return f"{self.op}({', '.join(parts)})"
        here = _PLACES[self.op]
        for i, part in enumerate(self.parts):
            alone = not isinstance(part, Number) or part in names
            there = 9 if alone else _PLACES.get(part.op, 9)
            if there < here or (there == here and i > 0 and self.op in "-<<=="):
                parts[i] = f"({parts[i]})"
        return "{} ? {} : {}".format(*parts) if self.op == "?" else f"{parts[0]} {self.op} {parts[1]}"


class _Fork(BaseException):
    """The run came to a condition that is not decided yet."""

    def __init__(self, condition: Number) -> None:
        self.condition = condition


def _is(value: Any, number: int) -> bool:
    return not isinstance(value, Number) and value == number


class Either(NamedTuple):
    """`then` where the condition holds, else `otherwise`."""

    condition: Number
    then: Any
    otherwise: Any


def outcomes(run: Callable[[], Any]) -> Any:
    """What `run` returns, or a tree of `Either` of all that it may return."""
    return _outcomes(run, {**_known[-1]} if _known else {})


def _outcomes(run: Callable[[], Any], known: dict[Number, bool]) -> Any:
    _known.append(known)
    try:
        return run()
    except _Fork as fork:
        condition = fork.condition
    finally:
        _known.pop()
    return Either(condition, *(_outcomes(run, {**known, condition: holds}) for holds in (True, False)))


def merged(tree: Any) -> Any:
    """The tree of `outcomes` with numbers that differ as one number each. Results that differ in more stay apart."""
    if not isinstance(tree, Either):
        return tree
    then, otherwise = merged(tree.then), merged(tree.otherwise)
    try:
        return _merge(tree.condition, then, otherwise)
    except _Unlike:
        return Either(tree.condition, then, otherwise)


def as_one(function: Callable[P, T]) -> Callable[P, T]:
    """The function, whose result is one within `outcomes`, whatever ways lead to it: what calls it has one way then."""

    @wraps(function)
    def one(*args: P.args, **kwargs: P.kwargs) -> T:
        made: T = merged(outcomes(lambda: function(*args, **kwargs))) if _known else function(*args, **kwargs)
        return function(*args, **kwargs) if isinstance(made, Either) else made

    return one


least = as_one(min)


class _Unlike(Exception):
    """Two results that no expression makes one."""


def _merge(condition: Number, then: Any, otherwise: Any) -> Any:
    if isinstance(then, Number | int) and isinstance(otherwise, Number | int):
        return _select(condition, then, otherwise)
    if type(then) is not type(otherwise):
        raise _Unlike
    if isinstance(then, Either):
        if then.condition is not otherwise.condition:
            raise _Unlike
        return Either(then.condition, *(_merge(condition, *pair) for pair in zip(then[1:], otherwise[1:], strict=True)))
    if isinstance(then, tuple) and len(then) == len(otherwise):
        parts = [_merge(condition, *pair) for pair in zip(then, otherwise, strict=True)]
        return type(then)(*parts) if hasattr(then, "_fields") else tuple(parts)
    if isinstance(then, dict) and list(then) == list(otherwise):
        return {name: _merge(condition, value, otherwise[name]) for name, value in then.items()}
    if is_dataclass(then) and not isinstance(then, type):
        names = [field.name for field in fields(then)]
        return replace(then, **{n: _merge(condition, getattr(then, n), getattr(otherwise, n)) for n in names})
    if then != otherwise:
        raise _Unlike
    return then


def _select(condition: Number, then: Any, otherwise: Any) -> Any:
    if then is otherwise or (not isinstance(then, Number) and not isinstance(otherwise, Number) and then == otherwise):
        return then
    if otherwise is False:
        return condition if then is True else Number("&&", condition, then)
    if then is False and otherwise is True:
        return Number(next(op for op, opposite in _OPPOSITE.items() if opposite == condition.op), *condition.parts)
    if condition.op == "<":
        less, more = condition.parts
        for op, (first, second) in (("smaller", (less, more)), ("larger", (more, less))):
            if _same(then, first) and _same(otherwise, second):
                return Number(op, less, more)
    return Number("?", condition, then, otherwise)


def _same(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, Number) and not isinstance(b, Number) and a == b)


def first(places: tuple[int, int, int], holds: Callable[[int], bool], otherwise: int) -> int:
    """The first number of `range(*places)` for which `holds` is true, or `otherwise`."""
    if not any(isinstance(place, Number) for place in places):
        return next((n for n in range(*places) if holds(n)), otherwise)
    sought: Any = Number(_LOOKED_FOR)
    found: Any = Number("first", *places, merged(outcomes(lambda: bool(holds(sought)))), otherwise)
    return cast(int, found)
