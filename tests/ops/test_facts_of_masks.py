"""What FlexAttention's functions and block masks become before any kernel is looked for stays, until a change wants it
otherwise: the calls that they are, the lists and tables, and what is refused."""

import copy
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from benchmarks.flex.mods import MODS, Shape
from evoattn.families.mask_blocks import MaskShape
from evoattn.model.mask import Band
from evoattn.ops import block_masks, flex
from evoattn.ops.call import Call
from tests.ops.test_facts_of_calls import _shown
from tests.support.facts import answer, changed

SHAPE = Shape(2, 4, 77, 301)
BLOCKS = (16, 48), (40, 64)
"""Blocks that tiles divide, and others."""


def _exact(tensor: torch.Tensor) -> list[Any]:
    """As `_shown`, of whole numbers each of them."""
    if tensor.dtype.is_floating_point:
        return _shown(tensor)
    said = hashlib.sha256(str(tensor.tolist()).encode()).hexdigest()[:8]
    return [str(tensor.dtype), tuple(tensor.shape), tensor.stride(), said]


def _call(shape: Shape, learns: bool = False) -> Call:
    sizes = (shape.queries, shape.keys, shape.keys)
    query, key, value = (torch.zeros(shape.batch, shape.heads, n, 16, dtype=torch.float16) for n in sizes)
    return Call(query.requires_grad_(learns), key, value, folds=not learns)


def _made(mask_mod: Any, shape: Shape, of: tuple[int, int], block: Any) -> BlockMask:
    return block_masks.TORCH(mask_mod, *of, shape.queries, shape.keys, "cpu", block)


def _told(call: Call) -> list[Any]:
    score = call.score and [call.score.text, call.score.predicate, call.score.tables]
    terms = [_exact(one) for one in call.terms if one is not None]
    return [call.mask, call.window, call.softcap, call.blocks, score, call.folds, terms]


def _calls(*given: Any) -> Any:
    made = answer(flex.calls, *given)
    return made if isinstance(made, str) else [answer(lambda one: _told(one()), one) for one in made]


def _said(name: str, shape: Shape) -> Iterator[Any]:
    written = MODS[name](shape)
    of = shape.batch if written.by_batch else 1, shape.heads if written.by_head else 1
    for block in BLOCKS if written.mask_mod else (None,):
        mask = None if block is None else _made(written.mask_mod, shape, of, block)
        for learns, in_general in itertools.product((False, True), (False, True)):
            yield _calls(_call(shape, learns), written.score_mod, mask, in_general)
        if mask is not None:
            yield [block_masks.expression_of(mask, score, said) for score in ("", "s*2") for said in ("", "q>k")]


def _known(said: flex.Said | str) -> Any:
    """What is kept of functions."""
    if isinstance(said, str):
        return said
    return [said.is_named, said.folds, said.softcap, said.added, said.bounds, said.apart and _known(said.apart)]


def _changed(mask: BlockMask) -> Iterator[BlockMask]:
    """Masks that do not fit what the first one fits."""
    short = lambda one: None if one is None else one[..., :1]
    for name, value in (
        ("seq_lengths", (77, 300)),
        ("seq_lengths", (76, 301)),
        ("BLOCK_SIZE", (16, 0)),
        ("BLOCK_SIZE", (0, 48)),
        ("BLOCK_SIZE", (32, 48)),
        ("kv_num_blocks", mask.kv_num_blocks[0]),
        ("kv_num_blocks", mask.kv_num_blocks.repeat(3, 1, 1)),
        ("kv_num_blocks", mask.kv_num_blocks.repeat(1, 3, 1)),
        ("kv_indices", mask.kv_indices[:, :1]),
        ("full_kv_num_blocks", short(mask.full_kv_num_blocks)),
        ("full_kv_indices", mask.full_kv_indices[:, :1]),
        ("full_kv_num_blocks", None),
    ):
        made = copy.copy(mask)
        setattr(made, name, value)
        yield made


