"""The one table of instructions: which (opcode, modifiers, type) the interpreter knows, and who prepares them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

from evoattn.ptx.errors import UnsupportedInstruction
from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.program.threads import ActiveThreads
from evoattn.ptx.state.context import Context, Ending

Operation = Callable[[], object]
"""Of a pure instruction: reads and writes registers of all threads."""
Action = Callable[[ActiveThreads], object]
"""Of any other: what the active threads do."""
Prepared = Operation | Action | Ending
Fields = dict[str, str]
"""Named groups of the pattern that an opcode matched; the value of an absent optional group is an empty string."""


Prepare = Callable[[Context, Instruction, Fields], Prepared]
_P = TypeVar("_P", bound=Prepare)


@dataclass(frozen=True)
class Entry:
    """One whitelisted form of an instruction.

    `prepare(binder, instruction, fields)` returns a callable. For a `pure` one it takes no argument, reads and writes
    registers only, and may be run for more threads than asked, since the machine puts back what it must not change.
    Otherwise it takes the `ActiveThreads`. `writes` is the number of leading operands that are written. `kind` is the
    class that the counters put it in."""

    expression: str
    prepare: Prepare
    pure: bool
    writes: int
    kind: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Compiled when it is first asked for: a kernel meets few of the 150."""
        return re.compile(self.expression)


_ENTRIES: dict[str, list[Entry]] = {}


def instruction(
    words: str, modifiers: str = "", *, kind: str, pure: bool = True, writes: int = 1
) -> Callable[[_P], _P]:
    """Register the decorated function for every opcode that is one of `words`, then what the expression `modifiers`
    matches, and no more.

    The word is the field `op`."""

    def register(prepare: _P) -> _P:
        for word in words.split():
            entry = Entry(f"(?P<op>{word}){modifiers}", prepare, pure, writes, kind)
            _ENTRIES.setdefault(word, []).append(entry)
        return prepare

    return register


@lru_cache(maxsize=4096)
def _match(opcode: str) -> tuple[Entry, tuple[tuple[str, str], ...]] | None:
    for entry in _ENTRIES.get(opcode.split(".", 1)[0], ()):
        if match := entry.pattern.fullmatch(opcode):
            return entry, tuple((name, value or "") for name, value in match.groupdict().items())
    return None


def lookup(ins: Instruction) -> tuple[Entry, Fields]:
    """The entry for an instruction. Raises `UnsupportedInstruction` if its opcode matches none."""
    found = _match(ins.opcode)
    if found is None:
        raise UnsupportedInstruction(f"The instruction {ins} is outside the interpreter's whitelist.")
    return found[0], dict(found[1])
