"""flash_wgmma with the heads of a group as rows: right for groups of any size, and its tensor maps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.model.launch import TensorMap
from evoattn.model.problem import AttentionProblem
from tests.families.on_interpreter import built, judged
from tests.families.test_flash_wgmma import FAMILY, H100, TWO, config

BY_MAP = {"GROUP_ROWS": True, "BLOCK_N": 64}
BY_ROWS = {**BY_MAP, "STORE": "rows", "KEY_SPLIT": 2}
IN_MEMORY = {**BY_MAP, "STORE": "rows", "KEY_SPLIT": 8, "BLOCKS_PER_SM": 1}
BY_CHUNKS = {**TWO, "GROUP_ROWS": True, "SCHEDULE": "claimed", "STORE": "chunks"}


def group_of(heads: int, seqlen_q: int, **rest) -> AttentionProblem:
    """Two K/V heads of so many query heads each."""
    given = {"head_dim": 64, "mask": "causal_lower_right", "lse": True, "layout": "bshd"} | rest
    return AttentionProblem(1, 2 * heads, 2, seqlen_q, 150, **given)


MERGED = group_of(5, 5, sink=True, head_dim=128).with_(seqlen_k=900)
"""Of which eight blocks merge their results in memory."""


APART = group_of(4, 5, head_dim=128).with_(seqlen_k=2500), {**IN_MEMORY, "KEY_SPLIT": 32}
"""A tile of rows of which 32 blocks have the keys: more than the interpreter runs at once, if it is not told to."""
OWNERS_LEAVE = "MOST_LOOKS = 4096", "MOST_LOOKS = 2"


class Apart(InterpreterBackend):
    """Does not run blocks at once because they wait for one another."""

    def run(self, compiled, launches, buffers):
        return super().run(compiled, tuple(replace(launch, together=1) for launch in launches), buffers)


APART_STEPS = 200_000
"""Instructions: seven times what it takes. One that waits forever ends there."""


def fault(
    p: AttentionProblem,
    genes: dict,
    sms: int = 132,
    edits: Iterable[tuple[str, str]] = (),
    backend: InterpreterBackend | None = None,
) -> str:
    """What the interpreter says of the kernel on a GPU of so many SMs, its source edited or not."""
    gpu, c = H100.with_limits({"sm_count": sms}), config(**genes)
    return judged(built(FAMILY, p, c, gpu, *((*edit, None) for edit in edits)), p, backend=backend).reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "genes", "sms"),
    [
        (group_of(4, 5), BY_MAP, 132),
        (group_of(5, 11), BY_ROWS, 132),
        (group_of(1, 70), BY_MAP, 132),
        (group_of(70, 2), BY_MAP, 132),
        (group_of(70, 2, mask="full"), BY_ROWS, 132),
        (group_of(3, 40, head_dim=72), BY_MAP, 132),
        pytest.param(group_of(6, 19, head_dim=136), BY_CHUNKS, 1, marks=pytest.mark.slow),
        pytest.param(group_of(5, 20).with_(seqlen_k=900), IN_MEMORY, 132, marks=pytest.mark.slow),
        pytest.param(MERGED, IN_MEMORY, 132, marks=pytest.mark.slow),
        pytest.param(
            group_of(4, 5, head_dim=128).with_(seqlen_k=2500),
            {**IN_MEMORY, "KEY_SPLIT": 32},
            132,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            group_of(3, 70, mask="full"),
            {**IN_MEMORY, "BLOCK_M": 128, "GROUP_ROWS": False},
            132,
            marks=pytest.mark.slow,
        ),
        (group_of(1, 70, head_dim=160), {**IN_MEMORY, "BLOCK_M": 128, "GROUP_ROWS": False, "KEY_SPLIT": 3}, 132),
        (group_of(1, 70, head_dim=256), {**IN_MEMORY, "BLOCK_M": 128, "GROUP_ROWS": False, "KEY_SPLIT": 2}, 132),
        (group_of(5, 11).with_(seqlen_k=400), {**IN_MEMORY, "KEY_SPLIT": 6}, 132),
        pytest.param(group_of(5, 11).with_(seqlen_k=800), {**IN_MEMORY, "KEY_SPLIT": 12}, 132, marks=pytest.mark.slow),
        (group_of(7, 20, mask="full"), {**BY_MAP, "SCHEDULE": "balanced"}, 1),
    ],
)
@pytest.mark.sampled(4)
def test_groups_of_any_size_are_right(p, genes, sms):
    assert fault(p, genes, sms) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("64 * i, head_in_group(first_row)", "64 * i, 0"),
        ("* work.heads + head_of(row)) * work.seqlen_q", "* work.heads + head_of(0)) * work.seqlen_q"),
        ("head(work.tile, lane_row(work.tile) + 8 * i)", "head(work.tile, lane_row(work.tile))"),
        ("work.rows.head(of, row + below)", "work.rows.head(of, row)"),
        ("return (end_row + (1 << bits) - 1) >> bits;", "return end_row >> bits;"),
    ],
)
@pytest.mark.sampled(3)
def test_a_wrong_one_is_found(old, new):
    p = group_of(70, 2, sink=True, alibi=True).with_(seqlen_k=130)
    assert fault(p, BY_MAP) == "" and fault(p, BY_MAP, edits=[(old, new)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("atom.acq_rel.gpu.global.add", "atom.acquire.gpu.global.add"),
        ("if (adds) *part_gmem = 0;", ""),
        ("    named_barrier_sync<128>(O_TILE + warpgroup);  // all threads of the warpgroup have left", "    //"),
        ("column_tile += SHARERS", "column_tile += KEY_SPLIT + 1"),
        ("exp2_approx(rows.x - state.shift[0]), high", "1.f, high"),
        ("if (!exists(of_sequence, row + below)) continue;", ""),
        (
            "i < AT_ONCE; ++i) {\n        const float4 rows = __ldcg(rows_gmem + i * stride),",
            "i < AT_ONCE - 1; ++i) {\n        const float4 rows = __ldcg(rows_gmem + i * stride),",
        ),
    ],
)
@pytest.mark.sampled(5)
def test_a_wrong_merge_in_memory_is_found(old, new):
    assert fault(MERGED, IN_MEMORY, edits=[(old, new)])


@pytest.mark.slow
def test_blocks_that_never_meet_add_up_all_the_same():
    """As beside launches that hold the SMs."""
    assert fault(*APART, edits=[OWNERS_LEAVE], backend=Apart(APART_STEPS)) == ""


@pytest.mark.slow
def test_an_owner_that_leaves_as_the_last_result_comes_adds_up():
    assert fault(MERGED, IN_MEMORY, edits=[("MOST_LOOKS = 4096", "MOST_LOOKS = 0")]) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if (acquire(part_gmem) == RESULTS) return true;", "return true;"),
        ("OWNER_LEFT + RESULTS - 1)", "RESULTS - 1)"),
        ("OWNER_LEFT) == RESULTS;", "OWNER_LEFT) <= ~0u;"),
        ("exchange_bits(part_gmem, OWNER_LEFT)", "exchange_bits(part_gmem, 0)"),
        ("31 - __clz(parts)", "work.split"),
        ("if (adds) *part_gmem = 0;", "if (adds && owns) *part_gmem = 0;"),
    ],
)
@pytest.mark.sampled(3)
def test_a_wrong_merge_by_blocks_that_never_meet_is_found(old, new):
    assert fault(*APART, edits=[OWNERS_LEAVE, (old, new)], backend=Apart(APART_STEPS))


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8, 33, 64, 65, 128])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_boxes_hold_64_rows_of_whole_queries_where_a_group_is_smaller(heads, layout):
    p = group_of(heads, 9, layout=layout)
    q, _, _, o = (a for a in FAMILY.launches(p, config(**BY_MAP), H100)[0].args if isinstance(a, TensorMap))
    for m in (q, o):
        assert math.prod(m.shape) == math.prod(p.shape(m.buffer)) and len(m.strides_bytes) == 4
        assert m.box[0] == 64 and m.box[1] * m.box[2] == 64 and m.box[3:] == (1, 1)
        assert m.box[1] >= min(heads, 64) > m.box[1] // 2
        assert m.strides_bytes[2] == heads * m.strides_bytes[0]


def test_blocks_that_merge_in_memory_are_as_many_as_run_at_once():
    p = AttentionProblem(1, 28, 4, 8, 32394, 128, mask="causal_lower_right")
    genes = {"BLOCK_N": 64, "GROUP_ROWS": True, "STORE": "rows", "BLOCKS_PER_SM": 1, "STAGES": 3, "KEY_SPLIT": 32}
    (launch,) = FAMILY.launches(p, config(**genes), H100)
    assert FAMILY.why_invalid(p, config(**genes), H100) is None
    assert (launch.grid, launch.cluster, launch.together) == ((32, 4, 1), (1, 1, 1), 32)
    scratch = FAMILY.workspace(p, config(**genes), H100)
    assert scratch == {"counters_zeroed": 4 * 4 * 16, "results": 4 * 32 * 128 * (64 + 4) * 4}
    assert "more blocks" in FAMILY.why_impossible(p.with_(batch=2), config(**genes), H100)
    assert "more blocks" in FAMILY.why_impossible(p, config(**genes), H100.with_limits({"sm_count": 127}))
    assert "STORE=rows" in FAMILY.why_invalid(p, config(**{**genes, "STORE": "tensor_map"}), H100)


def test_blocks_merge_in_memory_where_a_cluster_has_no_room():
    """40 tiles of 128 rows, which three blocks each spread over 120 of 132 SMs."""
    p = AttentionProblem(1, 20, 20, 256, 11546, 160, "bf16", "causal_lower_right")
    genes = {"BLOCK_M": 128, "BLOCK_N": 112, "BLOCKS_PER_SM": 1, "STAGES": 2, "STORE": "rows"}
    genes |= {"PRODUCER": "warpgroup", "Q_IN_REGISTERS": True}
    assert FAMILY.why_invalid(p, config(**genes, KEY_SPLIT=3), H100) is None
    (launch,) = FAMILY.launches(p, config(**genes, KEY_SPLIT=3), H100)
    assert (math.prod(launch.grid), launch.cluster, launch.together) == (120, (1, 1, 1), 3)
    (two,) = FAMILY.launches(p, config(**genes, KEY_SPLIT=2), H100)
    assert (two.cluster, two.together) == ((1, 1, 1), 2) and set(
        FAMILY.workspace(p, config(**genes, KEY_SPLIT=2), H100)
    )
    assert "STORE=rows" in FAMILY.why_invalid(p, config(**genes | {"STORE": "tensor_map"}, KEY_SPLIT=2), H100)
    (narrow,) = FAMILY.launches(p.with_(head_dim=64), config(**genes, KEY_SPLIT=2), H100)
    assert (narrow.cluster, narrow.together) == ((2, 1, 1), 1)


def test_rows_of_a_group_are_no_more_than_an_int32_counts():
    p = AttentionProblem(1, 4, 1, 700_000_000, 4096, 8)  # 2.8 billion rows, padded to tiles
    assert "than an int32 counts" in FAMILY.why_impossible(p, config(GROUP_ROWS=True), H100)
    assert FAMILY.why_impossible(p, config(GROUP_ROWS=False), H100) is None
    assert FAMILY.why_impossible(p.with_(seqlen_q=500_000_000), config(GROUP_ROWS=True), H100) is None


def test_one_block_takes_all_heads_of_a_group():
    p = AttentionProblem(8, 32, 8, 5, 12000, 128, mask="causal_lower_right")
    genes = {"BLOCK_N": 64, "KEY_SPLIT": 2, "BLOCKS_PER_SM": 1, "STAGES": 3, "STORE": "rows"}
    assert FAMILY.launches(p, config(**genes, GROUP_ROWS=True), H100)[0].grid == (2, 8, 8)
    assert FAMILY.launches(p, config(**genes), H100)[0].grid == (2, 32, 8)
