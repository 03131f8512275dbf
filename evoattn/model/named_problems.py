"""Problems by name (`search_spaces/problems.yaml`) and by shape on the command line."""

from __future__ import annotations

from functools import cache

import yaml

from evoattn.model import safe_yaml
from evoattn.model.paths import SEARCH_SPACES
from evoattn.model.problem import AttentionProblem, ProblemError

_FILE = SEARCH_SPACES / "problems.yaml"
_SIZES = {
    "B": "batch",
    "H": "heads",
    "Hq": "heads",
    "Hkv": "kv_heads",
    "Sq": "seqlen_q",
    "Sk": "seqlen_k",
    "D": "head_dim",
}
_WORDS = ("dtype", "mask", "layout")
_FLAGS = {"0": False, "1": True}


def _complete(fields: dict, name: str = "") -> AttentionProblem:
    """The problem with what may be left out filled in: kv_heads = heads, seqlen_k = seqlen_q."""
    fields = {"kv_heads": fields.get("heads"), "seqlen_k": fields.get("seqlen_q"), **fields}
    missing = [f for f in ("batch", "heads", "seqlen_q", "head_dim") if f not in fields]
    if missing:
        raise ProblemError(
            f"The shape lacks {', '.join(missing)}; write it like B=1,H=16,S=1024,D=64,dtype=fp16,mask=full."
        )
    return AttentionProblem(**fields, name=name)


@cache
def named_problems() -> dict[str, AttentionProblem]:
    """All problems of `problems.yaml`, in its order. Raises `ProblemError` if the file is broken."""
    try:
        rows = safe_yaml.load_file(_FILE)
        return {name: _complete(fields, name) for name, fields in rows.items()}
    except (OSError, yaml.YAMLError, TypeError, AttributeError) as error:
        raise ProblemError(f"{_FILE} cannot be read: {' '.join(str(error).split())}.") from None


def lookup(name: str) -> AttentionProblem:
    """The problem called `name`. Raises `ProblemError` on an unknown one."""
    problems = named_problems()
    if name not in problems:
        raise ProblemError(f"Unknown problem {name!r}; search_spaces/problems.yaml has {', '.join(problems)}.")
    return problems[name]


def parse_shape(text: str) -> AttentionProblem:
    """`B=1,H=16,S=1024,D=64,dtype=fp16,mask=full`; also Hkv, Sq, Sk, layout and lse=1. Raises `ProblemError` on anything else."""
    fields: dict = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if key == "lse":
            if value not in _FLAGS or "lse" in fields:
                raise ProblemError(f"lse must be 0 or 1, once, not {value!r}.")
            fields["lse"] = _FLAGS[value]
            continue
        names = (
            ["seqlen_q", "seqlen_k"]
            if key == "S"
            else [_SIZES[key]]
            if key in _SIZES
            else [key]
            if key in _WORDS
            else []
        )
        if not equals or not names:
            raise ProblemError(
                f"{part.strip()!r} is not part of a shape; write it like B=1,H=16,S=1024,D=64,dtype=fp16,mask=full."
            )
        if key not in _WORDS and not (value.isascii() and value.isdigit() and len(value) <= 9):
            raise ProblemError(f"{key} must be a whole number of at least 1, not {value!r}.")
        for name in names:
            if name in fields:
                raise ProblemError(f"The shape names {name} twice.")
            fields[name] = value if key in _WORDS else int(value)
    return _complete(fields)


def by_name_or_shape(text: str) -> AttentionProblem:
    """The named problem, or that of a shape, which has an equals sign. Raises `ProblemError` as `lookup` and `parse_shape` do."""
    return parse_shape(text) if "=" in text else lookup(text)
