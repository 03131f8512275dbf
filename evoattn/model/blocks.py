"""What the `with` blocks say that surround a line, in threads, asyncio tasks and generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class Block(Generic[T]):
    """A block that was entered: its value, and the block around it."""

    __slots__ = ("outer", "over", "value")

    def __init__(self, value: T, outer: Block[T] | None) -> None:
        self.value, self.outer, self.over = value, outer, False


class Blocks(Generic[T]):
    """The values of the blocks that a context is in. A new thread is in none; an asyncio task begins in those of the
    code that makes it.

    A block that has ended counts nowhere any more, whoever ended it: a generator that is suspended inside of one may be
    closed by another thread or task."""

    def __init__(self, name: str) -> None:
        self._innermost: ContextVar[Block[T] | None] = ContextVar(name, default=None)

    def innermost(self) -> Block[T] | None:
        """None outside of all blocks."""
        block = self._innermost.get()
        if block is None or not block.over:
            return block
        while block is not None and block.over:
            block = block.outer
        self._innermost.set(block)
        return block

    def values(self) -> list[T]:
        """The innermost block's first."""
        found, block = [], self.innermost()
        while block is not None:
            if not block.over:
                found.append(block.value)
            block = block.outer
        return found

    @contextmanager
    def entered(self, value: T) -> Iterator[None]:
        """A block of this value."""
        block = Block(value, self.innermost())
        self._innermost.set(block)
        try:
            yield
        finally:
            block.over = True
            self.innermost()  # forgets it
