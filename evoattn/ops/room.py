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
    return len(starts) - 1


def room_of(call: Call) -> tuple[int, int, int]:
    """Sequences, the longest and all rows that a plan of the call has room for."""
    return with_room(sequences_of(call), call.longest[0], call.query.shape[2])


def known_by_room(call: Call) -> tuple[object, ...]:
    """What decides about such a call, by which its plan is found again: all but what `room_of` leaves free, and whether
    terms have as many rows as there are sequences. Raises `AttributeError` where a term is no tensor."""
    query, key, value, out, count = call.query, call.key, call.value, call.out, sequences_of(call)
    rows = [(t.dtype, t.get_device(), t.shape[:2], t.shape[3:], t.stride()[1:]) for t in (query, out) if t is not None]
    keys = [(t.dtype, t.get_device(), t.shape, t.stride()) for t in (key, value)]
    terms = [
        (
            which,
            (len(t) - count, t.shape[1:]) if which in BY_SEQUENCE else t.shape,
            t.stride(),
            t.dtype,
            t.get_device(),
            t.is_neg(),
        )
        for which, t in enumerate(call.terms)
        if t is not None
    ]
    score = call.score and call.score.key
    words = (
        call.mask,
        call.scale,
        call.return_lse,
        call.window,
        call.softcap,
        score,
        call.longest[0] < 0,
        call.batch_invariant,
    )
    return (room_of(call), call.longest[1], out is None, *rows, *keys, *terms, *words)
