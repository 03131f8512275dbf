"""Variants of attention in the three families that serve them: right on the interpreter's cases in every structure that
the genes give, and wrong where a place that a variant needs is changed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import load_space
from tests.families import test_flash_mma, test_flash_wgmma, test_split_kv
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
    "packed, window, V wider than K": PLAIN.with_(varlen="3:512", head_dim=32, value_dim=88, window="64:32"),
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


def every_other(structures: Iterable[str], others: Iterable[str]) -> list[tuple[str, str]]:
    """Half of the pairs: each structure has half of the others, each of these half of the structures. All take twice as
    long, and neighbours in the tables have much in common."""
    names = list(others)
    return [(one, other) for i, one in enumerate(structures) for other in names[i % 2 :: 2]]


ALL = [
    pytest.param(family, *pair, id=": ".join((family, *pair)))
    for family, (_, structures) in STRUCTURES.items()
    for pair in every_other(structures, VARIANTS)
]


def faults(
    family: str, structure: str, variant: str | AttentionProblem, edits: tuple[tuple[str, str], ...] = ()
) -> list[str]:
    """What the interpreter's cases find in the kernel's source with these edits; empty for a kernel that is right."""
    module, structures = STRUCTURES[family]
    problem = VARIANTS[variant] if isinstance(variant, str) else variant
    config = load_space(family, H100).make_config(module.BASE | structures[structure])
    if impossible := module.FAMILY.why_impossible(problem, config, H100):
        assert not edits, f"no fault can be planted: {impossible}"
        pytest.skip(impossible)
    return small_faults(built(module.FAMILY, problem, config, H100, *edits), problem)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "structure", "variant"), ALL)
def test_it_is_right(family, structure, variant):
    assert faults(family, structure, variant) == []


WGMMA_WINDOW = ("flash_wgmma", "a warpgroup passes over tiles", "window, sink")
MMA_LAZY = ("flash_mma", "lazy, key warps", "window both ways, softcap, alibi")
SPLIT_WINDOW = ("split_kv", "mma by tensor maps", "window, sink")
BIAS = ("flash_wgmma", "persistent, rows begin ahead", "bias, sink")
HEADS, HEADS_BY_MAP = (("flash_wgmma", f"heads as rows{how}", "window, sink") for how in ("", ", by a tensor map"))
WRONG = [
    ("a window a key too long", WGMMA_WINDOW, ("- window.past) {}", "- window.past - 1) {}")),
    ("a window a key too short", MMA_LAZY, ("(WINDOWED ? window.ahead : 0)", "(WINDOWED ? window.ahead - 1 : 0)")),
    (
        "whole tiles a tile too early",
        WGMMA_WINDOW,
        ("rows.query(first_row(tile) + 63)) + BLOCK_N - 1)", "rows.query(first_row(tile))) + BLOCK_N - 1)"),
    ),
    (
        "the first tile is not the row block's",
        WGMMA_WINDOW,
        (
            "mask.first_key(rows.query(row_block * BLOCK_M)) / BLOCK_N)",
            "(mask.first_key(rows.query(row_block * BLOCK_M)) + BLOCK_N - 1) / BLOCK_N)",
        ),
    ),
    (
        "masking by the warp's first row",
        MMA_LAZY,
        ("mask.first_key(warp_row + WARP_ROWS - 1);", "mask.first_key(warp_row);"),
    ),
    (
        "no raised shift behind a hidden tile",
        MMA_LAZY,
        ("first_key(tile) < hidden_keys + BLOCK_N)", "first_key(tile) < hidden_keys)"),
    ),
    (
        "keys beyond the last",
        MMA_LAZY,
        (
            "seqlen_k - first_block_key - tile * BLOCK_N);",
            "seqlen_k - tile * BLOCK_N);",
        ),
    ),
    ("the split begins at key 0", SPLIT_WINDOW, ("Mask::WINDOW ? mask.first_key(packed.query(first_row)) : 0;", "0;")),
    ("no masking at the lower edge", SPLIT_WINDOW, ("masked |= key < hidden_keys;", "")),
    ("no cap", MMA_LAZY, ("low = capped(low), high = capped(high);", "high = capped(high);")),
    (
        "the slope's distance has a sign",
        MMA_LAZY,
        ("fabsf(row.distance + float(step))", "(row.distance + float(step))"),
    ),
    (
        "the second key has the first one's distance",
        MMA_LAZY,
        ("high = sloped(high, row, step + 1);", "high = sloped(high, row, step);"),
    ),
    ("slopes are not in units of scores", MMA_LAZY, ("given.slopes[head] * given.term_unit", "given.slopes[head]")),
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
    (
        "a bias's keys past the last",
        BIAS,
        ("if (step < row.keys) pair.load(", "pair.load("),
    ),
    (
        "terms of counted tiles, not of their keys",
        ("flash_wgmma", "shared rows", "bias, sink"),
        ("Schedule::BALANCED && !Terms::ADDED;", "Schedule::BALANCED;"),
    ),
    ("one bias for all heads", BIAS, ("head * given.bias_head_stride;", "0;")),
    ("a bias that hides keys meets a lazy shift", BIAS, ("MAY_HIDE = BIAS;", "MAY_HIDE = false;")),
    ("a sink in natural units", WGMMA_WINDOW, ("to_float(given.sinks[head]) * LOG2_E", "to_float(given.sinks[head])")),
    (
        "O does not follow the sink's shift",
        ("split_kv", "mma", "bias, sink"),
        ("inverse = share.inverse() * factor;", "inverse = share.inverse();"),
    ),
    ("one sink for all heads", ("flash_mma", "overlapped", "bias, sink"), ("given.sinks[head]", "given.sinks[0]")),
    ("three heads in two rows a query", HEADS, ("bits = 32 - __clz(group - 1);", "bits = 31 - __clz(group);")),
    ("rows of heads that there are not", HEADS, ("return head_in_group(row) < group && query", "return query")),
    ("rows of queries that there are not", HEADS, ("< group && query(row) < queries;", "< group;")),
    ("a mask by rows, not by queries", HEADS_BY_MAP, ("rows.query(lane_row(tile) + 8)", "(lane_row(tile) + 8)")),
    (
        "a warpgroup passes over tiles that its last row sees",
        HEADS_BY_MAP,
        ("mask.last_key(rows.query(first_row(tile) + 63))", "mask.last_key(rows.query(first_row(tile)))"),
    ),
    (
        "scores that come again are as they were",
        ("flash_wgmma", "scores again, a cluster", "alibi"),
        ("          if constexpr (Terms::ANY) change_scores();\n        });", "        });"),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "edit"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_wrong_one_is_found(kernel, edit):
    assert faults(*kernel, (edit,))


@pytest.mark.parametrize(
    "variant", ["window, sink", pytest.param("window both ways, softcap, alibi", marks=pytest.mark.slow)]
)
def test_a_warpgroup_that_waits_for_a_tile_that_none_brings_is_found(variant):
    edit = ("key_tile >= first + KEY_SPLIT;", "key_tile > first && key_tile >= KEY_SPLIT;")
    reasons = faults("flash_wgmma", "passes over tiles of a split", variant, (edit,))
    assert reasons and all("deadlocked" in reason for reason in reasons)
