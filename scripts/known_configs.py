"""Configs that searches of named problems have won or that were written by hand, for tests and for
`scripts/cubins.py`: `tests/data/known_configs.jsonl`, a line per config with the problems that it was found for.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "tests/data/known_configs.jsonl"


@cache
def _rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def known_configs(family: str, problem: str) -> list[dict[str, Any]]:
    """Parameters of the family's configs for the named problem, in the file's order; not all are valid on every GPU."""
    return [row["config"] for row in _rows() if row["family"] == family and problem in row["problems"]]
