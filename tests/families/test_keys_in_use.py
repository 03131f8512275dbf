"""Sequences of which only some keys are in use, and caches of pages: right in every structure that a family's genes
give, and wrong where a place that they need is changed."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import pytest

from evoattn.families.registry import FAMILIES
from evoattn.families.variants import variant_args
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from tests.families.test_variants import PLAIN, STRUCTURES, every_other, faults

KEYS = {
    "keys in use": PLAIN.with_(seqused="0:500", dtype="fp16"),
    "keys in use, causal, alibi, sink": PLAIN.with_(seqused="0:500", mask="causal_lower_right", alibi=True, sink=True),
    "pages of 16": PLAIN.with_(seqused="0:500", page=16, layout="bshd"),
    "pages of 64, window": PLAIN.with_(seqused="0:500", page=64, mask="causal_lower_right", window="90:0"),
    "pages of 32, upper left, bias": PLAIN.with_(seqused="0:500", page=32, mask="causal_upper_left", bias="bhs"),
    "pages of 128, head_dim 128": PLAIN.with_(seqused="0:500", page=128, head_dim=128, dtype="fp16"),
}
ALL = [
    pytest.param(family, *pair, id="-".join((family, *pair)))
    for family in ("split_kv", "flash_mma", "flash_wgmma")
    for pair in every_other(STRUCTURES[family][1], KEYS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "structure", "keys"), ALL)
def test_it_is_right(family, structure, keys):
    assert faults(family, structure, KEYS[keys]) == []


TMA_USED = ("split_kv", "mma by tensor maps", KEYS["keys in use, causal, alibi, sink"])
MMA_USED = ("flash_mma", "overlapped", KEYS["keys in use"])
ONE_BLOCK = ("split_kv", "mma", KEYS["keys in use"])
PAGED_RING = ("split_kv", "mma, a ring", KEYS["pages of 16"])
PAGED_WINDOW = ("split_kv", "mma", KEYS["pages of 64, window"])
MMA_PAGED = ("flash_mma", "split", KEYS["pages of 16"])
MMA_WINDOW = ("flash_mma", "together", KEYS["pages of 64, window"])
WGMMA_USED = ("flash_wgmma", "one warpgroup", KEYS["keys in use, causal, alibi, sink"])
WGMMA_PAGED = ("flash_wgmma", "persistent, rows begin ahead", KEYS["pages of 16"])
WGMMA_PAGES = ("flash_wgmma", "heads as rows", KEYS["pages of 32, upper left, bias"])
FOUR_COPY = ("flash_wgmma", "fixed, four warps copy", KEYS["pages of 16"])
TWO_COPY = ("flash_wgmma", "fixed, four warps copy", KEYS["pages of 32, upper left, bias"])
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
    ("one table for all sequences in flash_mma", MMA_PAGED, ("given.table + batch *", "given.table + 0 *")),
    ("rows of a tile, not of a page", MMA_PAGED, ("pages.row_in_page(key) * row_stride", "row * row_stride")),
    ("an entry behind the last key in flash_mma", MMA_PAGED, ("valid = key < pages.keys;", "valid = true;")),
    (
        "pages from key 0 on, not from a window's first",
        MMA_WINDOW,
        ("row_stride, pages, first_block_key + tile * BLOCK_N);", "row_stride, pages, tile * BLOCK_N);"),
    ),
    ("all keys are in use in flash_wgmma", WGMMA_USED, ("return used;", "return seqlen_k;")),
    ("the diagonal of the first sequence", WGMMA_USED, ("mask = Mask(seqlen_q, seqlen_k, terms.given.window);", "")),
    ("slopes from where all keys end", WGMMA_USED, ("0 : seqlen_k - seqlen_q;", "0 : packed.most_keys - seqlen_q;")),
    ("batches of one head", WGMMA_USED, ("of * terms.given.kv_rows;", "of * packed.most_keys;")),
    ("rows of keys of the tile before", WGMMA_PAGED, ("if constexpr (SEQUSED) enter_keys(words[6]);", "")),
    ("one table for all sequences in flash_wgmma", WGMMA_PAGED, ("given.table + tile.batch *", "given.table + 0 *")),
    ("a page of NaN behind the last key", WGMMA_PAGED, ("keys - (page << bits));", "page_keys());")),
    (
        "an entry behind the last key in flash_wgmma",
        WGMMA_PAGES,
        ("key < keys ? __ldg(table_gmem + (key >> bits)) : 0;", "__ldg(table_gmem + (key >> bits));"),
    ),
    ("boxes of a whole tile", WGMMA_PAGES, ("row += step;", "row += ROWS;")),
    ("all warps copy the first box", FOUR_COPY, ("first_row = part * box_rows;", "first_row = 0;")),
    ("all warps expect as many bytes", TWO_COPY, ("+ PARTS - 1 - part) / PARTS", "+ PARTS - 1) / PARTS")),
    ("a part of the barriers' arrivals", FOUR_COPY, ("init_barriers<PARTS>", "init_barriers<1>")),
    ("pages of the first warp", FOUR_COPY, ("look_up(first_row);", "look_up(0);")),
    ("pages looked up before", (*WGMMA_PAGED[:1], "wide tiles", WGMMA_PAGED[2]), ("      look_up(row);\n", "")),
    ("pages of one head", WGMMA_PAGES, ("* rows_apart + length};", "* page_keys() + length};")),
    ("a window's pages begin anywhere", PAGED_WINDOW, ("first_key -= first_key % PAGE_GRANULE;", "")),
]


@dataclass(frozen=True)
class Strided(AttentionProblem):
    """A problem whose K and V have strides of their own."""

    own: tuple[tuple[str, tuple[int, int, int, int]], ...] = ()

    def strides(self, tensor):
        return dict(self.own).get(tensor) or super().strides(tensor)


@pytest.mark.parametrize(
    ("strides", "reason"),
    [
        ({"k": (1024 * 64, 64, 64, 1), "v": (1024 * 64, 64, 64, 1)}, None),
        ({"k": (1024 * 64, 64, 64, 1)}, "as many rows apart"),
        ({"k": (1024 * 64 + 8, 64, 64, 1), "v": (1024 * 64 + 8, 64, 64, 1)}, "whole rows apart"),
        ({"k": (1 << 37, 64, 64, 1), "v": (1 << 37, 64, 64, 1)}, "an int32 counts"),
    ],
)
def test_flash_wgmma_takes_batches_that_are_whole_rows_apart(strides, reason):
    fields = asdict(KEYS["keys in use"].with_(batch=2))
    problem = Strided(**fields, own=tuple(strides.items()))
    told = FAMILIES["flash_wgmma"].why_unsupported(problem, GPUS["h100"])
    assert told is None if reason is None else reason in told


@pytest.mark.parametrize(
    ("rows", "variant", "taken"),
    [
        (1 << 30, {"seqused": "0:500"}, True),
        ((1 << 30) + 1, {"seqused": "0:500"}, False),
        ((1 << 30) + 1, {"seqused": "0:500", "page": 64}, True),
        ((1 << 30) + 1, {"varlen": "300"}, False),
    ],
)
def test_flash_wgmma_takes_sequences_that_its_tensor_maps_can_count(rows, variant, taken):
    problem = PLAIN.with_(batch=1, heads=1, kv_heads=1, head_dim=16, seqlen_k=rows, **variant)
    told = FAMILIES["flash_wgmma"].why_unsupported(problem, GPUS["h100"])
    assert told is None if taken else "rows of one" in told


def test_one_batch_may_have_more_rows_than_an_int32_counts():
    own = dict.fromkeys("kv", (1 << 40, 64, 64, 1))
    problem = Strided(**asdict(KEYS["keys in use"].with_(batch=1)), own=tuple(own.items()))
    assert FAMILIES["flash_wgmma"].why_unsupported(problem, GPUS["h100"]) is None
    assert all(
        -(1 << 31) <= arg.value < 1 << 31 for arg in variant_args(problem) if getattr(arg, "ctype", "") == "int32"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "edit"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_wrong_one_is_found(kernel, edit):
    assert faults(*kernel, (edit,))
