"""Variants of attention, packed sequences, keys in use, pages and widths of V in the families that serve them: right on
the interpreter's cases in every structure that the genes give, wrong where a place that a variant needs is changed."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.cases import make_case
from evoattn.correctness.validate import check
from evoattn.families.given import passed
from evoattn.families.registry import FAMILIES, load_space, lookup
from evoattn.families.row_blocks import row_blocks
from evoattn.families.variants import variant_given
from evoattn.families.work import row_steps
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.sequences import starts
from tests.families import test_flash_mma, test_flash_wgmma, test_split_kv
from tests.families.covering import covering
from tests.families.on_interpreter import built, small_faults

H100 = GPUS["h100"]
PLAIN = AttentionProblem(1, 2, 1, 512, 512, 64, "bf16")
VARIANTS = {
    "window, sink": PLAIN.with_(mask="causal_upper_left", window="128:0", sink=True, dtype="fp16"),
    "window both ways, softcap, alibi": PLAIN.with_(window="64:32", softcap=50.0, alibi=True),
    "softcap, sink": PLAIN.with_(mask="causal_lower_right", softcap=3.0, sink=True, scale=0.5, dtype="fp16"),
    "alibi": PLAIN.with_(mask="causal_lower_right", alibi=True, dtype="fp16"),
    "bias, sink": PLAIN.with_(bias="bhs", sink=True, dtype="fp16"),
    "bias over heads, window": PLAIN.with_(bias="hs", mask="causal_upper_left", window="128:0"),
    "softcap, fp32": PLAIN.with_(softcap=5.0, mask="causal_upper_left", dtype="fp32"),
    "bias over batches, head_dim 128": PLAIN.with_(bias="bs", head_dim=128),
    "packed": PLAIN.with_(varlen="log:3:512", mask="causal_lower_right", layout="bshd", dtype="fp16"),
    "packed, alibi, sink": PLAIN.with_(varlen="3:512", mask="causal_upper_left", alibi=True, sink=True),
    "packed, three heads, causal": PLAIN.with_(
        heads=6, kv_heads=2, varlen="3:512", mask="causal_lower_right", layout="bshd", lse=True, sink=True
    ),
    "packed, window, V wider than K": PLAIN.with_(varlen="3:512", head_dim=32, value_dim=88, window="64:32"),
    "keys in use": PLAIN.with_(seqused="0:500", dtype="fp16"),
    "keys in use, causal, alibi, sink": PLAIN.with_(seqused="0:500", mask="causal_lower_right", alibi=True, sink=True),
    "pages of 16": PLAIN.with_(seqused="0:500", page=16, layout="bshd"),
    "pages of 64, window": PLAIN.with_(seqused="0:500", page=64, mask="causal_lower_right", window="90:0"),
    "pages of 32, upper left, bias": PLAIN.with_(seqused="0:500", page=32, mask="causal_upper_left", bias="bhs"),
    "pages of 128, head_dim 128": PLAIN.with_(seqused="0:500", page=128, head_dim=128, dtype="fp16"),
    "packed, pages of 16": PLAIN.with_(varlen="3:512", page=16, mask="causal_lower_right", layout="bshd"),
    "packed, pages of 64, window, sink": PLAIN.with_(
        heads=6, kv_heads=2, varlen="3:512", page=64, mask="causal_lower_right", window="90:0", sink=True, dtype="fp16"
    ),
    "an expression, sink": PLAIN.with_(
        score="s+table[h,k-q+40]*gate[b,h]+(k-q-d)//9/4", tables="table:fp32:2x97+gate:fp16:2x2", sink=True, scale=0.2
    ),
    "an expression of documents, causal": PLAIN.with_(
        score="where(doc[k]==doc[q],s*1.5,-inf)", tables="doc:int32:512", mask="causal_upper_left", dtype="fp16"
    ),
    "packed, an expression, softcap": PLAIN.with_(
        varlen="3:512", score="s*gate[b]+max(q-k,0)/64", tables="gate:bf16:3", softcap=20.0, mask="causal_lower_right"
    ),
    "keys in use, an expression": PLAIN.with_(seqused="0:500", score="s-slope[h]*abs(q+d-k)", tables="slope:fp32:2"),
    "an expression of many functions": PLAIN.with_(
        score="s+sin(k/7)*cos(q/5)+pow(1+abs(s),0.5)*erf(gate[h])+floor(k/3)/64-whole(q/2)/64"
        "+((k>>2)+(1<<b)+bitand(q,3))/16+where(seen[k],bias[wrap(k-q)],far[q]/4)",
        tables="gate:fp32:2+seen:bool:300+bias:bf16:70+far:int64:9",
    ),
    "V narrower than K, sink": PLAIN.with_(head_dim=96, value_dim=64, mask="causal_upper_left", sink=True),
    "V wider than K": PLAIN.with_(head_dim=32, value_dim=88, mask="causal_lower_right", dtype="fp16"),
    "V within K": PLAIN.with_(head_dim=96, value_dim=64, shared_kv=True),
}
TWO = {**test_flash_wgmma.TWO, "PING_PONG": True}
STRUCTURES = {
    "flash_wgmma": (
        test_flash_wgmma,
        {
            "one warpgroup": {"BLOCK_N": 64},
            "a warpgroup passes over tiles": {**TWO, "CAUSAL_SKIP": True},
            "persistent, rows begin ahead": {**TWO, "SCHEDULE": "claimed", "Q_IN_REGISTERS": True, "BLOCK_N": 48},
            "passes over tiles of a split": {**TWO, "CAUSAL_SKIP": True, "KEY_SPLIT": 2, "STORE": "rows"},
            "scores again, a cluster": {"RESCALE": "lazy_after", "KEY_SPLIT": 2, "BLOCK_N": 64, "STORE": "rows"},
            "shared rows": {"SCHEDULE": "balanced", "BLOCK_N": 48},
            "fixed, four warps copy": {**TWO, "SCHEDULE": "fixed", "BLOCK_N": 64},
            "wide tiles": {"BLOCK_N": 112},
            "heads as rows": {"GROUP_ROWS": True, "BLOCK_N": 64, "STORE": "rows", "KEY_SPLIT": 2},
            "heads as rows, claimed": {
                **TWO,
                "GROUP_ROWS": True,
                "SCHEDULE": "claimed",
                "BLOCK_N": 64,
                "STORE": "rows",
                "PING_PONG": False,
            },
            "results in memory": {"KEY_SPLIT": 8, "BLOCK_N": 48, "STORE": "rows", "GROUP_ROWS": True},
            "heads as rows, by a tensor map": {
                **TWO,
                "GROUP_ROWS": True,
                "CAUSAL_SKIP": True,
                "SCHEDULE": "claimed",
                "Q_IN_REGISTERS": True,
                "BLOCK_N": 48,
            },
        },
    ),
    "flash_mma": (
        test_flash_mma,
        {
            "together": {},
            "lazy, key warps": {"RESCALE": "lazy", "KEY_WARPS": 2, "ROW_SUM": "mma"},
            "overlapped": {"SCHEDULE": "overlapped", "RESCALE": "lazy", "O_STORE": "shared", "Q_PLACE": "registers"},
            "O where Q was": {"O_STORE": "shared"},
            "split": {"SCHEDULE": "split", "RESCALE": "vote", "Q_PLACE": "direct"},
        },
    ),
    "split_kv": (
        test_split_kv,
        {
            "mma": {},
            "mma, a cluster": {"MERGE": "cluster", "SPLITS": 4},
            "mma by tensor maps": {"LOAD": "tma", "STAGES": 2, "MERGE": "kernel"},
            "mma, a ring": {"LOAD": "cp_async", "STAGES": 2, "BLOCK_N": 32},
            "fma": {**test_split_kv.FMA, "MERGE": "kernel"},
            "fma, a ring": {**test_split_kv.FMA, **test_split_kv.RING, "SPLITS": 1, "MERGE": "kernel"},
        },
    ),
}


def faults(family: str, structure: str, variant: str, edits: tuple[tuple[str, str], ...] = (), cases=slice(None)):
    """What the interpreter's cases find in the kernel's source with these edits; an empty list if it is right."""
    module, structures = STRUCTURES[family]
    problem = VARIANTS[variant]
    config = load_space(family, H100).make_config(module.BASE | structures[structure])
    return small_faults(built(module.FAMILY, problem, config, H100, *edits), problem, cases)


WGMMA_WINDOW = ("flash_wgmma", "a warpgroup passes over tiles", "window, sink")
MMA_LAZY = ("flash_mma", "lazy, key warps", "window both ways, softcap, alibi")
SPLIT_WINDOW = ("split_kv", "mma by tensor maps", "window, sink")
BIAS = ("flash_wgmma", "persistent, rows begin ahead", "bias, sink")
OWN = ("flash_wgmma", "one warpgroup", "an expression, sink")
PACKED_HEADS = ("flash_wgmma", "heads as rows, claimed", "packed, three heads, causal")
HEADS, HEADS_BY_MAP = (("flash_wgmma", f"heads as rows{how}", "window, sink") for how in ("", ", by a tensor map"))
PACKED_PAGES = "packed, pages of 16"
MMA_PACKED = ("flash_mma", "together", PACKED_PAGES)
WRONG = [
    ("a window a key too long", WGMMA_WINDOW, ("- window.past) {}", "- window.past - 1) {}")),
    ("a window a key too short", MMA_LAZY, ("(WINDOWED ? window.ahead : 0)", "(WINDOWED ? window.ahead - 1 : 0)")),
    (
        "whole tiles a tile too early",
        WGMMA_WINDOW,
        ("query(first_row(work.tile) + 63)) + BLOCK_N - 1)", "query(first_row(work.tile))) + BLOCK_N - 1)"),
    ),
    (
        "the first tile is not the row block's",
        WGMMA_WINDOW,
        (
            "min(last_key_tile(row_block), mask.first_key(rows.query(row_block * BLOCK_M)) / BLOCK_N)",
            "min(last_key_tile(row_block), (mask.first_key(rows.query(row_block * BLOCK_M)) + BLOCK_N - 1) / BLOCK_N)",
        ),
    ),
    (
        "masking by the warp's first row",
        MMA_LAZY,
        ("mask.first_key(warp_row + WARP_ROWS - 1);", "mask.first_key(warp_row);"),
    ),
    ("no masking at the lower edge", SPLIT_WINDOW, ("masked |= key < hidden_keys;", "")),
    ("no cap", MMA_LAZY, ("low = capped(low), high = capped(high);", "high = capped(high);")),
    (
        "the slope's distance has a sign",
        MMA_LAZY,
        ("fabsf(row.distance + float(step))", "(row.distance + float(step))"),
    ),
    (
        "one slope for all heads",
        ("flash_wgmma", "one warpgroup", "alibi"),
        ("given.slopes[head] *", "given.slopes[0] *"),
    ),
    (
        "a bias's rows past the last",
        BIAS,
        ("min(query, seqlen_q - 1) * given.bias_row_stride", "query * given.bias_row_stride"),
    ),
    ("a bias's keys past the last", BIAS, ("if (step < row.keys) pair.load(", "pair.load(")),
    (
        "terms of counted tiles, not of their keys",
        ("flash_wgmma", "shared rows", "bias, sink"),
        ("COUNTS = ALIKE && !Terms::ADDED &&", "COUNTS = ALIKE &&"),
    ),
    ("one bias for all heads", BIAS, ("head * given.bias_head_stride;", "0;")),
    ("an expression of scaled scores alone", OWN, ("own.changed(score, given.term_unit,", "own.changed(score, 1.f,")),
    ("an expression of unscaled scores", OWN, ("const float s = raw * unit;", "const float s = raw;")),
    ("a table's index outside", OWN, ("max(0, min(index, size - 1))", "index")),
    ("a division that rounds to zero", OWN, ("x / y - (x % y != 0 && (x < 0) != (y < 0));", "x / y;")),
    ("an expression has the first batch", OWN, ("terms.batch = batch, terms.head", "terms.head")),
    ("an expression has the first head", OWN, ("terms.batch = batch, terms.head = head;", "terms.batch = batch;")),
    (
        "an expression has the batch of packed tensors, mma",
        ("flash_mma", "together", "packed, an expression, softcap"),
        ("terms.head(sequence_number, head)", "terms.head(batch, head)"),
    ),
    (
        "an expression has the batch of packed tensors, few rows",
        ("split_kv", "fma", "packed, an expression, softcap"),
        ("terms.head(index, first_head", "terms.head(batch, first_head"),
    ),
    (
        "an expression has no key in a lane's second row",
        ("split_kv", "mma", "keys in use, an expression"),
        ("row.key, step, given.diagonal)", "row.key, 0, given.diagonal)"),
    ),
    ("one sink for all heads", ("flash_mma", "overlapped", "bias, sink"), ("given.sinks[head]", "given.sinks[0]")),
    (
        "slots of queries, not of rows",
        PACKED_HEADS,
        ("- query_starts[0]) << row_bits)", "- query_starts[0]))"),
    ),
    ("rows of the first packed sequence", PACKED_HEADS, ("first_query + query(first_row),", "query(first_row),")),
    (
        "O of the first packed sequence",
        PACKED_HEADS,
        ("VARLEN ? of_sequence.first_query * o_row_stride : of", "VARLEN ? 0 : of", None),
    ),
    ("rows of a packed sequence counted once", PACKED_HEADS, ("count = of_sequence << bits;", "count = of_sequence;")),
    ("three heads in two rows a query", HEADS, ("bits = 32 - __clz(group - 1);", "bits = 31 - __clz(group);")),
    ("rows of heads that there are not", HEADS, ("return head_in_group(row) < group && query", "return query")),
    (
        "a mask by rows, not by queries",
        HEADS_BY_MAP,
        ("work.rows.query(lane_row(work.tile) + 8)", "(lane_row(work.tile) + 8)"),
    ),
    (
        "a warpgroup passes over tiles that its last row sees",
        HEADS_BY_MAP,
        ("last_key(work.rows.query(first_row(work.tile) + 63))", "last_key(work.rows.query(first_row(work.tile)))"),
    ),
    (
        "scores that come again are as they were",
        ("flash_wgmma", "scores again, a cluster", "alibi"),
        ("if constexpr (Terms::ANY) change_scores();\n            },", "},"),
    ),
]
# Keys in use, and pages.
TMA_USED = ("split_kv", "mma by tensor maps", "keys in use, causal, alibi, sink")
MMA_USED = ("flash_mma", "overlapped", "keys in use")
ONE_BLOCK = ("split_kv", "mma", "keys in use")
PAGED_RING = ("split_kv", "mma, a ring", "pages of 16")
PAGED_WINDOW = ("split_kv", "mma", "pages of 64, window")
MMA_PAGED = ("flash_mma", "split", "pages of 16")
WGMMA_USED = ("flash_wgmma", "one warpgroup", "keys in use, causal, alibi, sink")
WGMMA_PAGED = ("flash_wgmma", "persistent, rows begin ahead", "pages of 16")
WGMMA_PAGES = ("flash_wgmma", "heads as rows", "pages of 32, upper left, bias")
FOUR_COPY = ("flash_wgmma", "fixed, four warps copy", "pages of 16")
TWO_PAGES = ("split_kv", "mma", "pages of 16")
WRONG += [
    ("all keys are in use", TMA_USED, ("return used;", "return seqlen_k;")),
    ("the diagonal ends where all keys do", TMA_USED, ("given.diagonal += used - seqlen_k;", "")),
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
    ("one table for all sequences", PAGED_RING, ("terms.given.table + index *", "terms.given.table + 0 *")),
    ("the first page of a tile", TWO_PAGES, ("return of_group[offset / 16];", "return of_group[0];")),
    ("an entry behind the last key", TWO_PAGES, ("min(key, first + count - 1) >> page_bits", "key >> page_bits")),
    ("a page a key too long", PAGED_RING, ("key & ((1 << page_bits) - 1)", "key & (1 << page_bits)")),
    ("one table for all sequences in flash_mma", MMA_PAGED, ("given.table + sequence_number *", "given.table + 0 *")),
    ("rows of a tile, not of a page", MMA_PAGED, ("pages.row_in_page(key) * row_stride", "row * row_stride")),
    ("an entry behind the last key in flash_mma", MMA_PAGED, ("valid = key < pages.keys;", "valid = true;")),
    ("all keys are in use in flash_wgmma", WGMMA_USED, ("return used;", "return seqlen_k;")),
    ("slopes from where all keys end", WGMMA_USED, ("0 : seqlen_k - seqlen_q;", "0 : packed.most_keys - seqlen_q;")),
    ("batches of one head", WGMMA_USED, ("of * terms.given.kv_rows;", "of * packed.most_keys;")),
    ("rows of keys of the tile before", WGMMA_PAGED, ("if constexpr (SEQUSED) enter_keys(words[6]);", "")),
    (
        "one table for all sequences in flash_wgmma",
        WGMMA_PAGED,
        ("given.table + work.tile.batch *", "given.table + 0 *"),
    ),
    ("a page of NaN behind the last key", WGMMA_PAGED, ("keys - (page << bits));", "page_keys());")),
    (
        "an entry behind the last key in flash_wgmma",
        WGMMA_PAGES,
        ("key < keys ? __ldg(table_gmem + (key >> bits)) : 0;", "__ldg(table_gmem + (key >> bits));"),
    ),
    ("boxes of a whole tile", WGMMA_PAGES, ("row += step;", "row += ROWS;")),
    ("a part of the barriers' arrivals", FOUR_COPY, ("init_barriers<PARTS>", "init_barriers<1>")),
    ("pages of the first warp", FOUR_COPY, ("look_up(first_row);", "look_up(0);")),
    ("pages of one head", WGMMA_PAGES, ("* rows_apart + length};", "* page_keys() + length};")),
    ("a window's pages begin anywhere", PAGED_WINDOW, ("first_key -= first_key % PAGE_GRANULE;", "")),
]
# Packed sequences.
PACKED = ("flash_wgmma", "persistent, rows begin ahead", "packed")
SPLIT, SPLIT_BY_MAP = (("split_kv", structure, "packed") for structure in ("mma, a ring", "mma by tensor maps"))
PACKED_BY_ROWS = ("flash_wgmma", "scores again, a cluster", "packed")
WRONG += [
    ("a block without a tile waits for one", PACKED, ("if (take_tile(0) || !VARLEN) {", "if (take_tile(0) || true) {")),
    ("slots without a tile make no claim", PACKED, ("index = next_index(++turn)) {", "++index) {")),
    (
        "rows end where those of the next tile's sequence do",
        PACKED,
        ("last_sequence, last_range, last_state, o);", "work.sequence, last_range, last_state, o);"),
    ),
    (
        "the diagonal of the longest sequence",
        PACKED,
        ("mask = Mask(seqlen_q, seqlen_k,", "mask = Mask(packed.most_queries, seqlen_k,"),
    ),
    (
        "keys a row too late",
        PACKED,
        (
            "k_ring.template load_keys<PAGED, SLIDING, PARTS>(ring, key,",
            "k_ring.template load_keys<PAGED, SLIDING, PARTS>(ring, key + 1,",
        ),
    ),
    (
        "V of the sequence behind",
        PACKED,
        (
            "v_ring.template load_keys<PAGED, SLIDING, PARTS>(ring, key, pages, work.sequence.end_key(),",
            "v_ring.template load_keys<PAGED, SLIDING, PARTS>(ring, key, KeyPages{pages.table_gmem, pages.bits, "
            "pages.rows_apart, pages.keys + 5}, work.sequence.end_key() + 5,",
        ),
    ),
    (
        "O over the sequence behind, by the copy engine",
        PACKED,
        (
            "0, OutputTiles::CHUNKS, first_row(of), of_sequence.queries,\n" + " " * 39 + "of_sequence.end_query(),",
            "0, OutputTiles::CHUNKS, first_row(of), of_sequence.queries + 1, of_sequence.end_query() + 1,",
        ),
    ),
    (
        "O over the sequence behind",
        PACKED_BY_ROWS,
        ("VARLEN ? of_sequence.queries : work.seqlen_q;", "VARLEN ? of_sequence.queries + 1 : work.seqlen_q;"),
    ),
    (
        "K of a sequence where its Q begins",
        ("flash_mma", "together", "packed"),
        ("k_gmem += sequence.first_key *", "k_gmem += sequence.first_query *"),
    ),
    (
        "rows of the longest sequence",
        ("flash_mma", "split", "packed"),
        ("seqlen_q = sequence.queries, seqlen_k = sequence.keys;", "seqlen_k = sequence.keys;"),
    ),
    ("K of split_kv where its Q begins", SPLIT, ("first_key) + warp_key,", "first_query) + warp_key,")),
    (
        "the diagonal of the longest sequence in split_kv",
        SPLIT,
        ("seqlen_q = sequence.queries, seqlen_k = sequence.keys;", "seqlen_k = sequence.keys;"),
    ),
    (
        "rows are merged that a sequence has not",
        SPLIT_BY_MAP,
        ("if (VARLEN && row >= group_heads * seqlen_q) return;", ""),
    ),
    (
        "slopes from the first key",
        ("flash_wgmma", "one warpgroup", "packed, alibi, sink"),
        ("CAUSAL && !CAUSAL_LOWER_RIGHT ? 0 : seqlen_k - seqlen_q;", "seqlen_k - seqlen_q;"),
    ),
]
# Widths of V.
WRONG += [
    (
        "tiles of V as far apart as those of K, wgmma",
        ("flash_wgmma", "persistent, rows begin ahead", "V narrower than K, sink"),
        ("v_descriptor + descriptor_step(Smem::V_TILE_BYTES)", "v_descriptor + descriptor_step(Smem::K_TILE_BYTES)"),
    ),
    (
        "O where the next warpgroup's Q lies",
        ("flash_wgmma", "a warpgroup passes over tiles", "V wider than K"),
        ("warpgroup * Smem::Q_PLACE_BYTES;", "warpgroup * TensorTile<HEAD_DIM>::bytes(64);"),
    ),
    (
        "O is stored over the columns of Q",
        ("flash_wgmma", "scores again, a cluster", "V wider than K"),
        ("rows_to_global<VALUE_DIM>(smem", "rows_to_global<HEAD_DIM>(smem"),
    ),
    ("the first table, mma", MMA_PACKED, ("table + sequence_number *", "table + batch *")),
    ("the first table, split", ("split_kv", "mma", PACKED_PAGES), ("table + index * int64", "table + batch * int64")),
    (
        "tiles of V as far apart as those of K, mma",
        ("flash_mma", "together", "V narrower than K, sink"),
        ("v_ring_smem + tile % V_STAGES * V_TILE_BYTES", "v_ring_smem + tile % V_STAGES * K_TILE_BYTES"),
    ),
    (
        "O over rows of Q that another warp reads",
        ("flash_mma", "O where Q was", "V wider than K"),
        ("QPlace::DIRECT || HEAD_DIM != VALUE_DIM)", "QPlace::DIRECT)"),
    ),
]


def possible(family: str) -> list[tuple[str, str, str]]:
    """Every structure of the family with each variant that it can have."""
    module, structures = STRUCTURES[family]
    configs = {name: load_space(family, H100).make_config(module.BASE | genes) for name, genes in structures.items()}
    return [
        (family, structure, variant)
        for structure, config in configs.items()
        for variant, problem in VARIANTS.items()
        if not module.FAMILY.why_impossible(problem, config, H100)
    ]


TERMS, LENGTHS = ("softcap", "alibi", "sink", "bias", "score"), ("varlen", "seqused", "page")


def shown(kernel: tuple[str, str, str]) -> set[tuple[str, ...]]:
    """The variant in its family, and the structure with each kind of thing that the variant's problem asks for: terms
    of scores have one place in every structure, and so have lengths."""
    family, structure, variant = kernel
    kinds = dict.fromkeys(TERMS, "terms") | dict.fromkeys(LENGTHS, "lengths")
    asked = {kinds.get(name, name) for name in VARIANTS[variant].variants}
    return {(family, variant)} | {(family, structure, one) for one in asked}


ALL = [
    kernel
    for family in STRUCTURES
    for kernel in covering(
        possible(family), shown, dict.fromkeys(kernel for _, kernel, _ in WRONG if kernel[0] == family)
    )
]
"""The kernels in which faults are planted, then few: each family has all variants, each structure all kinds of them."""
FEW = covering(ALL, lambda of: {of[:2], *((of[0], name) for name in VARIANTS[of[2]].variants)})
"""Of them few, which have all structures of each family, and all that its variants ask for: those of `make test`."""
REST = pytest.mark.sampled(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel", [pytest.param(one, marks=() if one in FEW else REST, id=": ".join(one)) for one in ALL]
)
def test_it_is_right(kernel):  # on every third small case, in turns
    assert faults(*kernel, cases=slice(ALL.index(kernel) // 3 % 3, None, 3)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "edit"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
@pytest.mark.sampled(6)
def test_a_wrong_one_is_found(kernel, edit):
    assert faults(*kernel, (edit,))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["window, sink", "window both ways, softcap, alibi"])
def test_a_warpgroup_that_waits_for_a_tile_that_none_brings_is_found(variant):
    edit = ("key_tile >= first + KEY_SPLIT;", "key_tile > first && key_tile >= KEY_SPLIT;")
    reasons = faults("flash_wgmma", "passes over tiles of a split", variant, (edit,))
    assert reasons and all("deadlocked" in reason for reason in reasons)


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
        ({"k": (64, 64, 128, 1), "v": (64, 64, 128, 1)}, None),  # of one key: as the op's `plain_strides` says
    ],
)
def test_flash_wgmma_takes_batches_that_are_whole_rows_apart(strides, reason):
    one_key = strides["k"][0] == 64
    fields = asdict(VARIANTS["keys in use"].with_(batch=2, **({"seqlen_k": 1, "seqused": "0:1"} if one_key else {})))
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
    problem = Strided(**asdict(VARIANTS["keys in use"].with_(batch=1)), own=tuple(own.items()))
    assert FAMILIES["flash_wgmma"].why_unsupported(problem, GPUS["h100"]) is None
    counts = [arg.value for arg in passed(variant_given(problem)) if getattr(arg, "ctype", "") == "int32"]
    assert all(-(1 << 31) <= count < 1 << 31 for count in counts)


def test_a_merge_without_rows_ends_after_the_launch_before_it():
    """As in a graph that serves no sequence this time: lengths are on the device, and all are 0."""
    family, problem = lookup("split_kv"), PLAIN.with_(batch=2, seqlen_q=1, varlen="1+1/100+512", head_dim=16)
    genes = test_split_kv.config(MERGE="kernel").params | {"DEPENDENT_LAUNCH": "early"}
    early = load_space("split_kv", H100).make_config(genes)
    case = make_case("no sequence", problem, 1, "cpu", double=True)
    case.tensors["cu_seqlens_q"].zero_()
    assert "griddepcontrol" not in check(InterpreterBackend(), built(family, problem, early, H100), case).reason


@given(st.lists(st.integers(0, 300), min_size=1, max_size=9).filter(any), st.sampled_from((16, 64, 192)))
def test_there_are_slots_for_every_tile_and_few_more(lengths, rows):
    """As `sequences.cuh` counts them."""
    problem = AttentionProblem(len(lengths), 1, 1, 300, 300, 64, varlen="+".join(map(str, lengths)))
    first = [start // rows + i for i, start in enumerate(starts(tuple(lengths)))]
    tiles = [-(-length // rows) for length in lengths]
    assert row_blocks(problem, rows) == first[-1]
    assert all(count <= end - begin <= count + 1 for begin, end, count in zip(first, first[1:], tiles, strict=False))


def test_steps_are_those_of_the_sequences():
    problem = AttentionProblem(3, 1, 1, 300, 300, 64, "fp16", "causal_lower_right", varlen="200+0+100")
    assert row_steps(problem, 100, 50) == ((2 + 4 + 2) / 3, 4, 3)
    assert row_steps(problem.with_(mask="full"), 100, 50) == ((4 + 4 + 2) / 3, 4, 3)
