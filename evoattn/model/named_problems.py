"""Problems by name (`search_spaces/problems.yaml`) and by shape on the command line."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any

from evoattn.model.dtype import DTYPES
from evoattn.model.mask import MASKS
from evoattn.model.meant import meant
from evoattn.model.paths import SEARCH_SPACES
from evoattn.model.problem import LAYOUTS, AttentionProblem, ProblemError

_FILE = SEARCH_SPACES / "problems.yaml"
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
_SWITCHES = ("lse", "sink", "alibi", "shared_kv")
MOST_DIGITS = 9
"""Of a size."""
_NUMBERS = ("scale", "softcap")
_TEXTS = ("window", "bias", "seqused", "varlen")
_SETTABLE = {name for names in _SIZES.values() for name in names} | {"dtype", "mask", "layout", "page"}
_SETTABLE |= {*_SWITCHES, *_NUMBERS, *_TEXTS}
EXAMPLE = "B=1,H=16,S=1024,D=64,dtype=fp16,mask=full"
SHAPE_SYNTAX = (
    f"{EXAMPLE}; its keys are B, H, Hkv, S (or Sq and Sk), D, Dv, dtype, mask, layout, lse, scale, window, softcap, "
    "sink, alibi, bias, seqused, page, shared_kv and varlen (see `evoattn search --help`)"
)
"""How a shape is written, with all its keys."""
LONGEST_LENGTHS = 40
"""Characters of lengths that a file's name may have."""
_KEYS = {"batch": "B", "heads": "H", "seqlen_q": "S", "head_dim": "D"}
"""The key of each field that a shape cannot do without."""


def _complete(fields: dict[str, Any], name: str = "") -> AttentionProblem:
    """The problem with what may be left out filled in: kv_heads = heads, seqlen_k = seqlen_q."""
    fields = {"kv_heads": fields.get("heads"), "seqlen_k": fields.get("seqlen_q"), **fields}
    missing = [f for f in ("batch", "heads", "seqlen_q", "head_dim") if f not in fields]
    if missing:
        raise ProblemError(
            f"The shape lacks {', '.join(f'{f} ({_KEYS[f]}=)' for f in missing)}; it is written like {SHAPE_SYNTAX}."
        )
    return AttentionProblem(**fields, name=name)


@cache
def named_problems() -> dict[str, AttentionProblem]:
    """All problems of `problems.yaml`, in its order. Raises `ProblemError` if the file is broken."""
    import yaml  # here, as a shape alone needs no PyYAML

    from evoattn.model import safe_yaml

    try:
        rows = safe_yaml.load_file(_FILE)
        return {name: _complete(fields, name) for name, fields in rows.items()}
    except (OSError, yaml.YAMLError, TypeError, AttributeError) as error:
        raise ProblemError(f"{_FILE} cannot be read: {' '.join(str(error).split())}.") from None


def lookup(name: str) -> AttentionProblem:
    """The problem called `name`. Raises `ProblemError` on an unknown one."""
    problems = named_problems()
    if name not in problems:
        near = meant(name, problems)  # all of them are many words, of no use beside the right one
        some = "`evoattn problems` lists all." if near else f"evoattn has {', '.join(problems)}."
        raise ProblemError(f"Unknown problem {name!r}; {some}{near}")
    return problems[name]


def parse_shape(text: str) -> AttentionProblem:
    """The problem of a text such as `B=1,H=16,S=1024,D=64,dtype=fp16,mask=causal` (see `SHAPE_SYNTAX`), or of one as
    `describe` makes it: `B=1 H=32/8 S=1024 D=64 fp16 causal sink`.

    Raises `ProblemError` on anything else.
    """
    fields: dict[str, Any] = {}
    for part in _parts(text):
        key, equals, value = (word.strip() for word in part.partition("="))
        names = _SIZES.get(key.lower(), (key.lower(),))
        if not equals or names[0] not in _SETTABLE:
            if part.strip() in named_problems():
                raise ProblemError(f"{part.strip()!r} is no shape but the name of a problem: --problem takes it.")
            raise ProblemError(f"{part.strip()!r} is not part of a shape, which is written like {SHAPE_SYNTAX}.")
        for name in names:
            if name in fields:
                raise ProblemError(f"The shape names {name} twice.")
            fields[name] = _value(name, key, value)
    return _complete(fields)


