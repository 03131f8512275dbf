"""Packed queries over pages as callers have them, and what finds their plan again before any view is made."""

from torch import Tensor

from evoattn.model.sequences import with_room
from evoattn.ops.arguments import SEQUSED, STARTS_Q, TABLE
from evoattn.ops.call import Call, sizes_of

BY_SEQUENCE = (SEQUSED, TABLE, STARTS_Q)
"""Terms that have a row for each sequence."""


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
