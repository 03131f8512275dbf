"""What can be changed of values: names and operands exchanged, constants, factors and conditions dropped, loops that
start late or step too far, assignments left out, shuffles of other lanes, 64-bit numbers made narrow. What can be
changed of PTX in a source: other words, operands, rounding and predicates."""

import re
from collections.abc import Callable, Iterator

from tests.mutation.code import closing, top_comma

Edit = tuple[str, int, int, str]
"""Kind, first and end of the old text, new text."""

_PAIRS = (
    *(("seqlen_q", "seqlen_k"), ("BLOCK_M", "BLOCK_N"), ("HEAD_DIM", "VALUE_DIM"), ("heads", "kv_heads")),
    *(("k_smem", "v_smem"), ("q_smem", "k_smem"), ("K_FULL", "V_FULL"), ("K_EMPTY", "V_EMPTY"), ("K_FULL", "K_EMPTY")),
    *(("V_FULL", "V_EMPTY"), ("Q_FULL", "Q_EMPTY"), ("K_STAGES", "V_STAGES"), ("lane", "warp"), ("row", "column")),
    *(("batch", "head"), ("low", "high"), ("first", "last"), ("x", "y"), ("z", "w"), ("old", "new"), ("even", "odd")),
    *(("k_row_stride", "v_row_stride"), ("q_row_stride", "o_row_stride"), ("before", "ring"), ("split", "SPLITS")),
    *(("k_head_stride", "v_head_stride"), ("k_batch_stride", "v_batch_stride"), ("sum", "shift"), ("rows", "keys")),
    *(("o_row_stride", "o_head_stride"), ("begin", "end"), ("tile", "tiles"), ("row_block", "head"), ("big", "small")),
)
_OTHERS: dict[str, list[str]] = {}
for _one, _other in _PAIRS:
    _OTHERS.setdefault(_one, []).append(_other)
    _OTHERS.setdefault(_other, []).append(_one)
_ORDER_FREE = re.compile(r"min|max|fmaxf|fminf|fmaf|__syncwarp|sizeof|static_assert|while|for|if|switch")
_NAME = r"[\w.]+(?:\[[^\[\];]*\])*"
_SIGNS = {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "&": "|", "|": "&", "<<": ">>", ">>": "<<"}


def names(text: str, code: str) -> Iterator[Edit]:
    """Another name, of the same kind of thing."""
    for match in re.finditer(r"\b[A-Za-z_]\w*\b(?!\s*\()", code):
        for other in _OTHERS.get(match[0], ()):
            if re.search(rf"\b{other}\b", code):
                yield "name", match.start(), match.end(), other


