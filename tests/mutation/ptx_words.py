"""What can be changed of PTX in a source: other words, operands, rounding and predicates."""

import re
from collections.abc import Callable, Iterator

from tests.mutation.operands import Edit

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
