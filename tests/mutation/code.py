"""The brackets and commas of CUDA code, comments and strings left out."""

import re


def code_of(text: str) -> str:
    """The text with comments, strings and preprocessor lines as spaces: every character keeps its place."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    return re.sub(r"//[^\n]*|\"(?:\\.|[^\"\\])*\"|^[ \t]*#[^\n]*", blank, text, flags=re.M)


def closing(code: str, opening: int) -> int:
    """Where the bracket at `opening` closes; -1 if nowhere."""
    pairs, depth = {"(": ")", "<": ">", "[": "]", "{": "}"}, 0
    one, other = code[opening], pairs[code[opening]]
    for i in range(opening, len(code)):
        if one == "<" and code[i] in ";{":
            return -1
        depth += (code[i] == one) - (code[i] == other)
        if not depth:
            return i
    return -1


def top_comma(code: str, first: int, end: int) -> int:
    """The first comma there that no bracket holds; -1 if there is none."""
    depth = 0
    for i in range(first, end):
        depth += (code[i] in "([{") - (code[i] in ")]}")
        if code[i] == "," and not depth:
            return i
    return -1
