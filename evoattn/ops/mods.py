"""A `score_mod` or `mask_mod` of torch's FlexAttention as an expression of `evoattn.model.score`.

The function is called once, with stand-ins for the score and the indices. Every operation that torch does with them is
written down by a row of `RULES`; none runs on the device. Captured tensors become tables, captured numbers constants.
What cannot be said so raises `Untraceable`, and torch's FlexAttention runs in its place."""

import contextlib
import math
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from evoattn.model.score import (
    INDICES,
    LARGEST_FLOAT,
    LARGEST_INT,
    MOST_CHARACTERS,
    SCORE,
    Apply,
    Name,
    Number,
    Table,
    Tree,
    applied,
    load,
    minus,
    plus,
    text_of,
    times,
)
from evoattn.model.score_cuda import is_natural
from evoattn.ops.arguments import MOST_DIMENSIONS, TABLE_DTYPES

MOST_PARTS = 4 * MOST_CHARACTERS
"""Operators and operands of an expression that is written out."""
ONE, TWENTY = Number(1), Number(20)
TRUE, FALSE = (Apply(sign, (Number(0), Number(0))) for sign in ("==", "!="))


class Untraceable(ValueError):
    """A function that is no expression: the message is one reason, without a full stop."""


@dataclass(frozen=True)
class Place:
    """A table as a part of a captured tensor."""

    base: int
    """Which tensor, in the order in which `Mods` met them."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements behind the tensor's own."""

    def of(self, tensor: Tensor) -> Tensor:
        if self.size == tuple(tensor.shape) and self.stride == tensor.stride() and not self.offset:
            return tensor
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class Traced:
    """What functions say: a score, a predicate, and their tables."""

    score: str
    """Empty where scores stay."""
    predicate: str
    """Empty where all keys are seen."""
    places: tuple[Place, ...]
    """Those of the tables `t0`, `t1` …"""

    def tables(self, captured: Sequence[Tensor]) -> dict[str, Tensor]:
        return {f"t{i}": place.of(captured[place.base]) for i, place in enumerate(self.places)}


def trace(score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None, captured: list[Tensor]) -> Traced:
    """The expressions of both functions, None for none; tensors that they capture and that are not in `captured` are
    put there. Raises `Untraceable`, and what the functions raise."""
    recorder = _Recorder(captured)
    score = recorder.call(score_mod, SCORE) if score_mod is not None else Name(SCORE)
    shown = recorder.call(mask_mod) if mask_mod is not None else TRUE
    score, shown = _number(score), _flag(shown)
    text = "" if score == Name(SCORE) else text_of(score)
    if text and not recorder.uses_score:
        text = f"where(k<0,s,{text})"  # an expression has s, and no key is below 0
    predicate = "" if shown == TRUE else text_of(shown)
    if max(len(text), len(predicate)) > MOST_CHARACTERS:
        raise Untraceable(
            f"an expression has {MOST_CHARACTERS} characters at most, not {max(map(len, (text, predicate)))}"
        )
    return Traced(text, predicate, tuple(recorder.places))


def _number(tree: Tree) -> Tree:
    """A condition as 1 or 0."""
    return Apply("where", (tree, Number(1), Number(0))) if tree.kind == "bool" else tree


def _flag(tree: Tree) -> Tree:
    """A number as whether it is not 0."""
    if isinstance(tree, Number):
        return TRUE if tree.value else FALSE
    return tree if tree.kind == "bool" else Apply("!=", (tree, Number(0)))


def _constant(value: Any) -> Tree:
    if isinstance(value, bool):
        return TRUE if value else FALSE
    if math.isnan(value):
        raise Untraceable("expressions have no NaN")
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        value = LARGEST_INT if value > 0 else -LARGEST_INT  # past all indices either way
    return Number(
        value if isinstance(value, int) else math.copysign(math.inf, value) if abs(value) > LARGEST_FLOAT else value
    )


def _apply(name: str, *of: Tree) -> Tree:
    """An operator of numbers; constants fold."""
    of = tuple(_number(one) for one in of)
    if name in _FOLDED and all(isinstance(one, Number) for one in of):
        x, y = (one.value for one in of if isinstance(one, Number))
        return Number(_FOLDED[name](x, y))
    if name in ("+", "*"):
        return (plus if name == "+" else times)(*of)
    return applied(name, of)


_FOLDED: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
}


def _add(x: Tree, y: Tree, alpha: Tree = ONE) -> Tree:
    return _apply("+", x, _apply("*", y, alpha))


