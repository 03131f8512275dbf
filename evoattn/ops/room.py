"""How much room a plan of packed queries over pages has: batches of a serving engine seldom have the same sizes, and
one plan serves all that fit in. A kernel hears of the sequences and rows that there are at each launch, and reads on
the device where each sequence ends."""

from __future__ import annotations

from typing import Any

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


def sequences_of(call: Call) -> int:
    """How many packed sequences there are."""
    starts = call.terms[STARTS_Q]
    assert starts is not None
    count: int = starts.size(0) - 1  # `len` of a tensor takes a microsecond
    return count


def room_of(call: Call) -> tuple[int, int, int]:
    """Sequences, the longest and all rows that a plan of the call has room for."""
    return with_room(sequences_of(call), call.longest[0], call.query.size(2))


def known_by_room(call: Call) -> tuple[object, ...]:
    """What decides about such a call, by which its plan is found again: all but what `room_of` leaves free, and whether
    terms have as many rows as there are sequences. Raises `AttributeError` where a term is no tensor."""
    query, key, value, out, count = call.query, call.key, call.value, call.out, sequences_of(call)
    made: list[object] = [
        room_of(call), call.longest[1], call.longest[0] < 0, out is None, call.mask, call.scale, call.return_lse,
        call.window, call.softcap, call.score and call.score.key, call.batch_invariant,
        key.shape, key.stride(), key.dtype, key.get_device(),
        value.shape, value.stride(), value.dtype, value.get_device(),
    ]  # fmt: skip
    for tensor in (query,) if out is None else (query, out):
        batch, heads, _, columns = tensor.shape
        made += (batch, heads, columns, tensor.stride()[1:], tensor.dtype, tensor.get_device())
    for which, term in enumerate(call.terms):
        if term is not None:
            shape = (term.size(0) - count, term.shape[1:]) if which in BY_SEQUENCE else term.shape
            made += (which, shape, term.stride(), term.dtype, term.get_device(), term.is_neg())
    return tuple(made)
