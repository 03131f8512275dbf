"""Texts of `templates/export` with the words in them replaced that begin with EVOATTN_."""

from __future__ import annotations

import re
from collections.abc import Mapping

_WORD = re.compile(r"EVOATTN_[A-Z_]+[A-Z]")


def fill(text: str, words: Mapping[str, str]) -> str:
    """`text` with each word replaced once; what is put in is left alone. Raises `KeyError` on an unknown word."""
    return _WORD.sub(lambda match: words[match[0]], text)