def constants(text: str, code: str) -> Iterator[Edit]:
    """Other numbers."""
    for match in re.finditer(r"(?<=[ (-])(\d+)\b(?![.\w])", code):
        number = int(match[1])
        if number > 1:
            for other in (2 * number, number // 2) if number & (number - 1) == 0 else (number + 1,):
                yield "constant", match.start(), match.end(), str(other)
    for match in re.finditer(r"(?<== |[ (]=)(0|0\.f|1|1\.f|-1e38f|-INFINITY)(?=[;,)}])", code):
        new = {"0": "1", "1": "0", "0.f": "1.f", "1.f": "0.f"}.get(match[1], "0.f")
        yield "constant", match.start(), match.end(), new


def operators(text: str, code: str) -> Iterator[Edit]:
    """Another arithmetic sign."""
    for match in re.finditer(r"(?<=[\w)\]]) (\+|-|\*|/|%|&|\||<<|>>) (?=[\w(-])", code):
        yield "operator", match.start(1), match.end(1), _SIGNS[match[1]]


def exchanged(text: str, code: str) -> Iterator[Edit]:
    """Two arguments of a call, or two sides of a difference, in the other order."""
    for match in re.finditer(r"\b([A-Za-z_]\w*)(<[^<>();]*>)?\(", code):
        end = closing(code, match.end() - 1)
        comma = top_comma(code, match.end(), end) if end > 0 else -1
        if comma < 0 or _ORDER_FREE.fullmatch(match[1]):
            continue
        after = top_comma(code, comma + 1, end)
        last = end if after < 0 else after
        one, other = text[match.end() : comma], text[comma + 1 : last].strip()
        if one != other and ";" not in one + other:
            yield "swap", match.end(), last, f"{other}, {one}"
    for match in re.finditer(rf"(?<=[(=,] )({_NAME}) - ({_NAME})(?=[;,)])", code):
        yield "swap", match.start(), match.end(), f"{match[2]} - {match[1]}"


def dropped(text: str, code: str) -> Iterator[Edit]:
    """Factors, and parts of conditions, left out."""
    for match in re.finditer(rf"(?<=[\w)\]]) \* {_NAME}(?=[;,)\]]| [+\-:])", code):
        yield "factor", match.start(), match.end(), ""
    for match in re.finditer(r" (?:&&|\|\|) ", code):
        end = _end_of_part(code, match.end())
        if end > 0:
            yield "condition", match.start(), end, ""
    for match in re.finditer(r"\((!?[\w.:<>= ]+) (?:&&|\|\|) ", code):
        yield "condition", match.start(1), match.end(), ""
    for match in re.finditer(r" \? ", code):
        yield "choice", match.start(), match.start(), " && false"
        yield "choice", match.start(), match.start(), " || true"
    for match in re.finditer(r"(?<=[( ])!(?=\w)", code):
        yield "condition", match.start(), match.end(), ""


def _end_of_part(code: str, first: int) -> int:
    """Where a part of a condition ends."""
    depth = 0
    for i in range(first, min(len(code), first + 200)):
        if not depth and (code[i] in "),;?" or code.startswith((" &&", " ||", " ?"), i)):
            return i
        depth += (code[i] in "([{") - (code[i] in ")]}")
    return -1


def stale(text: str, code: str) -> Iterator[Edit]:
    """Assignments left out: the old value stays."""
    for match in re.finditer(rf"(?<=[;{{}})\n,])\s*({_NAME} = [^;{{}}]+?|\+\+\w+|\w+ \^= 1)(?=;)", code):
        if match[1].count("(") == match[1].count(")") and not match[1].startswith("using"):
            yield "stale", match.start(1), match.end(1), "(void)0"
    for match in re.finditer(r"\b(break|continue|return)(?=;)", code):
        yield "stale", match.start(), match.end(), "(void)0"


def loops(text: str, code: str) -> Iterator[Edit]:
    """Loops that pass over their first, or every other, step."""
    for match in re.finditer(
        r"\bfor \((?:const )?(?:int|auto|uint32_t) \w+ = ([^;,]+);[^;]*; ([^;{}]+?)\) ?(?=[{\n\w])", code
    ):
        yield "loop", match.end(1), match.end(1), " + 1"
        step = re.search(r"(\+\+)(\w+)$|(\w+) \+= ([^()]+)$", match[2])
        if step and step[1]:
            yield "loop", match.start(2) + step.start(), match.end(2), f"{step[2]} += 2"
        elif step:
            yield "loop", match.start(2) + step.start(), match.end(2), f"{step[3]} += 2 * ({step[4]})"


def lanes(text: str, code: str) -> Iterator[Edit]:
    """Shuffles and votes of other lanes."""
    for match in re.finditer(r"\bALL_LANES\b(?! =)", code):
        yield "lanes", match.start(), match.end(), "0x0000ffffu"
    for match in re.finditer(r"\b__shfl_\w+\(", code):
        end = closing(code, match.end() - 1)
        first = top_comma(code, match.end(), end)
        second = top_comma(code, first + 1, end)
        if second > 0:
            third = top_comma(code, second + 1, end)
            last = end if third < 0 else third
            yield "lanes", second + 1, last, f" ({text[second + 1 : last].strip()}) ^ 1"


def arguments(text: str, code: str) -> Iterator[Edit]:
    """One arrival, one barrier or some bytes more or less."""
    for match in re.finditer(r"\b(mbarrier_init|\w*expect_tx|named_barrier_\w+<[^<>]*>|init)\(", code):
        end = closing(code, match.end() - 1)
        if end < 0 or re.search(r"(void|bool)\s+$", code[: match.start()]):
            continue
        for more in (" + 16", " - 16") if match[1].endswith("expect_tx") else (" + 1", " - 1"):
            yield "argument", end, end, more


def narrowed(text: str, code: str) -> Iterator[Edit]:
    """32 bits where 64 are."""
    for match in re.finditer(r"\bint64_t(?= \w+[,)])", code):
        yield "narrow", match.start(), match.end(), "int"


ALL = (names, constants, operators, exchanged, dropped, stale, loops, lanes, arguments, narrowed)


_OTHER_WORDS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\.trans\b", ""),
    (r"wait_group(?=[. ])(?!\.read)(?=[^\"]* %0)", "wait_group.read"),
    (r"\bst\.async\.", "st."),
    (r"griddepcontrol\.wait", "griddepcontrol.launch_dependents"),
    (r"griddepcontrol\.launch_dependents", "griddepcontrol.wait"),
    (r"bar\.sync", "bar.arrive"),
    (r"bar\.arrive", "bar.sync"),
    (r"fence\.proxy\.async\.shared::cta", "fence.proxy.async.global"),
    (r"\.max\b", ".min"),
    (r"\bmax\.", "min."),
    (r"commit_group", "wait_all"),
    (r"\bcp\.async\.c[ag]\.shared\.global ", "cp.async.ca.shared.global "),
    (r"%2\b", "%1"),
    (r"%1\b", "%2"),
    (r"\.rn\b", ".rz"),
    (r"(?<=[\s\"])@(?!!)(\w+|%\w+)", r"@!\1"),
    (r"(?<=[\s\"])@!(\w+|%\w+)", r"@\1"),
    (r"\.(ne|eq)\.", lambda m: {"ne": ".eq.", "eq": ".ne."}[m[1]]),
    (r"\.shared::cluster\b", ".shared::cta"),
    (r"\.cluster\b(?=\.)", ".cta"),
    (r"\.aligned\b", ""),
    (r"\.ftz\b", ""),
    (r"\.b64\b", ".b32"),
    (r"(?<=, )(\d+)(?=;)", lambda m: str(int(m[1]) + 1)),
    (r"\bor\.", "and."),
    (r"\badd\.", "sub."),
    (r"\.read\b", ""),
    (r"\bmulticast::cluster\b", ""),
    (r"\.x4\b", ".x2"),
    (r"\bprmt\.", "prmt.f4e."),
    (r"\.mbarrier::complete_tx::bytes\b", ""),
)


def words(text: str, code: str) -> Iterator[Edit]:
    """PTX of other words or operands."""
    for old, new in _OTHER_WORDS:
        for match in re.finditer(old, text):
            other = match.expand(new) if isinstance(new, str) else new(match)
            in_string = code[match.start() : match.end()].isspace() and _opened(text, match.start())
            if in_string and match[0] != other:
                yield "ptx", match.start(), match.end(), other


def _opened(text: str, at: int) -> bool:
    """Whether a string is open there."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line.split("//")[0].count('"') % 2 == 1