def _lists() -> Iterator[Any]:
    """Of bands, with fewer and more keys than there are."""
    for band in (Band(77, 301, *ends) for ends in itertools.product((None, -16), (0, 250))):
        seen = lambda b, h, q, k, band=band: (k - q >= (band.lowest or -99)) & (k - q <= band.highest)
        for block in BLOCKS:
            mask = _made(seen, SHAPE, (1, 1), block)
            known = block_masks.counted(mask)
            yield [_exact(one) for keys in (301, 200, 400) for one in block_masks.lists_of(mask, known, keys)]
            yield block_masks.text_of(mask, known), _exact(block_masks.table_of(mask, 301))


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    for name in MODS:
        flex._known.clear(), flex._values.clear()  # as in a new process
        yield f"calls of {name}", [*_said(name, SHAPE)]
        yield f"known of {name}", [_known(one) for one in flex._known.values()]
    seen = lambda b, h, q, k: (q + 7 * h >= k - 200 + 3 * b) & (k > 60)
    mask, of = _made(seen, SHAPE, (2, 4), (16, 48)), (2, 4, 77, 301)
    yield (
        "masks that do not fit",
        [answer(block_masks.why_not, one, *of) for one in (mask, *_changed(mask), mask[0], 3)],
    )
    yield (
        "calls that do not fit",
        [answer(block_masks.why_not, mask, *numbers) for numbers in ((3, *of[1:]), (2, 5, *of[2:]), (2, 4, 78, 301))],
    )
    inner, (b, h, q, k) = (
        block_masks.authoritative(mask, 301).mask_mod,
        torch.meshgrid(*map(torch.arange, of), indexing="ij"),
    )
    yield "what lists and function say", _exact(inner(b, h, q, k))
    yield "lists", [*_lists()]
    few, many = torch.tensor([[[0, 0, 1], [3, 9, 0]]]), torch.full((2, 3, 5), 99)
    counted = (few, few.flip(2)), (few, None), (few * 0, few * 0), (many, None), (many, many - few.sum())
    yield "counts", [block_masks._counts(*both) for both in counted]
    copied, texts = copy.copy(mask), []
    for copied.BLOCK_SIZE in itertools.product((8, 16, 24, 4096, 8192), (16, 128)):
        texts.append(block_masks.text_of(copied, block_masks.Kept((), counts="1/2/3")))
    yield "texts", texts
    checked = MaskShape(1, 1, 300, 200, 128, 64)
    told = block_masks._lists_by_pairs(
        lambda b, h, q, k: (q < k + 150 + b + h) & (k != 70), checked, torch.device("cpu")
    )
    yield "lists by pairs", [*map(_exact, told or ())]
    call = replace(_call(SHAPE), batch_invariant=True)
    others = [replace(_call(SHAPE), **{name: "no"}) for name in ("query", "key", "value")]
    others += [replace(_call(SHAPE), key=call.key[:, :3]), replace(_call(SHAPE), value=call.value[:, :, :300])]
    yield "no calls", [_calls(one, None, mask) for one in others]
    yield "the same bits", [_calls(call, None, mask), _calls(replace(call, batch_invariant=False), None, mask)]


@pytest.mark.slow
def test_what_is_made_of_functions_and_masks_stays():
    assert not changed("masks")


@pytest.mark.slow
def test_lists_agree_with_the_bands_that_they_may_be_of(monkeypatch):
    """A block of which a band shows no pair may be EMPTY or PARTIAL, one of which it shows all PARTIAL or FULL."""
    rows, keys, sizes, tables = 18, 27, (5, 8), []
    distance = torch.arange(keys) - torch.arange(rows)[:, None]
    ends = itertools.product((None, *range(-6, 5)), (None, *range(-3, 12)))
    bands = [Band(rows, keys, low, high) for low, high in ends if None in (low, high) or low <= high]
    for low, high in ((band.lowest, band.highest) for band in bands):
        shown = (distance >= (-99 if low is None else low)) & (distance <= (99 if high is None else high))
        blocks = [line.split(sizes[1], 1) for line in shown.split(sizes[0])]
        tables.append(torch.tensor([[int(one.any()) + int(one.all()) for one in line] for line in blocks]))
    mask = SimpleNamespace(BLOCK_SIZE=sizes, kv_indices=torch.zeros(1))
    for band, own in zip(bands, tables, strict=True):
        changed = [own.clone() for _ in range(own.numel())]
        for at, one in enumerate(changed):
            one.view(-1)[at] = (one.view(-1)[at] + 1 + at % 2) % 3
        for table in (own, *changed):
            fits = (table == own) | ((table == 1) & (own != 1))  # 0: none, 1: some, 2: all
            monkeypatch.setattr(block_masks, "table_of", lambda *_, table=table: table[None, None])
            assert block_masks.agrees(mask, block_masks.Kept(()), band) == fits.all(), (band, table)
