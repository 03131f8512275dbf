"""Rendered sources as they travel between processes and as the database keeps them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from evoattn.model.records import Candidate

LEVEL = 1
"""Of compression: a third of the time of the usual 6, which would leave 22 KB of a source of 78 KB, not 26."""


@dataclass(frozen=True)
class CompressedSource:
    """A source's sha256 in hex, and its compressed UTF-8."""

    hash: str
    zlib: bytes

    @classmethod
    def of(cls, candidate: Candidate) -> CompressedSource:
        return cls(candidate.source_hash, zlib.compress(candidate.source.encode(), LEVEL))
