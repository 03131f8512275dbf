"""Which alternatives of the whitelist's patterns a set of opcodes takes: coverage of the accepted instructions, choice
by choice."""

import re
from collections.abc import Iterable
from re import _constants as codes
from re import _parser as parser

from evoattn.ptx.isa import dispatch


class _Choices:
    """A pattern rewritten with a group around every alternative and every optional part."""

    def __init__(self, pattern: str) -> None:
        self.names: dict[str, str] = {}
        tree = parser.parse(pattern)
        self._groups = {number: name for name, number in tree.state.groupdict.items()}
        self.pattern = re.compile(self._text(tree))

    def _choice(self, text: str) -> str:
        name = f"choice{len(self.names)}"
        self.names[name] = re.sub(r"\(\?P<\w+>|\(\?:|\\", lambda m: "(" if m[0] != "\\" else "", text)
        return f"(?P<{name}>{text})"

    def _text(self, tree) -> str:
        return "".join(self._part(code, value) for code, value in tree)

    def _part(self, code, value) -> str:
        if code is codes.LITERAL:
            return re.escape(chr(value))
        if code is codes.IN and all(inner is codes.LITERAL for inner, _ in value):
            return "(?:" + "|".join(self._choice(re.escape(chr(letter))) for _, letter in value) + ")"
        if code is codes.IN:  # [a-z], \\d: a word out of a table of the instruction's own
            return (
                "["
                + "".join(
                    r"\d"
                    if inner is codes.CATEGORY
                    else f"{chr(v[0])}-{chr(v[1])}"
                    if inner is codes.RANGE
                    else re.escape(chr(v))
                    for inner, v in value
                )
                + "]"
            )
        if code is codes.BRANCH:
            return "(?:" + "|".join(self._choice(self._text(branch)) for branch in value[1]) + ")"
        if code is codes.SUBPATTERN:
            name = self._groups.get(value[0])
            return (f"(?P<{name}>" if name else "(?:") + self._text(value[3]) + ")"
        if code is codes.GROUPREF:
            return f"(?P={self._groups[value]})"
        if code is codes.MAX_REPEAT:
            low, high, inner = value
            if (low, high) == (0, 1):
                return self._choice(self._text(inner)) + "?"
            return f"(?:{self._text(inner)}){{{low},{'' if high is codes.MAXREPEAT else int(high)}}}"
        raise ValueError(
            f"A pattern of the whitelist has {code}: only letters, sets, alternatives, groups, their repeats and "
            "references count."
        )


def uncovered(opcodes: Iterable[str]) -> set[str]:
    """`PATTERN: ALTERNATIVE` for every entry of the whitelist and every alternative in it that none of `opcodes`
    takes."""
    missing = set()
    opcodes = set(opcodes)
    for entries in dispatch._ENTRIES.values():
        for entry in entries:
            choices = _Choices(entry.pattern.pattern)
            word = re.match(r"\(\?P<op>(\w+)\)", entry.pattern.pattern)[1]
            matches = [m for o in opcodes if o.split(".")[0] == word and (m := choices.pattern.fullmatch(o))]
            if not matches:
                missing.add(f"{entry.pattern.pattern}: any")
                continue
            taken = {name for m in matches for name, value in m.groupdict().items() if value is not None}
            missing |= {f"{entry.pattern.pattern}: {text}" for name, text in choices.names.items() if name not in taken}
    return missing
