"""What can be changed of values without a list of names: another variable of the function, a neighbour's argument,
nothing in place of an argument, operands in another order, statements that one block, head or warp leaves out."""

import re
from collections.abc import Iterator
from functools import cache

from evoattn.model.paths import TEMPLATES
from tests.mutation.code import closing, top_comma
from tests.mutation.operands import Edit
from tests.mutation.statements import plain_statements

_DECLARED = re.compile(r"\b(?:const )?(int|float|uint32_t|int64_t|bool) (\w+)(?= =|[,);]| \{)")
_TERM = r"[A-Za-z_][\w.]*(?:\[\w+\])?"


def variables(text: str, code: str) -> Iterator[Edit]:
    """Where a variable is read, the one of its type that was declared last before it."""
    seen: dict[str, str] = {}
    latest: dict[str, list[str]] = {}
    places = {match.start(2): match for match in _DECLARED.finditer(code)}
    for match in re.finditer(r"\b[A-Za-z_]\w*\b(?! =)(?!\s*\()", code):
        name = match[0]
        if found := places.get(match.start()):
            seen[name] = found[1]
            latest.setdefault(found[1], []).append(name)
        elif name in seen and code[match.start() - 1] not in ".:":
            others = [other for other in latest[seen[name]][-4:] if other != name]
            if others:
                yield "variable", match.start(), match.end(), others[-1]


def neighbours(text: str, code: str) -> Iterator[Edit]:
    """The argument before it in place of an argument, or 0 and 1."""
    for match in re.finditer(r"\b[A-Za-z_]\w*(?:<[^<>();]*>)?\(", code):
        end = closing(code, match.end() - 1)
        comma = top_comma(code, match.end(), end) if end > 0 else -1
        if comma < 0 or re.match(r"(?:for|if|while|switch|asm)\b", match[0]):
            continue
        last = top_comma(code, comma + 1, end)
        last = end if last < 0 else last
        one, other = text[match.end() : comma].strip(), text[comma + 1 : last].strip()
        if re.fullmatch(_TERM, one) and re.fullmatch(_TERM, other) and one != other:
            yield "neighbour", comma + 1, last, f" {one}"
            yield "neighbour", match.end(), comma, other
        if re.fullmatch(_TERM, other):
            for number in ("0", "1"):
                yield "neighbour", comma + 1, last, f" {number}"


def rotated(text: str, code: str) -> Iterator[Edit]:
    """`a * c + b` for `a * b + c`; a product for a sum's term."""
    for match in re.finditer(rf"({_TERM}) \* ({_TERM}) \+ ({_TERM})(?=[;,)\]])", code):
        yield "rotate", match.start(), match.end(), f"{match[1]} * {match[3]} + {match[2]}"
        yield "rotate", match.start(), match.end(), f"({match[1]} + {match[2]}) * {match[3]}"


def rarely(text: str, code: str) -> Iterator[Edit]:
    """A statement that one block, one head or batch, one warp or one lane of four leaves out."""
    guards = "blockIdx.x != 2", "blockIdx.y == 0", "threadIdx.x / 32 != 1", "threadIdx.x % 4 != 2"
    for first, end in plain_statements(code):
        if not re.match(r"(?:for|while|if) ", code[first:end]):
            for guard in guards:
                yield "rarely", first, first, f"if ({guard}) "


@cache
def _whole_members() -> frozenset[str]:
    """Members of the templates' structs that are whole numbers, or arrays of them."""
    texts = "\n".join(path.read_text() for path in TEMPLATES.rglob("*.cuh"))
    declared = re.findall(r"(?m)^  +(?:const )?(?:u?int(?:8|16|32|64)_t|int)\*? ([^();{}]*);", texts)
    return frozenset(re.findall(r"(?:^|, ?)\*?(\w+)", ", ".join(declared)))


def _is_whole(term: str, code: str) -> bool:
    """Whether a term is a whole number: by its declaration, or as a member of a struct."""
    name = re.sub(r"\[.*", "", term)
    home, _, member = name.rpartition(".")
    if home:
        return home in ("blockIdx", "threadIdx", "blockDim", "gridDim") or member in _whole_members()
    return bool(re.search(rf"\b(?:int|uint32_t|int64_t) (?:[^;(){{}}]*, )?{re.escape(name)}\b", code))


def nudged(text: str, code: str) -> Iterator[Edit]:
    """A float 1 % larger, an index a whole warp, or eight, further."""
    for match in re.finditer(rf"(?<=[=(,] )({_TERM}) \* {_TERM}(?=[;,)])", code):
        if not _is_whole(match[1], code):  # 0 of 63 and less
            yield "nudge", match.start(1), match.end(1), f"({match[1]} + {match[1]} / 64)"
    for match in re.finditer(r"\bint \w+ = ([^;{}]*\b(?:tile|row|key|begin|first|batch|head)\w*\b[^;{}]*);", code):
        if match[1].count("(") == match[1].count(")"):
            for more in (8, -8):
                yield "nudge", match.end(1), match.end(1), f" + {more}" if more > 0 else f" - {-more}"


KINDS = ("variable", "neighbour", "rotate", "rarely", "nudge")
ALL = (variables, neighbours, rotated, rarely, nudged)
