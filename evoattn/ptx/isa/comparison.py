"""Comparisons and choices: setp, set and selp."""

from collections.abc import Callable
from functools import partial

import numpy as np

from evoattn.ptx.errors import unsupported
from evoattn.ptx.isa.dispatch import Fields, Operation, instruction
from evoattn.ptx.isa.floating import flush
from evoattn.ptx.isa.half import to_float32
from evoattn.ptx.program.kernel import Instruction, Lanes, Mask, PtxType, parse_type
from evoattn.ptx.state.registers import Binder

_PREDICATE = parse_type("pred")
Compare = Callable[[Lanes, Lanes, Mask], object]
"""`(a, b, out)`."""
_ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_COMPARE = r"\.(?P<compare>[a-z]{2,3})"
_TYPE = r"\.(?P<type>[bus](?:16|32|64)|f32|f64|f16|bf16)"


def _integer_comparison(ins: Instruction, compare: str, kind: PtxType) -> Compare:
    ufunc = _ORDERED.get(compare) or (_UNSIGNED.get(compare) if kind.kind == "u" else None)
    if ufunc is None or (kind.kind == "b" and compare not in ("eq", "ne")):
        raise unsupported(ins, f"the comparison .{compare} of a .{kind.kind} type")
    return ufunc


def _float_comparison(ins: Instruction, compare: str) -> Compare:
    """`(a, b, out)`. Ordered comparisons are false if either is NaN, those with `u` (equ, ltu, …) true."""
    if compare in _ORDERED and compare != "ne":
        return _ORDERED[compare]  # NumPy's are false on NaN, except !=
    if compare == "ne":
        return lambda a, b, out: np.logical_and(a != b, ~(np.isnan(a) | np.isnan(b)), out)
    if compare == "neu":
        return np.not_equal
    if compare in ("nan", "num"):
        if compare == "nan":
            return lambda a, b, out: np.logical_or(np.isnan(a), np.isnan(b), out)
        return lambda a, b, out: np.invert(np.isnan(a) | np.isnan(b), out)
    if compare[-1] == "u" and compare[:-1] in _ORDERED:
        opposite = {
            "equ": np.not_equal,
            "ltu": np.greater_equal,
            "leu": np.greater,
            "gtu": np.less_equal,
            "geu": np.less,
        }[compare]
        if compare == "equ":
            return lambda a, b, out: np.logical_or(a == b, np.isnan(a) | np.isnan(b), out)
        return lambda a, b, out: np.invert(opposite(a, b), out)
    raise unsupported(ins, f"the comparison .{compare}")


def _comparison(binder: Binder, ins: Instruction, fields: Fields) -> Callable[[Mask], object]:
    """A callable that writes the comparison of operands 1 and 2 into a bool array."""
    kind = parse_type(fields["type"])
    a, b = (binder.source(o, kind) for o in ins.operands[1:3])
    if kind.is_half:
        if kind.packed:
            raise unsupported(ins, "a packed comparison")
        compare = _float_comparison(ins, fields["compare"])
        return lambda out: compare(to_float32(a, kind.kind), to_float32(b, kind.kind), out)
    compare = (
        _float_comparison(ins, fields["compare"])
        if kind.is_float
        else _integer_comparison(ins, fields["compare"], kind)
    )
    if fields.get("ftz"):
        if fields["type"] != "f32":
            raise unsupported(ins, ".ftz is for f32")
        return lambda out: compare(flush(a), flush(b), out)
    return partial(compare, a, b)


@instruction("setp", _COMPARE + r"(?:\.(?P<combine>and|or|xor))?(?P<ftz>\.ftz)?" + _TYPE, kind="int")
def set_predicate(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """`setp d|e, a, b, c`: d = (a ? b) combined with c, e = !(a ? b) combined with c."""
    compare = _comparison(binder, ins, fields)
    d, *e = (binder.destination(o.strip(), _PREDICATE) for o in ins.operands[0].split("|"))
    if not fields["combine"] and not e:
        return partial(compare.func, *compare.args, d) if isinstance(compare, partial) else partial(compare, d)
    other: Mask | None = None
    combine: np.ufunc | None = None
    if fields["combine"]:
        other = binder.source(ins.operands[3].lstrip("!"), _PREDICATE)
        combine = _COMBINE[fields["combine"]]
    negated = len(ins.operands) > 3 and ins.operands[3].startswith("!")
    result = np.zeros(binder.count, np.bool_)

    def run() -> None:
        compare(result)
        opposite = ~result
        if combine is None or other is None:
            np.copyto(d, result)
            if e:
                np.copyto(e[0], opposite)
            return
        third = ~other if negated else other
        combine(result, third, d)
        if e:
            combine(opposite, third, e[0])

    return run


@instruction("set", _COMPARE + r"(?P<ftz>\.ftz)?\.(?P<result>u32|s32|f32)" + _TYPE, kind="int")
def set_number(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """All ones, or 1.0, where the comparison holds."""
    compare = _comparison(binder, ins, fields)
    d = binder.destination(ins.operands[0], parse_type(fields["result"]))
    yes = d.dtype.type(1) if fields["result"] == "f32" else np.uint32(0xFFFFFFFF).astype(d.dtype)
    result = np.zeros(binder.count, np.bool_)

    def run() -> None:
        compare(result)
        np.copyto(d, np.where(result, yes, d.dtype.type(0)))

    return run


@instruction("selp", r"\.(?P<type>[bus](?:16|32|64)|f32|f64)", kind="int")
def select(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    kind = parse_type(fields["type"])
    raw = parse_type(f"b{kind.bits}")
    a, b = (binder.source(o, kind).view(raw.dtype) for o in ins.operands[1:3])
    choose, d = binder.source(ins.operands[3], _PREDICATE), binder.destination(ins.operands[0], raw)
    return lambda: np.copyto(d, np.where(choose, a, b))
