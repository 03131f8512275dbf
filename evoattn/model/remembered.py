"""What was found once, and is asked for again: tables with a limit."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
MOST = 1024
"""Entries of a table, unless it says another number."""


def remember(table: dict[K, V], key: K, value: V, most: int = MOST) -> V:
    """The value, which the table has from now on; one that has `most` entries begins anew."""
    if key not in table and len(table) >= most:
        table.clear()
    table[key] = value
    return value
