"""A problem as people write it: by its shape, or by a name (`search_spaces/problems.yaml`)."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Any

from evoattn.model.dtype import DTYPES
from evoattn.model.errors import meant
from evoattn.model.mask import MASKS
from evoattn.model.operation import OPERATIONS
from evoattn.model.paths import SEARCH_SPACES
from evoattn.model.problem import LAYOUTS, AttentionProblem, ProblemError

_SIZES = {
    "b": ("batch",),
    "h": ("heads",),
    "hq": ("heads",),
    "hkv": ("kv_heads",),
    "s": ("seqlen_q", "seqlen_k"),
    "sq": ("seqlen_q",),
    "sk": ("seqlen_k",),
    "d": ("head_dim",),
    "dv": ("value_dim",),
}
"""What each key of a shape sets; keys are read in any case."""
_FLAGS = {"0": False, "1": True, "false": False, "true": True}
_SWITCHES = (
    "lse", "sink", "alibi", "shared_kv", "rotary_apart", "appended", "turned", "deterministic", "batch_invariant",
)  # fmt: skip
MOST_DIGITS = 9
"""Of a size."""
_NUMBERS = ("scale", "softcap")
_TEXTS = ("window", "bias", "seqused", "varlen", "score", "tables", "blocks", "predicate", "grads", "scales")
_SETTABLE = {name for names in _SIZES.values() for name in names} | {"dtype", "mask", "layout", "page", "op", "kv"}
_SETTABLE |= {*_SWITCHES, *_NUMBERS, *_TEXTS}
EXAMPLE = "B=1,H=16,S=1024,D=64,dtype=fp16,mask=full"
SHAPE_SYNTAX = (
    f"{EXAMPLE}; its keys: B, H, Hkv, S (or Sq and Sk), D, Dv, dtype, mask, layout, lse, scale, window, softcap, "
    "sink, alibi, bias, seqused, page, appended, shared_kv, rotary_apart, varlen, score, tables, blocks, predicate, "
    "kv, scales, turned, op, grads, deterministic and batch_invariant (see `evoattn search --help`)"
)
"""How a shape is written, with all its keys."""
_KEYS = {"batch": "B", "heads": "H", "seqlen_q": "S", "head_dim": "D"}
"""The key of each field that a shape cannot do without."""
_NAME_IN_FRONT = re.compile(r"^\s*\w+:\s+")
_AROUND_EQUALS = re.compile(r"\s*=\s*")


def complete(fields: dict[str, Any], name: str = "") -> AttentionProblem:
    """The problem with what may be left out filled in: kv_heads = heads, seqlen_k = seqlen_q."""
    fields = {"kv_heads": fields.get("heads"), "seqlen_k": fields.get("seqlen_q"), **fields}
    missing = [f for f in ("batch", "heads", "seqlen_q", "head_dim") if f not in fields]
    if missing:
        lacks = ", ".join(f"{f} ({_KEYS[f]}=)" for f in missing)
        raise ProblemError(f"The shape lacks {lacks}; it is written like {EXAMPLE}.")
    return AttentionProblem(**fields, name=name)


@cache
def named_shapes() -> dict[str, dict[str, Any]]:
    """The fields of each problem of `search_spaces/problems.yaml`, in its order. Raises `ProblemError` if the file is
    broken."""
    import yaml  # here, as a shape needs no PyYAML

    from evoattn.model import safe_yaml

    path = SEARCH_SPACES / "problems.yaml"
    try:
        return {str(name): dict(fields) for name, fields in safe_yaml.load_file(path).items()}
    except (OSError, yaml.YAMLError, TypeError, ValueError, AttributeError) as error:
        raise ProblemError(f"{path} cannot be read: {' '.join(str(error).split())}.") from None


def parse_shape(text: str) -> AttentionProblem:
    """The problem of a text such as `B=1,H=16,S=1024,D=64,dtype=fp16,mask=causal` (see `SHAPE_SYNTAX`), or of one as
    `describe` makes it, `B=1 H=32/8 S=1024 D=64 fp16 causal sink`, of which a name in front is not kept.

    Raises `ProblemError` on anything else."""
    fields: dict[str, Any] = {}
    for part in _parts(text):
        key, equals, value = part.partition("=")
        names = _SIZES.get(key.lower(), (key.lower(),))
        if not equals or names[0] not in _SETTABLE:
            if part in named_shapes():
                raise ProblemError(f"{part!r} is no shape but the name of a problem: --problem takes it.")
            raise ProblemError(f"{part!r} is not part of a shape, which is written like {SHAPE_SYNTAX}.")
        for name in names:
            if name in fields:
                raise ProblemError(f"The shape names {name} twice.")
            fields[name] = _value(name, key, value)
    return complete(fields)


def _parts(text: str) -> Iterator[str]:
    """The parts `key=value` of a shape, which commas, semicolons or spaces tell apart. `H=32/8` is two of them; a word
    alone is that of a dtype, a mask or a layout, or switches something on."""
    joined = _AROUND_EQUALS.sub("=", _NAME_IN_FRONT.sub("", text))
    for part in _split(joined) or [text]:
        key, equals, value = part.partition("=")
        heads, shared, kv_heads = value.partition("/")
        if shared and _SIZES.get(key.lower()) == ("heads",):
            yield from (f"{key}={heads}", f"Hkv={kv_heads}")
        elif equals:
            yield part
        else:
            kinds = [field for field in ("dtype", "mask", "layout") if key.lower() in chain(*_words(field).values())]
            yield f"{kinds[0]}={key}" if kinds else f"{key}=1" if key.lower() in _SWITCHES else part


def _split(text: str) -> list[str]:
    """What commas, semicolons and spaces tell apart, but for those within brackets, which expressions have."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([") - (sign in ")]")
        if depth <= 0 and (sign in ",;" or sign.isspace()):
            parts.append("")
        else:
            parts[-1] += sign
    return [part for part in parts if part]