def _parts(text: str) -> Iterator[str]:
    """The parts `key=value` of a shape, which commas tell apart, or spaces if it has none. `H=32/8` is two of them; a
    word alone is that of a dtype, a mask or a layout, or switches something on."""
    for part in text.split(",") if "," in text else text.split() or [text]:
        key, equals, value = (word.strip() for word in part.partition("="))
        heads, shared, kv_heads = value.partition("/")
        if shared and _SIZES.get(key.lower()) == ("heads",):
            yield from (f"{key}={heads}", f"Hkv={kv_heads}")
        elif equals:
            yield part
        else:
            kinds = [field for field in ("dtype", "mask", "layout") if key.lower() in chain(*_words(field).values())]
            yield f"{kinds[0]}={key}" if kinds else f"{key}=1" if key.lower() in _SWITCHES else part


def _words(field: str) -> dict[str, tuple[str, ...]]:
    """How each word of a field may be written, in any case; empty for a field of numbers.

    `causal` is `causal_upper_left`, as `is_causal=True` is in PyTorch.
    """
    if field == "dtype":
        return {name: dtype.spellings for name, dtype in DTYPES.items()}
    if field == "mask":
        return {name: (name, *mask.spellings) for name, mask in MASKS.items()}
    return {layout: (layout,) for layout in LAYOUTS} if field == "layout" else {}


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


def short_name(problem: AttentionProblem) -> str:
    """A name for files and studies: the problem's own, else made of its shape, e.g. `b1_h16_s1024_d64_fp16_full`.

    Different problems without a name have different ones; it holds letters, digits and underscores only.
    """
    if problem.name:
        return problem.name
    p = problem
    parts = [f"b{p.batch}", f"h{p.heads}", f"kv{p.kv_heads}" if p.kv_heads != p.heads else ""]
    parts += [f"s{p.seqlen_q}"] if p.seqlen_q == p.seqlen_k else [f"sq{p.seqlen_q}", f"sk{p.seqlen_k}"]
    mask = p.masking.short or p.mask
    dims = f"d{p.head_dim}v{p.value_dim}" if p.value_dim else f"d{p.head_dim}"
    parts += [dims, p.dtype, mask, p.layout if p.layout != "bhsd" else "", "lse" if p.lse else ""]
    parts += [f"scale{_digits(p.scale)}" if p.scale else "", f"w{p.window.replace(':', '_')}" if p.window else ""]
    parts += [f"cap{_digits(p.softcap)}" if p.softcap else "", "sink" if p.sink else "", "alibi" if p.alibi else ""]
    parts += [f"bias_{p.bias}" if p.bias else "", "shared_kv" if p.shared_kv else ""]
    parts += [f"used{p.seqused.replace(':', '_')}" if p.seqused else "", f"page{p.page}" if p.page else ""]
    parts.append(_lengths_name(p.varlen))
    return "_".join(part for part in parts if part)


def _lengths_name(varlen: str) -> str:
    """Lengths in letters, digits and underscores; long lists by a hash."""
    if len(varlen) > LONGEST_LENGTHS:
        return f"varlen_{hashlib.sha256(varlen.encode()).hexdigest()[:12]}"
    for sign, word in (("/", "_k"), ("+", "_"), (":", "to")):
        varlen = varlen.replace(sign, word)
    return varlen and f"varlen_{varlen}"


def _digits(number: float) -> str:
    """A number in letters and digits, e.g. `0p125`."""
    return repr(float(number)).removesuffix(".0").replace(".", "p").replace("-", "m").replace("+", "")


def by_name_or_shape(text: str) -> AttentionProblem:
    """The named problem, or that of a shape, which has an equals sign.

    Raises `ProblemError` as `lookup` and `parse_shape` do.
    """
    return parse_shape(text) if "=" in text else lookup(text)
