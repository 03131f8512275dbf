"""Hashes: those that objects keep, since they are looked up a thousand times for a pick, and those of names."""

import hashlib
from typing import Any, TypeVar

Kind = TypeVar("Kind")
KEPT = "_hash"


def kept_hash(kind: type[Kind]) -> type[Kind]:
    """The class of objects that nobody changes, with their hashes kept. These are not pickled: strings have others in
    another process."""
    made: Any = kind.__hash__

    def kept(self: Any) -> int:
        found: int | None = vars(self).get(KEPT)
        if found is None:
            found = vars(self)[KEPT] = made(self)
        return found

    def state(self: Any) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != KEPT}

    kind.__hash__, kind.__getstate__ = kept, state  # type: ignore[method-assign]
    return kind


def short_hash(text: str) -> str:
    """For names of files, in twelve hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