def _sub(x: Tree, y: Tree, alpha: Tree = ONE) -> Tree:
    y = _apply("*", y, alpha)
    return _number(x) if y == Number(0) else _apply("-", x, y)


def _divided(x: Tree, y: Tree, rounding_mode: str | None = None) -> Tree:
    if rounding_mode is None:
        return _apply("/", x, y)
    if rounding_mode != "floor":
        raise Untraceable(f"expressions have no aten::div with rounding_mode={rounding_mode!r}")
    x, y = _number(x), _number(y)
    return _apply("//", x, y) if x.kind == y.kind == "int" else _apply("floor", _apply("/", x, y))


def _remainder(x: Tree, y: Tree) -> Tree:
    x, y = _number(x), _number(y)
    if x.kind == y.kind == "int":
        return _apply("%", x, y)
    return _apply("-", x, _apply("*", y, _apply("floor", _apply("/", x, y))))


def _both(sign: str, x: Tree, y: Tree) -> Tree:
    """`&` or `|` of conditions, without what changes nothing."""
    x, y = _flag(x), _flag(y)
    nothing, all_of_it = (TRUE, FALSE) if sign == "&" else (FALSE, TRUE)
    if all_of_it in (x, y):
        return all_of_it
    return y if x == nothing else x if y == nothing else Apply(sign, (x, y))


def _not(x: Tree) -> Tree:
    x = _flag(x)
    return FALSE if x == TRUE else TRUE if x == FALSE else Apply("~", (x,))


def _other(x: Tree, y: Tree) -> Tree:
    """Whether just one of two conditions holds."""
    return _both("|", _both("&", x, _not(y)), _both("&", _not(x), y))


def _bitwise(sign: str) -> Callable[[Tree, Tree], Tree]:
    def both(x: Tree, y: Tree) -> Tree:
        if "bool" in (x.kind, y.kind) and x.kind == y.kind:
            return _both(sign, x, y)
        if sign == "&" and "float" not in (x.kind, y.kind):
            return _apply("bitand", x, y)
        raise Untraceable(f"expressions have no {sign} of numbers")

    return both


def _bitwise_not(x: Tree) -> Tree:
    return _not(x) if x.kind == "bool" else _sub(minus(x), Number(1))


def _compared(sign: str) -> Callable[[Tree, Tree], Tree]:
    def compare(x: Tree, y: Tree) -> Tree:
        if x.kind == y.kind == "bool" and sign in ("==", "!="):
            return _other(x, y) if sign == "!=" else _not(_other(x, y))
        return _apply(sign, x, y)

    return compare


def _where(condition: Tree, yes: Tree, no: Tree) -> Tree:
    condition = _flag(condition)
    if condition in (TRUE, FALSE):
        return yes if condition == TRUE else no
    if yes.kind == no.kind == "bool":
        return _both("|", _both("&", condition, yes), _both("&", _not(condition), no))
    return applied("where", (condition, _number(yes), _number(no)))


def _clamp(x: Tree, low: Tree | None = None, high: Tree | None = None) -> Tree:
    x = x if low is None else _apply("max", x, low)
    return x if high is None else _apply("min", x, high)


def _pow(x: Tree, y: Tree) -> Tree:
    if isinstance(y, Number) and y.value in (1, 2, 3):
        return x if y.value == 1 else _apply("*", x, _pow(x, Number(y.value - 1)))
    if isinstance(y, Number) and y.value == 0.5:
        return _apply("sqrt", x)
    if x.kind == y.kind == "int":
        raise Untraceable("expressions have no aten::pow of whole numbers but squares and cubes")
    return _apply("pow", x, y)


def _over(x: Tree) -> Tree:
    return _apply("/", Number(1), x)


def _sigmoid(x: Tree) -> Tree:
    return _over(_apply("+", Number(1), _apply("exp", minus(_number(x)))))


def _gelu(x: Tree, approximate: str = "none") -> Tree:
    half = _apply("*", Number(0.5), x)
    if approximate == "none":
        return _apply("*", half, _apply("+", Number(1), _apply("erf", _apply("*", x, Number(math.sqrt(0.5))))))
    inner = _apply("+", x, _apply("*", Number(0.044715), _pow(x, Number(3))))
    return _apply("*", half, _apply("+", Number(1), _apply("tanh", _apply("*", Number(math.sqrt(2 / math.pi)), inner))))


def _softplus(x: Tree, beta: Tree = ONE, threshold: Tree = TWENTY) -> Tree:
    scaled = _apply("*", x, beta)
    soft = _apply("/", _apply("log", _apply("+", Number(1), _apply("exp", _apply("min", scaled, threshold)))), beta)
    return _where(_apply(">", scaled, threshold), x, soft)