def _words(field: str) -> dict[str, tuple[str, ...]]:
    """How each word of a field may be written, in any case; empty for a field of numbers.

    `causal` is `causal_upper_left`, as `is_causal=True` is in PyTorch."""
    if field in ("dtype", "kv"):
        return {name: dtype.spellings for name, dtype in DTYPES.items() if field == "kv" or dtype.may_query}
    if field == "mask":
        return {name: (name, *mask.spellings) for name, mask in MASKS.items()}
    names: Iterable[str] = {"layout": LAYOUTS, "op": OPERATIONS}.get(field, ())
    return {name: (name,) for name in names}


def _value(name: str, key: str, text: str) -> int | float | str | bool:
    """What `key=text` of a shape gives the field `name`. Raises `ProblemError`."""
    if name in _SWITCHES:
        if text.lower() not in _FLAGS:
            raise ProblemError(f"{name} must be 0 or 1, not {text!r}.")
        return _FLAGS[text.lower()]
    if name in _NUMBERS:
        try:
            return float(text)
        except ValueError:
            raise ProblemError(f"{name} must be a positive number, not {text!r}.") from None
    if name in _TEXTS:
        return text.lower()
    if words := _words(name):
        for word, spellings in words.items():
            if text.lower() in spellings:
                return word
        known = ", ".join(" or ".join(spellings[:2]) for spellings in words.values())
        raise ProblemError(f"{name} must be one of {known}, not {text!r}.")
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
        raise ProblemError(f"{key} must be a whole number from 1 to {10**MOST_DIGITS - 1}, not {text!r}.")
    return int(text)


@cache
def named_problems() -> dict[str, AttentionProblem]:
    """All of them, in the file's order. Raises `ProblemError` if the file is broken."""
    try:
        return {name: complete(fields, name) for name, fields in named_shapes().items()}
    except TypeError as error:  # a field that no problem has
        raise ProblemError(f"A problem of search_spaces/problems.yaml cannot be: {error}.") from None


def lookup(name: str) -> AttentionProblem:
    """The problem called `name`. Raises `ProblemError` on an unknown one."""
    problems = named_problems()
    if name not in problems:
        if "=" in name:
            raise ProblemError(f"{name!r} is a shape, not the name of a problem: --shape takes it.")
        raise ProblemError(f"Unknown problem {name!r}; `evoattn problems` lists all.{meant(name, problems)}")
    return problems[name]


def by_name_or_shape(text: str) -> AttentionProblem:
    """The named problem, or that of a shape, which has an equals sign.

    Raises `ProblemError` as `lookup` and `parse_shape` do."""
    return parse_shape(text) if "=" in text else lookup(text)
