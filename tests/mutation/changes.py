"""What can be changed at one place of a CUDA source: calls deleted, weakened or moved, conditions and parities flipped,
edges and stages off by one, PTX of less meaning; and what `operands` and `statements` have."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.mutation import operands, statements, substitutes
from tests.mutation.code import closing, code_of, top_comma
from tests.mutation.operands import words

_WORDS = (
    *("if", "else", "for", "while", "switch", "return", "sizeof"),
    *("static_assert", "alignof", "decltype", "__launch_bounds__", "asm", "volatile"),
)
_SYNCHRONIZES = re.compile(
    r"__sync|sync|barrier|wait|fence|commit|arrive|release|turn|start_|finish_|copy_again|launch\b"
)
_PRIMITIVE = re.compile(r"(?:mbarrier|cp_async|tma|cluster|grid|wgmma|named)_\w+$|fence_\w+$|release$")
_CALL = re.compile(r"(?<![\w.>:])((?:[\w]+(?:\.|->|::)(?:template )?)*[A-Za-z_]\w*)\s*(?=[<(])")


@dataclass(frozen=True)
class Change:
    """`new` instead of the characters `first` ≤ i < `end` of a text; `line` counts from 1."""

    kind: str
    line: int
    first: int
    end: int
    new: str
    what: str

    def apply(self, text: str) -> str:
        return text[: self.first] + self.new + text[self.end :]


def _calls(code: str) -> Iterator[tuple[int, int, str]]:
    """(first, end, name) of every call that is a statement, or a part of one between commas."""
    for match in _CALL.finditer(code):
        name, at = match[1], match.end()
        if name.split(".")[0] in _WORDS and name != "asm":
            continue
        if code[at] == "<":
            at = closing(code, at) + 1
            if at == 0 or at >= len(code) or code[at] != "(":
                continue
        end = closing(code, at) + 1
        if end == 0:
            continue
        before, after = code[: match.start()].rstrip(), code[end:].lstrip()
        if not after or after[0] not in ";," or _depth(before):
            continue
        if before.endswith((";", "{", "}", ")", ",")) or re.search(r"\belse$", before):
            yield match.start(), end, name


def _depth(before: str) -> int:
    """Parentheses open at the end of `before`, as far back as its statement goes."""
    depth = 0
    for character in reversed(before):
        if character in ";{}" and depth >= 0:
            return 0
        depth += (character == ")") - (character == "(")
        if depth < 0:
            return 1
    return 0


def _deletions(text: str, code: str) -> Iterator[tuple[str, int, int, str]]:
    for first, end, name in _calls(code):
        yield "delete", first, end, "(void)0"
        if _PRIMITIVE.match(name):
            one_lane = f"(threadIdx.x % 32 == 0 ? (void)({text[first:end]}) : (void)0)"
            yield "weaken", first, end, one_lane
    for match in re.finditer(r"asm volatile\(", code):
        end = closing(code, match.end() - 1) + 1
        if '"=' not in text[match.start() : end] and '"+' not in text[match.start() : end]:
            yield "delete", match.start(), end, "(void)0"
    for match in re.finditer(r"(?<=[;{}),\n])\s*([\w.\[\]>-]+ [+\-*/|&^]= [^;,{}]+)(?=[;,])", code):
        if match[1].count("(") == match[1].count(")"):
            yield "delete", match.start(1), match.end(1), "(void)0"


def _weakenings(text: str, code: str) -> Iterator[tuple[str, int, int, str]]:
    for match in re.finditer(r"__syncthreads\(\)", code):
        yield "weaken", match.start(), match.end(), "__syncwarp()"
        yield "weaken", match.start(), match.end(), 'asm volatile("bar.sync 1, 32;" ::: "memory")'
    for match in re.finditer(r"\b\w*wait\w*<([^<>]+|[^<>]*<[^<>]*>[^<>]*)>(?=\()", code):
        yield "weaken", match.start(1), match.end(1), f"({text[match.start(1) : match.end(1)]}) + 1"
    for match in re.finditer(r"named_barrier_(?:sync|arrive)<([^<>]+)>\(([^()]*)\)", code):
        yield "weaken", match.start(1), match.end(1), "32"
        if "+" in match[2]:
            yield "weaken", match.start(2), match.end(2), match[2].split("+")[0].strip()
    for strong, weak in (
        (r"\.acq_rel\b", ".relaxed"),
        (r"\.acquire\b", ".relaxed"),
        (r"\.release\b(?!\.cluster;)", ".relaxed"),
        (r"\.gpu\b", ".cta"),
        (r"ld\.global\.cg\b", "ld.global.nc"),
        (r"(?<=acquire)\.cluster\b", ".cta"),
        (r"\.arrive\.expect_tx\b", ".expect_tx"),
    ):
        for match in re.finditer(strong, text):
            if code[match.start() : match.end()].isspace():  # in a string
                yield "weaken", match.start(), match.end(), weak
    for match in re.finditer(r"__ldcg\(", code):
        yield "weaken", match.start(), match.end(), "__ldg("


def _moves(text: str, code: str) -> Iterator[tuple[str, int, int, str]]:
    """Lines that are one synchronizing call, exchanged with the line after or before."""
    starts, lines, alone = _synchronizing_lines(text, code)
    for n in sorted(alone):
        for other in (n + 1, n - 1):
            if not 0 <= other < len(lines) or (other in alone and other < n):
                continue
            bare = code[starts[other] : starts[other] + len(lines[other])].strip()
            if not bare or not (bare.endswith(";") or bare == "}"):
                continue
            first = min(n, other)
            pair = lines[first : first + 2]
            end = starts[first] + len(pair[0]) + len(pair[1])
            yield "move", starts[first], end, "".join(reversed(pair))


def _far_moves(text: str, code: str) -> Iterator[tuple[str, int, int, str]]:
    """The same lines, two or three lines later or earlier."""
    starts, lines, alone = _synchronizing_lines(text, code)
    for n in sorted(alone):
        for away in (2, 3):
            if n + away < len(lines):
                part = lines[n : n + away + 1]
                yield "far move", starts[n], starts[n] + sum(map(len, part)), "".join([*part[1:], part[0]])
            if n >= away:
                part = lines[n - away : n + 1]
                yield "far move", starts[n - away], starts[n] + len(lines[n]), "".join([part[-1], *part[:-1]])


def _synchronizing_lines(text: str, code: str) -> tuple[list[int], list[str], set[int]]:
    """Where lines start, the lines, and the numbers of those that are one synchronizing call."""
    starts = [0, *(m.end() for m in re.finditer("\n", text))]
    lines = text.splitlines(keepends=True)
    alone = {
        n
        for n, (start, line) in enumerate(zip(starts, lines))
        if (bare := code[start : start + len(line)].strip())
        and re.fullmatch(r"(?:if (?:constexpr )?\(.*\) )?[\w.:]+(?:<[^;]*>)?\([^;]*\);", bare)
        and _SYNCHRONIZES.search(bare)
    }
    return starts, lines, alone


def _flips(text: str, code: str) -> Iterator[tuple[str, int, int, str]]:
    for match in re.finditer(r"\b[\w.]*parity\b(?! \^=)(?! =)(?!\()", code):
        if not re.search(r"(?:uint32_t|int) $", code[: match.start()]) and "." in match[0]:
            yield "flip", match.start(), match.end(), f"({match[0]} ^ 1)"
    for match in re.finditer(r"\bround % 2\b", code):
        yield "flip", match.start(), match.end(), "(round + 1) % 2"
    for match in re.finditer(r" (&&|\|\|) ", code):
        yield "flip", match.start(1), match.end(1), {"&&": "||", "||": "&&"}[match[1]]
    for match in re.finditer(r"\b(True|False)\{\}", code):
        yield "flip", match.start(), match.end(), {"True": "False{}", "False": "True{}"}[match[1]]
    for match in re.finditer(r"\bif (constexpr )?\(", code):
        end = closing(code, match.end() - 1)
        if end > 0 and not match[1]:
            for value in ("true", "false"):
                yield "flip", match.end(), end, value


_OTHER = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}


def _off_by_one(text: str, code: str) -> Iterator[tuple[str, int, int, str]]:
    unrolled = {n + 1 for n, line in enumerate(text.split("\n")) if "#pragma unroll" in line and "unroll 1" not in line}
    for match in re.finditer(r" (<=?|>=?|==|!=) ", code):
        if text.count("\n", 0, match.start()) in unrolled:
            continue  # the registers past the end of an array are undefined: the compiler leaves them out
        yield "edge", match.start(1), match.end(1), _OTHER[match[1]]
    for match in re.finditer(r" [+-] 1\b(?!\.)", code):
        yield "edge", match.start(), match.end(), ""
    for match in re.finditer(r"\b(min|max)\(", code):
        yield "edge", match.start(1), match.end(1), {"min": "max", "max": "min"}[match[1]]
        end = closing(code, match.end() - 1)
        comma = top_comma(code, match.end(), end)
        if comma > 0:
            yield "edge", match.start(), end + 1, f"({text[match.end() : comma]})"
            yield "edge", match.start(), end + 1, f"({text[comma + 1 : end].strip()})"
    for match in re.finditer(r"\b[\w.]*\bstage\b(?! =)(?!\()", code):
        if "." in match[0]:
            yield "stage", match.start(), match.end(), f"({match[0]} + 1)"
    for match in re.finditer(r"% ((?:[A-Z]_)?STAGES)\b", code):
        yield "stage", match.start(1), match.end(1), f"({match[1]} + 1)"
        yield "stage", match.start(1), match.end(1), f"({match[1]} > 1 ? {match[1]} - 1 : 1)"
    for match in re.finditer(r" \+ ((?:\w|\.)+(?: [*/%] (?:\w|\.)+)+)(?=[;,)\]])", code):
        yield "term", match.start(), match.end(), ""
    for match in re.finditer(r"(?:(?<=[=,] )|(?<=[(\[]))(?:\w|\.)+(?: [*/%] (?:\w|\.)+)+ \+ ", code):
        yield "term", match.start(), match.end(), ""
    for match in re.finditer(r"\bint64_t(?=\(|\s+\w+ =)", code):
        yield "term", match.start(), match.end(), "int"


def _far(old: list[str], new: list[str]) -> str:
    later = old[0] == new[-1] and old[1:] == new[:-1]
    return f"{(old[0] if later else old[-1]).strip()} → {len(old) - 1} lines {'later' if later else 'earlier'}"


@cache
def changes_of(text: str, first_line: int = 1) -> list[Change]:
    """All changes of a text, from `first_line` on."""
    code, found = code_of(text), []
    for make in (
        _deletions,
        _weakenings,
        _moves,
        _far_moves,
        _flips,
        _off_by_one,
        *operands.ALL,
        *statements.ALL,
        *substitutes.ALL,
        words,
    ):
        for kind, first, end, new in make(text, code):
            line = text.count("\n", 0, first) + 1
            old = " ".join(text[first:end].split())
            if line < first_line or old == new or "static_assert" in code.split("\n")[line - 1]:
                continue
            if kind == "move":
                what = "lines exchanged: " + " | ".join(part.strip() for part in text[first:end].splitlines())
            elif kind == "far move":
                what = _far(text[first:end].splitlines(), new.splitlines())
            else:
                what = f"{old} → {' '.join(new.split()) or 'nothing'}"
            found.append(Change(kind, line, first, end, new, what[:160]))
    return sorted(found, key=lambda change: (change.line, change.first, change.what))