def _sign(x: Tree) -> Tree:
    return _where(_apply(">", x, Number(0)), Number(1), _where(_apply("<", x, Number(0)), Number(-1), Number(0)))


def _copied(x: Tree, dtype: torch.dtype | None = None, **_: Any) -> Tree:
    """In another dtype. Whole numbers stay whole: their values are the same, and kernels make floats where one is
    needed."""
    if dtype is None:
        return x
    if dtype == torch.bool:
        return _flag(x)
    return _apply("whole", x) if x.kind == "float" and not dtype.is_floating_point else _number(x)


def _same(x: Tree, *_: Any, **__: Any) -> Tree:
    return x


def _named(name: str) -> Callable[..., Tree]:
    return lambda *of: _apply(name, *of)


SIGNS = {
    "mul": "*", "maximum": "max", "minimum": "min",
    "bitwise_right_shift": ">>", "bitwise_left_shift": "<<", "__rshift__": ">>", "__lshift__": "<<",
}  # fmt: skip
COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
SAME = "detach", "alias", "clone", "lift_fresh", "expand", "view", "squeeze"
RULES: dict[str, Callable[..., Tree]] = {
    "aten::add": _add,
    "aten::sub": _sub,
    "aten::rsub": lambda x, y, alpha=ONE: _sub(y, x, alpha),
    "aten::div": _divided,
    "aten::floor_divide": lambda x, y: _divided(x, y, "floor"),
    "aten::remainder": _remainder,
    "aten::neg": lambda x: minus(_number(x)),
    "aten::bitwise_and": _bitwise("&"),
    "aten::bitwise_or": _bitwise("|"),
    "aten::bitwise_xor": lambda x, y: _compared("!=")(x, y) if x.kind == y.kind == "bool" else _bitwise("^")(x, y),
    "aten::bitwise_not": _bitwise_not,
    "aten::logical_and": lambda x, y: _both("&", x, y),
    "aten::logical_or": lambda x, y: _both("|", x, y),
    "aten::logical_xor": lambda x, y: _other(_flag(x), _flag(y)),
    "aten::logical_not": _not,
    "aten::where": _where,
    "aten::masked_fill": lambda x, hidden, value: _where(hidden, value, x),
    "aten::clamp": _clamp,
    "aten::clamp_min": _clamp,
    "aten::clamp_max": lambda x, high: _clamp(x, None, high),
    "aten::relu": lambda x: _apply("max", x, Number(0)),
    "aten::exp2": lambda x: _apply("exp", _apply("*", x, Number(math.log(2)))),
    "aten::expm1": lambda x: _sub(_apply("exp", x), Number(1)),
    "aten::log2": lambda x: _apply("*", _apply("log", x), Number(1 / math.log(2))),
    "aten::log1p": lambda x: _apply("log", _apply("+", Number(1), x)),
    "aten::rsqrt": lambda x: _over(_apply("sqrt", x)),
    "aten::reciprocal": _over,
    "aten::pow": _pow,
    "aten::sigmoid": _sigmoid,
    "aten::silu": lambda x: _apply("*", x, _sigmoid(x)),
    "aten::gelu": _gelu,
    "aten::softplus": _softplus,
    "aten::floor": lambda x: x if x.kind == "int" else _apply("floor", x),
    "aten::ceil": lambda x: x if x.kind == "int" else minus(_apply("floor", minus(x))),
    "aten::trunc": lambda x: _apply("whole", x),
    "aten::isinf": lambda x: _apply("==", _apply("abs", x), Number(math.inf)),
    "aten::_to_copy": _copied,
    "approx::tanh": _named("tanh"),
    **{f"aten::{name}": _named(name) for name in ("abs", "tanh", "exp", "log", "sqrt", "erf", "sin", "cos")},
    **{f"aten::{name}": _named(sign) for name, sign in SIGNS.items()},
    **{f"aten::{name}": _compared(sign) for name, sign in COMPARED.items()},
    **dict.fromkeys(("aten::sign", "aten::sgn"), _sign),
    **dict.fromkeys((f"aten::{name}" for name in SAME), _same),
}
"""Tree by tree, of torch's operators; of numbers and other arguments as torch gives them."""
LIBRARIES = frozenset(("torch", "math", "operator", "builtins", "functools", "attn_gym"))
"""Their functions and modules stay as they are, but for what their closures hold."""
KINDS = frozenset(("isinstance", "type", "str", "repr", "format", "getattr", "hasattr"))
"""What may tell a number from a tensor of it, and raises nothing."""
_VIEWS = "view select slice expand permute transpose t squeeze unsqueeze alias detach as_strided unbind"
VIEWS = {f"aten::{name}" for name in _VIEWS.split(" ")}
"""Of a captured tensor: parts of the same memory."""
MADE: dict[str, float] = {"aten::scalar_tensor": 0, "aten::full": 1, "aten::new_full": 2, "aten::full_like": 1}
for _word, _value in (("zeros", 0.0), ("ones", 1.0)):
    MADE |= dict.fromkeys((f"aten::{_word}", f"aten::new_{_word}", f"aten::{_word}_like"), _value)
