"""Which known word a user meant who wrote another."""

from collections.abc import Iterable

ALIKE = 0.8
"""Of `difflib.get_close_matches`: `rtx409` is like `rtx4090`, `v100` is not like `h100`."""


def meant(word: str, known: Iterable[str]) -> str:
    """` Did you mean …?` with the known word that is most like `word`, in any case; empty where none is."""
    import difflib  # only where a word was wrong

    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(word.lower(), by_lower, 1, ALIKE)
    return f" Did you mean {by_lower[near[0]]}?" if near else ""


def unknown(what: str, word: str, known: Iterable[str], see: str = "") -> str:
    """The sentences for an unknown word: what there is, the command that lists it, and which one was meant.

    E.g. `Unknown family 'flash_mm'; evoattn has flash_mma, … (see `evoattn families`). Did you mean flash_mma?`"""
    names = list(known)
    where = f" (see `{see}`)" if see else ""
    return f"Unknown {what} {word!r}; evoattn has {', '.join(names)}{where}.{meant(word, names)}"
