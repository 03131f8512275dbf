"""What can be changed of whole statements, conditions and types: statements twice, by some threads alone or in another
order, conditions negated, other functions and signs, other bits and rounding, values of which nothing is left."""

import re
from collections.abc import Iterator
from itertools import pairwise

from tests.mutation.code import closing, top_comma
from tests.mutation.operands import Edit

_NAME = r"[A-Za-z_][\w.]*(?:\[[^\[\];]*\])*"
_BEGINS = r"(?<=[;{}\n])(\s*)"
_STATEMENT = re.compile(_BEGINS + r"((?!\s|else\b|return\b|case\b|#|//|static_assert|using\b|template\b)[^;{}\n]+;)")
_ADDS = re.compile(
    r" [+*^|&-]= |\+\+|arrive|expect|commit|release|advance|accumulate|mma|next|scale|tma_load|tma_store"
)
_DECLARES = re.compile(r"(?:const |constexpr |static )*[A-Za-z_][\w:<>, ]*[ *&]+\w+(?:\[[^\]]*\])*(?: =|;|\(|\{|,)")


def plain_statements(code: str) -> Iterator[tuple[int, int]]:
    """(first, end) of statements of one line that declare nothing."""
    for match in _STATEMENT.finditer(code):
        text = match[2]
        if text.count("(") == text.count(")") and not _DECLARES.match(text) and re.search(r"[(=]|\+\+", text):
            yield match.start(2), match.end(2)


def twice(text: str, code: str) -> Iterator[Edit]:
    """A statement done twice that does more then: it adds, arrives, or begins something."""
    for first, end in plain_statements(code):
        if not re.match(r"(?:for|while|if) ", code[first:end]) and _ADDS.search(code[first:end]):
            yield "twice", first, end, f"{{ {text[first:end]} {text[first:end]} }}"


def partly(text: str, code: str) -> Iterator[Edit]:
    """A statement that some threads, or some blocks, do not do, or before which some threads leave."""
    for first, end in plain_statements(code):
        if re.match(r"(?:for|while|if) ", code[first:end]):
            continue
        for guard in ("if (threadIdx.x % 32 != 31) ", "if (blockIdx.x == 0) ", "if (threadIdx.x % 32 == 5) return; "):
            yield "partly", first, first, guard


def order(text: str, code: str) -> Iterator[Edit]:
    """Two statements in the other order."""
    spans = list(plain_statements(code))
    for (first, end), (after, last) in pairwise(spans):
        if code[end:after].strip() == "" and "//" not in text[end:after]:
            yield "order", first, last, f"{text[after:last]} {text[first:end]}"


def relations(text: str, code: str) -> Iterator[Edit]:
    """Conditions that hold where they did not."""
    opposite = {"<": ">=", ">": "<=", "<=": ">", ">=": "<"}
    for match in re.finditer(r" (<=?|>=?) ", code):
        yield "negate", match.start(1), match.end(1), opposite[match[1]]
    for match in re.finditer(r"\b(?:if constexpr|while) \(", code):
        end = closing(code, match.end() - 1)
        if end > 0:
            yield "negate", match.end(), end, f"!({text[match.end() : end]})"
    for match in re.finditer(r"\b(true|false)\b", code):
        yield "negate", match.start(), match.end(), {"true": "false", "false": "true"}[match[1]]


def arms(text: str, code: str) -> Iterator[Edit]:
    """The two values of a `?:` in the other order."""
    for match in re.finditer(r" \? ([^?:;,{}]+) : ([^?:;,{}()]+)(?=[;,)])", code):
        if match[1].count("(") == match[1].count(")"):
            one, other = text[match.start(1) : match.end(1)], text[match.start(2) : match.end(2)]
            yield "choice", match.start(1), match.end(2), f"{other} : {one}"


def compounds(text: str, code: str) -> Iterator[Edit]:
    """Another way to add to a value."""
    others = {"+": ("-=", "="), "-": ("+=",), "*": ("+=", "="), "|": ("&=", "="), "&": ("|=",), "^": ("|=",)}
    for match in re.finditer(r" ([+\-*|&^])= ", code):
        for other in others[match[1]]:
            yield "compound", match.start() + 1, match.end() - 1, other
    for match in re.finditer(r"(?<!for )\+\+(?=\w+[;)])", code):
        yield "compound", match.start(), match.end(), "--"


def bits(text: str, code: str) -> Iterator[Edit]:
    """Other bits: swizzles, masks, descriptors."""
    for match in re.finditer(r" \^ ", code):
        for other in ("|", "+"):
            yield "bits", match.start() + 1, match.end() - 1, other
    for match in re.finditer(r"\b0x([0-9a-fA-F]+)(u?l{0,2})\b", code):
        number = int(match[1], 16)
        for other in {number << 1, number >> 1, number ^ 1} - {number}:
            yield "bits", match.start(), match.end(), f"0x{other:x}{match[2]}"
    for match in re.finditer(r"(<<|>>) (\d+)\b", code):
        for shift in (int(match[2]) + 1, int(match[2]) - 1):
            yield "bits", match.start(2), match.end(2), str(max(0, shift))
    for match in re.finditer(r"(?<=[ (])~(?=[\w(])", code):
        yield "bits", match.start(), match.end(), ""


