"""The two bases of what a user can do wrong and of what a run can fail at.

The command line catches these two and no others."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class WrongUse(ValueError):
    """A word of the user's that cannot be: its message is one sentence; exit code 2."""


class FailedRun(RuntimeError):
    """A run that cannot go on: its message is one sentence; exit code 1."""


@contextmanager
def in_python() -> Iterator[None]:
    """Sentences that name options of the command line name the arguments of Python's functions in their place."""
    try:
        yield
    except (WrongUse, FailedRun) as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (_OPTION.sub(_argument, error.args[0]), *error.args[1:])
        raise


_OPTION = re.compile(r"`evoattn [^`]*`|--([a-z-]+)(?: (l4)\b)?")
"""A whole command, or an option in a sentence, with the one value that sentences give as an example."""


def _argument(option: re.Match[str]) -> str:
    name, value = option.groups()
    if name is None:
        return option[0]
    if name.startswith("no-"):
        return f"{name.removeprefix('no-').replace('-', '_')}=False"
    return f'{name}="{value}"' if value else f"{name.replace('-', '_')}="


MOST = 2**31 - 1
"""Within the seeds of NumPy's and scikit-learn's generators, which have 32 bits."""


def require_text(**words: object) -> None:
    """Raise `WrongUse` for what is neither text nor None."""
    for name, value in words.items():
        if value is not None and not isinstance(value, str):
            raise WrongUse(f"{name} must be text, not {value!r}.")


def require_printable(what: str, text: str) -> None:
    """Raise `WrongUse` for text that no terminal shows as it is, or no database takes: with control characters, or with
    bytes that are not of the locale's encoding, which are halves of surrogate pairs in Python."""
    if not text.isprintable():
        raise WrongUse(
            f"{what} has only characters that can be printed, in the encoding of your locale: {text!a} has others."
        )


def require_whole(least: int, **words: object) -> None:
    """Raise `WrongUse` for what is neither a whole number from `least` to MOST nor None."""
    for name, value in words.items():
        if value is not None and (type(value) is not int or not least <= value <= MOST):
            raise WrongUse(f"{name} must be a whole number from {least} to {MOST}, not {value!r}.")


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
