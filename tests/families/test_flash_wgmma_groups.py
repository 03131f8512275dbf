"""flash_wgmma with the heads of a group as rows: its tensor maps and launches, and merges whose blocks never meet."""

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
IN_MEMORY = {**BY_MAP, "STORE": "rows", "KEY_SPLIT": 8, "BLOCKS_PER_SM": 1}


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
def test_blocks_that_never_meet_add_up_all_the_same():
    """As beside launches that hold the SMs."""
    assert fault(*APART, edits=[OWNERS_LEAVE], backend=Apart(APART_STEPS)) == ""


@pytest.mark.slow
def test_an_owner_that_leaves_as_the_last_result_comes_adds_up():
    assert fault(MERGED, IN_MEMORY, edits=[("MOST_LOOKS = 4096", "MOST_LOOKS = 0")]) == ""


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


PACKED = AttentionProblem(3, 8, 2, 70, 200, 64, mask="causal_lower_right", lse=True, layout="bshd").with_(
    varlen="1+70+3/200+70+130"
)
"""Of which a tile of 128 rows has two warpgroups with rows, or one."""
ROWS_128 = {**TWO, "GROUP_ROWS": True, "STORE": "rows"}
IN_TURNS = {**ROWS_128, "PING_PONG": True, "SCHEDULE": "claimed"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("genes", "sms"),
    [
        (ROWS_128, 132),
        ({**ROWS_128, "OVERLAP": False, "SCHEDULE": "fixed"}, 1),
        ({**IN_TURNS, "CAUSAL_SKIP": True, "Q_IN_REGISTERS": False}, 1),
        ({**IN_TURNS, "Q_IN_REGISTERS": True}, 2),
        ({**ROWS_128, "BLOCK_M": 192, "PING_PONG": True}, 132),
    ],
)
def test_warpgroups_behind_the_last_row_of_a_sequence_pass_its_keys(genes, sms):
    assert fault(PACKED, genes, sms) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if constexpr (PERSISTENT) release(barrier(Smem::Q_EMPTY, warpgroup));\n    const int last", "const int last"),
        ("release(barrier(Smem::K_EMPTY, ring.stage));\n      if (!OVERLAP", "if (!OVERLAP"),
        ("if (!OVERLAP || key_tile < last) wait_for_turn(), pass_turn();", ""),
        ("if (first_row(work.tile) >= work.rows.count) {", "if (first_row(work.tile) >= work.rows.count - 64) {"),
    ],
)
def test_a_wrong_pass_is_found(old, new):
    assert fault(PACKED, {**IN_TURNS, "Q_IN_REGISTERS": False}, 1, edits=[(old, new)])