def floats(text: str, code: str) -> Iterator[Edit]:
    """Float constants a little, and much, larger; signs of values."""
    for match in re.finditer(r"(?<![\w.])(\d+\.\d*(?:e-?\d+)?|\d+e-?\d+)f(?!\w)", code):
        if float(match[1]):
            yield "float", match.start(), match.end(), f"({match[0]} * 1.05f)"
            yield "float", match.start(), match.end(), f"({match[0]} * 16.f)"
            yield "float", match.start(), match.end(), f"({match[0]} * 0.0625f)"
    for match in re.finditer(r"(?:(?<=[(,=?:] )|(?<=[(])|(?<=return ))-(?=[A-Za-z_])", code):
        yield "float", match.start(), match.end(), ""


def indices(text: str, code: str) -> Iterator[Edit]:
    """The neighbour of an element."""
    for match in re.finditer(r"(?<=[\w\])])\[", code):
        end = closing(code, match.start())
        inner = code[match.end() : end].strip() if end > 0 else ""
        before = re.search(r"(\w+)(?:\[[^\]]*\])*$", code[: match.start()])
        declared = before and re.search(r"[\w>&*]\s+$", code[: before.start()])
        if inner and not (declared and not re.search(r"\breturn\s+$", code[: before.start()])):
            yield "index", match.end(), end, f"({inner}) ^ 1"


def simple_terms(text: str, code: str) -> Iterator[Edit]:
    """A term that is one name, or one call, left out."""
    for match in re.finditer(r"(?<=[\w)\]]) [+-] [A-Za-z_][\w.]*(?:\[\w+\]|\(\w*\))?(?=[;,)\]]| [+\-<>?:&|])", code):
        yield "term", match.start(), match.end(), ""
    for match in re.finditer(r"(?:(?<=[=,] )|(?<=[(\[]))[A-Za-z_][\w.]* \+ (?=[\w(])", code):
        yield "term", match.start(), match.end(), ""


_OTHER_CALLS = {
    "fmaxf": "fminf",
    "fminf": "fmaxf",
    "fabsf": "-fabsf",
    "lrintf": "floorf",
    "exp2_approx": "__expf",
    "__log2f": "__logf",
    "__fadd_rd": "__fadd_ru",
    "__ldcg": "__ldca",
    "__any_sync": "__all_sync",
    "__shfl_sync": "__shfl_xor_sync",
    "__shfl_xor_sync": "__shfl_down_sync",
    "__shfl_down_sync": "__shfl_up_sync",
    "ldmatrix_x4": "ldmatrix_x4_trans",
    "ldmatrix_x4_trans": "ldmatrix_x4",
    "threadIdx": "blockIdx",
    "gridDim": "blockDim",
}


def calls(text: str, code: str) -> Iterator[Edit]:
    """Another function of the same arguments, or one argument alone in place of the call."""
    for match in re.finditer(r"\b[A-Za-z_]\w*(?=\(|\.)", code):
        if match[0] in _OTHER_CALLS:
            yield "call", match.start(), match.end(), _OTHER_CALLS[match[0]]
    for match in re.finditer(r"\b(?:fmaf|__fmaf_rn)\(", code):
        end = closing(code, match.end() - 1)
        one = top_comma(code, match.end(), end)
        other = top_comma(code, one + 1, end)
        if other > 0:
            yield "call", other + 1, end, " 0.f"
            yield "call", match.end(), one, "1.f"


def initial_values(text: str, code: str) -> Iterator[Edit]:
    """Nothing instead of what a name is declared as, or a function gives back; a little less of a float."""
    for match in re.finditer(r"\b(int|uint32_t|int64_t|float|bool)(?: const)? \w+ = ([^;{}]+?)(?=;)", code):
        if match[2].strip() not in ("0", "0.f", "false") and _balanced(match[2]):
            zero = {"float": "0.f", "bool": "false"}.get(match[1], "0")
            yield "initial", match.start(2), match.end(2), zero
            if match[1] == "float":
                yield "round", match.start(2), match.end(2), _short(text[match.start(2) : match.end(2)])
    for match in re.finditer(r"\breturn ([^;{}]+);", code):
        if _balanced(match[1]) and match[1] not in ("true", "false"):
            yield "initial", match.start(1), match.end(1), f"decltype({text[match.start(1) : match.end(1)]})(0)"
    for match in re.finditer(rf"(?:sum|{_NAME}sum\w*(?:\[[^\]]*\])*) [+*]= ([^;,{{}}]+)(?=[;,])", code):
        if _balanced(match[1]):
            yield "round", match.start(1), match.end(1), _short(text[match.start(1) : match.end(1)])


def _balanced(text: str) -> bool:
    return all(text.count(one) == text.count(other) for one, other in ("()", "[]")) and "," not in re.sub(
        r"\([^()]*(?:\([^()]*\)[^()]*)*\)", "", text
    )


def _short(value: str) -> str:
    """A float with the digits of a bf16."""
    return f"__uint_as_float(__float_as_uint({value}) & 0xffff0000u)"


def types(text: str, code: str) -> Iterator[Edit]:
    """Qualifiers left out, and fewer threads promised."""
    for match in re.finditer(r"\bvolatile (?=\()|\bvolatile\b(?=\()", code):
        yield "type", match.start(), match.end(), ""
    for match in re.finditer(r"__launch_bounds__\(", code):
        end = closing(code, match.end() - 1)
        first = top_comma(code, match.end(), end)
        yield "type", match.end(), first if first > 0 else end, "32"


ALL = (
    *(twice, partly, order, relations, arms, compounds, bits, floats, indices),
    *(simple_terms, calls, initial_values, types),
)
