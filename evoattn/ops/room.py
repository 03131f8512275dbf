"""How much room a plan of packed queries over pages has: batches of a serving engine seldom have the same sizes, and
one plan serves all that fit in. A kernel hears of the sequences and rows that there are at each launch, and reads on
the device where each sequence ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from evoattn.model.sequences import with_room
from evoattn.ops.arguments import SEQUSED, STARTS_Q, TABLE

Call = Any
"""An `evoattn.ops.call.Call`, whose module asks here."""

BY_SEQUENCE = (SEQUSED, TABLE, STARTS_Q)
"""Terms that have a row for each sequence."""


def has_room(call: Call) -> bool:
    """Whether it is of packed queries over pages."""
    terms = call.terms
    return bool(terms) and terms[STARTS_Q] is not None and terms[TABLE] is not None


def sizes_of(terms: Sequence[Tensor | None], rows: int) -> tuple[int, int]:
    """How many packed sequences and rows of queries there are."""
    starts = terms[STARTS_Q]
    assert starts is not None
    return starts.size(0) - 1, rows  # `len` of a tensor takes a microsecond


def room_of(call: Call) -> tuple[int, int, int]:
    """Sequences, the longest and all rows that a plan of the call has room for."""
    count, rows = sizes_of(call.terms, call.query.size(2))
    return with_room(count, call.longest[0], rows)


class Packed:
    """Packed queries over pages as callers have them: query and `out` `[rows, heads, columns]`, key and value `[pages,
    page, kv_heads, columns]`, and `terms` as of a `Call`. No view is made of them: a launch wants addresses alone."""

    __slots__ = "key", "known", "out", "query", "sizes", "terms", "value"
    compiled = False

    def __init__(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
        terms: tuple[Tensor | None, ...],
        longest: int,
        words: tuple[object, ...],
    ) -> None:
        """`tensors`: query, key, value and out; `longest`: the most queries of a sequence; `words`: as of
        `words_of`. Raises `AttributeError`, `TypeError` or `ValueError` for what are no such tensors."""
        self.query, self.key, self.value, self.out = query, key, value, out = tensors
        self.terms, rows = terms, query.size(0)
        self.sizes = sizes_of(terms, rows)
        _, heads, columns = query.shape
        facts: list[object] = [heads, columns, query.stride(), query.dtype, query.get_device()]
        for cache in (key, value):
            facts += (cache.shape, cache.stride(), cache.dtype, cache.get_device())
        if out is not None:
            _, heads, columns = out.shape
            facts += (heads, columns, out.stride(), out.dtype, out.get_device())
        self.known = _known(self.sizes, longest if longest < rows else rows, words, facts, terms)


def _known(
    sizes: tuple[int, int],
    longest: int,
    words: tuple[object, ...],
    facts: list[object],
    terms: tuple[Tensor | None, ...],
) -> tuple[object, ...]:
    """What decides about packed queries over pages, by which their plan is found again: all but what `with_room` leaves
    free, and whether terms have as many rows as there are sequences. Takes `facts` and adds to it."""
    count, rows = sizes
    facts += (with_room(count, longest, rows), longest < 0, words)
    for which, term in enumerate(terms):
        if term is not None:
            shape = term.shape
            facts += (which, (shape[0] - count, *shape[1:]) if which in BY_SEQUENCE else shape)
            facts += (term.stride(), term.dtype, term.get_device(), term.is_neg())
    return tuple(facts)


def words_of(call: Call) -> tuple[object, ...]:
    """What decides about such a call beside its tensors."""
    score = call.score and call.score.key
    return call.mask, call.scale, call.return_lse, call.window, call.softcap, score, call.batch_invariant


def known_by_room(call: Call) -> tuple[object, ...]:
    """`Packed.known` of a call. Raises `AttributeError` where a term is no tensor."""
    query, key, value, out = call.query, call.key, call.value, call.out
    facts: list[object] = []
    for tensor in (query, key, value) if out is None else (query, key, value, out):
        (pages, heads, page, columns), (a, b, c, d) = tensor.shape, tensor.stride()
        if tensor is key or tensor is value:
            facts += ((pages, page, heads, columns), (a, c, b, d))
        else:
            facts += (heads, columns, (c, b, d))
        facts += (tensor.dtype, tensor.get_device())
    return _known(sizes_of(call.terms, query.size(2)), call.longest[0], words_of(call), facts, call.terms)
