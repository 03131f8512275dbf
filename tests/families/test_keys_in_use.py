"""Sequences of which only some keys are in use, and caches of pages: right in every structure that a family's genes
give, and wrong where a place that they need is changed."""

from __future__ import annotations

import pytest
from test_variants import PLAIN, STRUCTURES, faults

KEYS = {
    "keys in use": PLAIN.with_(seqused="0:500", dtype="fp16"),
    "keys in use, causal, alibi, sink": PLAIN.with_(seqused="0:500", mask="causal_lower_right", alibi=True, sink=True),
    "pages of 16": PLAIN.with_(seqused="0:500", page=16, layout="bshd"),
    "pages of 64, window": PLAIN.with_(seqused="0:500", page=64, mask="causal_lower_right", window="90:0"),
    "pages of 32, upper left, bias": PLAIN.with_(seqused="0:500", page=32, mask="causal_upper_left", bias="bhs"),
    "pages of 128, head_dim 128": PLAIN.with_(seqused="0:500", page=128, head_dim=128, dtype="fp16"),
}
FAST = {
    ("split_kv", "mma, a ring", "pages of 16"),
    ("flash_mma", "lazy, key warps", "keys in use, causal, alibi, sink"),
}
"""What `make check` runs; `make test` runs all."""
ALL = [
    pytest.param(family, structure, keys, marks=[] if (family, structure, keys) in FAST else [pytest.mark.slow])
    for family in ("split_kv", "flash_mma")
    for structure in STRUCTURES[family][1]
    for keys, problem in KEYS.items()
    if family == "split_kv" or not problem.page
]


@pytest.mark.parametrize(("family", "structure", "keys"), ALL)
def test_it_is_right(family, structure, keys):
    assert faults(family, structure, KEYS[keys]) == []


TMA_USED = ("split_kv", "mma by tensor maps", KEYS["keys in use, causal, alibi, sink"])
MMA_USED = ("flash_mma", "overlapped", KEYS["keys in use"])
ONE_BLOCK = ("split_kv", "mma", KEYS["keys in use"])
PAGED_RING = ("split_kv", "mma, a ring", KEYS["pages of 16"])
PAGED_WINDOW = ("split_kv", "mma", KEYS["pages of 64, window"])
TWO_PAGES = ("split_kv", "mma", KEYS["pages of 16"])
WRONG = [
    ("all keys are in use", TMA_USED, ("return used;", "return seqlen_k;")),
    ("the diagonal ends where all keys do", TMA_USED, ("given.diagonal += used - seqlen_k;", "")),
    ("a NaN behind the last key", TMA_USED, ("v.clear_tile_from(left, work.v_row());", ";")),
    ("a sequence without keys is never written", ONE_BLOCK, ("max(1, min(splits,", "min(splits, min(splits,")),
    (
        "it waits for splits without keys",
        ONE_BLOCK,
        ("arrived_zeroed + tile, live_splits,", "arrived_zeroed + tile, splits,"),
    ),
    (
        "it adds up splits without keys",
        ONE_BLOCK,
        ("state_gmem + tile_row, live_splits,", "state_gmem + tile_row, splits,"),
    ),
    ("all keys are in use in flash_mma", MMA_USED, ("return used;", "return seqlen_k;")),
    ("one table for all sequences", PAGED_RING, ("terms.given.table + batch *", "terms.given.table + 0 *")),
    ("the pages of the tile before", PAGED_RING, ("find_pages(tile + STAGES + 1);", "find_pages(tile + STAGES);")),
    (
        "the first page of a tile",
        TWO_PAGES,
        ("pages.of_group[offset / 16] *", "pages.of_group[0] *"),
    ),
    (
        "an entry behind the last key",
        TWO_PAGES,
        ("min(key, first + count - 1) >> page_bits", "key >> page_bits"),
    ),
    ("a page a key too long", PAGED_RING, ("key & ((1 << page_bits) - 1)", "key & (1 << page_bits)")),
    ("a window's pages begin anywhere", PAGED_WINDOW, ("first_key -= first_key % PAGE_GRANULE;", "")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "edit"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_wrong_one_is_found(kernel, edit):
    assert faults(*kernel, (edit,))
