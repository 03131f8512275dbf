"""How a batch of packed queries over pages, as serving engines have it, is answered by a launch for the sequences that
decode and one for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from evoattn.ops.arguments import K_SCALE, SEQUSED, STARTS_Q, TABLE, V_SCALE
from evoattn.ops.call import Answer, Call, out_like, whole
from evoattn.ops.room import sequences_of
from evoattn.ops.runtime import NoKernel
from evoattn.ops.torch_modes import is_ordinary

Decodes = int | tuple[int, int]
"""So many sequences of one query each; or (sequences, the most queries of one)."""


def answer(call: Call, decodes: Decodes, attend: Callable[[Call], Answer]) -> Answer:
    """The answer to a call of packed queries over pages, of which so many sequences decode; `attend` answers a call.
    Raises `ValueError` and `TypeError` for a number that cannot be."""
    count, most = decodes if isinstance(decodes, tuple) else (decodes, 1)
    count, most = whole("decodes", count), whole("decodes", most)
    if not count:
        return attend(call)
    call.require()
    starts = call.terms[STARTS_Q]
    assert starts is not None
    if not (0 <= count < len(starts) and most > 0):
        raise ValueError(f"decodes={decodes!r} must be of the {len(starts) - 1} sequences and at least one query each.")
    if torch.compiler.is_compiling() or not is_ordinary(call.query, call.key, call.value):
        return attend(call)
    if count == len(starts) - 1 and count * most >= call.query.shape[2]:
        return attend(replace(call, longest=(min(most, call.longest[0]), call.longest[1])))
    try:
        return _in_two(call, (count, most), attend)
    except NoKernel:  # torch's answer is of all rows
        return attend(call)


def _in_two(call: Call, decodes: tuple[int, int], attend: Callable[[Call], Answer]) -> Answer:
    """The answer by two launches. Raises `NoKernel` where no kernel serves a part."""
    query, starts = call.query, call.terms[STARTS_Q]
    assert starts is not None
    out = out_like(query, call.value) if call.out is None else call.out
    made: list[Tensor] = []
    for part in parts(replace(call, out=out, strict=True), decodes):
        given = attend(part)
        if not isinstance(given, Tensor):
            made.append(given[1])
    if not call.return_lse:
        return out
    sums = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    return out, _joined(sums, made, starts[decodes[0]])


def parts(call: Call, decodes: tuple[int, int]) -> Iterator[Call]:
    """The calls of the sequences before number `count`, which have at most `most` queries each, and of the others,
    where there are any. `decodes`: (count, most). `call` has its `out`, in which each writes its rows."""
    (count, most), total, out = decodes, call.query.shape[2], call.out
    others = sequences_of(call) - count
    assert out is not None
    cuts = (
        (slice(None, count), slice(None, count + 1), min(count * most, total), min(most, call.longest[0])),
        (slice(count, None), slice(count, None), total if others else 0, call.longest[0]),
    )
    for which, bounds, rows, longest in cuts:
        if rows:
            terms = list(call.terms)
            for place, some in ((SEQUSED, which), (TABLE, which), (STARTS_Q, bounds)):
                term = terms[place]
                terms[place] = None if term is None else term[some]
            for place in (K_SCALE, V_SCALE):
                term = terms[place]
                if term is not None and term.dim() == 2 and len(term) > 1:  # of each sequence
                    terms[place] = term[which]
            part = replace(call, query=call.query[:, :, :rows], out=out[:, :, :rows], terms=tuple(terms))
            part.longest = longest, call.longest[1]
            yield part


def _joined(sums: Tensor, made: list[Tensor], border: Tensor) -> Tensor:
    """The log-sum-exps of the first part up to row `border`, which the device knows, of the last from there on."""
    if len(made) == 1:
        sums[..., : made[0].shape[2]] = made[0]
        return sums
    first, last = made
    sums.copy_(last)
    rows = first.shape[2]
    before = torch.arange(rows, device=sums.device) < border
    sums[..., :rows] = torch.where(before, first, last[..., :rows])
    return sums