"""Where the arguments of what makes a tensor have its value, or, a float, what it is."""


class _Recorder(TorchDispatchMode):
    """Runs functions on stand-ins, tensors of one element on the CPU, and knows what each stands for."""

    def __init__(self, captured: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.captured, self.places, self.uses_score = captured, list[Place](), False
        self._is_apart = False
        self._tables: dict[tuple[object, ...], Table] = {}
        self._known: dict[int, tuple[Tensor, Tree, int]] = {}
        """By id: the stand-in itself, so that no other gets its id, what it stands for, and of how many parts."""
        self._rows: dict[int, tuple[Tensor, Tensor, tuple[Tree | None, ...]]] = {}
        """Likewise: a stand-in for a part of a table, the table, and the indices of those dimensions that have one."""

    def call(self, function: Callable[..., Any], *first: str) -> Tree:
        """What the function gives for stand-ins of the score, if it is named, and the four indices."""
        stands = [self._stand(torch.zeros((), dtype=torch.float32), Name(name)) for name in first]
        stands += [self._stand(torch.zeros((), dtype=torch.int32), Name(name)) for name in INDICES[:4]]
        with torch.no_grad(), _Subscripts(self), self:
            result = function(*stands)
        if not isinstance(result, Tensor):
            raise Untraceable(f"the function gives {type(result).__name__}, not a tensor")
        return self._tree(result)

    def _stand(self, tensor: Tensor, tree: Tree, parts: int = 1) -> Tensor:
        if parts > MOST_PARTS:
            raise Untraceable(f"an expression has {MOST_PARTS} parts at most")
        self._known[id(tensor)] = tensor, tree, parts
        return tensor

    def _tree(self, tensor: Tensor) -> Tree:
        """What a tensor without dimensions stands for."""
        if id(tensor) in self._known:
            tree = self._known[id(tensor)][1]
            self.uses_score |= tree == Name(SCORE)
            return tree
        if id(tensor) in self._rows or tensor.dim():
            raise Untraceable(f"a tensor of shape {list(tensor.shape)} is taken whole")
        return load(self._table(tensor.view(1)), (Number(0),))

    def _table(self, tensor: Tensor) -> Table:
        """The table of a captured tensor or a part of it."""
        dtype = TABLE_DTYPES.get(tensor.dtype)
        if dtype is None:
            raise Untraceable(f"it captures a tensor of {str(tensor.dtype).removeprefix('torch.')}")
        if tensor.dim() > MOST_DIMENSIONS or 0 in tensor.shape:
            raise Untraceable(f"it captures a tensor of shape {list(tensor.shape)}")
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), dtype, tensor.device
        if key not in self._tables:
            name = f"t{len(self._tables)}"
            self._tables[key] = Table(name, dtype, tuple(tensor.shape), f"own_{name}")
            self.places.append(self._place(tensor))
        return self._tables[key]

    def _place(self, tensor: Tensor) -> Place:
        base = next((i for i, one in enumerate(self.captured) if _holds(one, tensor)), len(self.captured))
        if base == len(self.captured):
            self.captured.append(tensor)
        offset = int(tensor.storage_offset() - self.captured[base].storage_offset())
        return Place(base, tuple(tensor.shape), tensor.stride(), offset)

    def subscripted(self, tensor: Tensor, subscript: Any, plain: Callable[..., Any]) -> Any:
        """`tensor[subscript]`; `plain` is torch's."""
        given = subscript if isinstance(subscript, tuple) else (subscript,)
        if id(tensor) not in self._rows and not any(isinstance(one, Tensor) for one in given):
            return plain(tensor, subscript)
        if id(tensor) in self._known:
            raise Untraceable("a number has no elements")
        table = tensor
        indices: tuple[Tree | None, ...] = (None,) * tensor.dim()
        if id(tensor) in self._rows:
            _, table, indices = self._rows[id(tensor)]
        if any(one is Ellipsis for one in given):
            at = [one is Ellipsis for one in given].index(True)
            given = (*given[:at], *(slice(None),) * (tensor.dim() + 1 - len(given)), *given[at + 1 :])
        found, still_open = list(indices), [dim for dim, index in enumerate(indices) if index is None]
        for dim, one in zip(still_open, given, strict=False):
            if isinstance(one, bool) or not isinstance(one, int | Tensor):
                if one == slice(None):
                    continue
                raise Untraceable(f"it indexes a tensor by {type(one).__name__}")
            index = self._tree(one) if isinstance(one, Tensor) else Number(one)
            if index.kind != "int":
                raise Untraceable("it indexes a tensor by what is no whole number")
            found[dim] = index
        trees = tuple(one for one in found if one is not None)
        with self._apart():
            if len(trees) == table.dim():
                made = load(self._table(table), trees, tuple(not is_natural(tree) for tree in trees))
                known = [self._known[id(one)][2] for one in given if id(one) in self._known]
                return self._stand(torch.zeros((), dtype=tensor.dtype), made, 1 + sum(known))
            shape = [size for size, index in zip(table.shape, found, strict=True) if index is None]
            rest = torch.empty(shape, dtype=tensor.dtype, device="meta")
        self._rows[id(rest)] = rest, table, tuple(found)
        return rest

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler at the first operation: seconds."""
        return False

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """A block whose operations are none of the function's. Torch's way to leave modes imports its compilers."""
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        if self._is_apart:
            return func(*args, **kwargs)
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        ours = [one for one in tensors if id(one) in self._known or id(one) in self._rows]
        if name == "aten::_local_scalar_dense":
            raise Untraceable("it reads a tensor's value in Python (aten::_local_scalar_dense)")
        if name == "aten::lift_fresh" and not ours:  # a number that is written in the function
            return self._stand(args[0], _constant(args[0].item()))
        if name in VIEWS and not ours:
            return func(*args, **kwargs)
        if name in MADE:
            return self._made(func, name, args, kwargs)
        if name not in RULES or func._schema.is_mutable:
            raise Untraceable(f"expressions have no {name}")
        values = [self._value(one) for one in args]
        named = {key: self._value(one) for key, one in kwargs.items()}
        parts = 1 + sum(self._known[id(one)][2] if id(one) in self._known else 1 for one in tensors)
        try:
            tree = RULES[name](*values, **named)
        except (TypeError, ValueError) as error:
            raise Untraceable(
                str(error) if isinstance(error, Untraceable) else f"expressions have no such {name}"
            ) from None
        like = [torch.ones((), dtype=one.dtype) if isinstance(one, Tensor) else one for one in args]
        words = {key: one for key, one in kwargs.items() if key != "device"}
        result = func(*like, **words)
        return self._stand(result.clone() if result is like[0] else result, tree, parts)

    def _made(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        place = MADE[name]
        value = place if isinstance(place, float) else args[place] if len(args) > place else kwargs["fill_value"]
        like = [torch.ones((), dtype=one.dtype) if isinstance(one, Tensor) else one for one in args]
        result: Tensor = func(*like, **{key: one for key, one in kwargs.items() if key != "device"})
        if result.dim():
            raise Untraceable(f"it makes a tensor of shape {list(result.shape)} ({name})")
        if result.dtype == torch.bool:
            value = bool(value)
        elif not result.dtype.is_floating_point:
            value = int(value)
        return self._stand(result, _constant(value))

    def _value(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            return self._tree(given)
        return _constant(given) if isinstance(given, bool | int | float) else given


class _Subscripts(TorchFunctionMode):
    """Indexing by a tensor without dimensions, which torch would read."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            tensor, subscript = args
            return self._recorder.subscripted(tensor, subscript, func)
        return func(*args, **(kwargs or {}))


def is_library(function: types.FunctionType) -> bool:
    """Whether a function is one of `LIBRARIES`."""
    return bool(function.__module__) and function.__module__.partition(".")[0] in LIBRARIES


def require_no_kinds(code: types.CodeType) -> None:
    """Raises `Untraceable` for code that may ask of which kind a number is."""
    if not KINDS.isdisjoint(code.co_names):
        raise Untraceable("it may ask of which kind a number is")
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            require_no_kinds(one)


def _holds(one: Tensor, part: Tensor) -> bool:
    """Whether a tensor is, or begins in, the memory of another one."""
    if one is part:
        return True
    return one.dtype == part.dtype and one.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
