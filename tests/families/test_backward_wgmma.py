"""backward_wgmma computes gradients by every order and place that its genes name, and a fault of it is found."""

import pytest

from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import load_space
from tests.families.on_interpreter import built, judged, small_faults

H100, FAMILY = GPUS["h100"], FAMILIES["backward_wgmma"]
START = load_space("backward_wgmma", H100).starting_configs()[0]
SHARED = {"P_PLACE": "shared", "DS_PLACE": "shared", "BLOCK_N": 64, "DIM_GROUPS": 2, "DQ_ROWS": "queries"}
THIRDS = SHARED | {"BLOCK_M": 96, "DIM_GROUPS": 3, "DQ_ROWS": "dims", "DS_STAGES": 1}
SHARES_DIMS = {"BLOCK_M": 48, "P_PLACE": "shared", "DS_PLACE": "shared", "DQ_ROWS": "dims"}
BESIDE = {"DQ_SUM": "warp", "ROW_WORK": "spare_warps"}
GENES = [
    ({"QUERY_SPLIT": 3, "ROTATE": True, "DQ_SUM": "bulk"}, "softcap=20"),
    (SHARED | {"ORDER": "dp_first"}, "window=20:9 softcap=20 bias=hs grads=bias"),
    (SHARED | {"QUERY_SPLIT": 2, "BLOCK_ORDER": "heads"}, "mask=causal_lower_right lse=1 alibi=1 varlen=0:200"),
    (
        BESIDE | {"STAGGER": True, "P_PLACE": "shared", "DS_PLACE": "shared"},
        "mask=causal lse=1 sink=1 grads=sinks score=s-0.02*(q-k)*(q-k)",
    ),
]
WAITS = [
    "mbarrier_wait(smem_address + Smem::DQ_EMPTY + 8 * warpgroup, DS_STAGES == 2 ? score_stage ^ 1 : dq_parity);",
    "mbarrier_wait(smem_address + Smem::DQ_FULL + 8 * i, parity);",
    "RowProgress::await(progress.begun(unit), SpareWarps::sharers(blocks) * ROW_WARPS);",
    "if (thread % 32 == 0) RowProgress::await(progress.added(unit - progress.lead), blocks * ADDERS);",
]


def faults(params, text, *edits, dims="D=128"):
    """What the cases that find most say of a kernel."""
    problem = parse_shape(f"B=1 H=2 Hkv=1 S=200 {dims} op=backward {text}")
    config = type(START)(START.family, START.params | params)
    assert FAMILY.why_impossible(problem, config, H100) is None
    return small_faults(built(FAMILY, problem, config, H100, *edits), problem, slice(6))


@pytest.mark.slow
@pytest.mark.parametrize("params, text", GENES)
def test_gradients_are_right(params, text):
    assert faults(params, text) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "params, text, dims",
    [({}, "mask=causal", "D=184 Dv=72"), (THIRDS, "window=20:9 lse=1", "D=192")],
)
def test_warpgroups_share_dimensions(params, text, dims):
    assert faults(SHARES_DIMS | params, text, dims=dims) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "params, text",
    [
        ({}, "varlen=0+5+40 B=3 H=2 S=40"),
        ({}, "varlen=40+20 B=2 H=2 S=40 score=s*0.9+0.3*b"),
        ({"ROW_WORK": "block"}, "B=2 H=2 Hkv=1 S=87 mask=causal lse=1"),
    ],
)
def test_sequences_may_be_short(params, text):
    problem, config = parse_shape(f"D=128 op=backward {text}"), type(START)(START.family, START.params | params)
    assert judged(built(FAMILY, problem, config, H100), problem).passed


@pytest.mark.slow
def test_a_part_that_is_left_out_is_found():
    assert faults({"QUERY_SPLIT": 3}, "", ("part = 1; part < PARTS", "part = 2; part < PARTS"))


def test_warpgroups_are_staggered_where_a_barrier_keeps_them_together():
    """Two arrivals at a barrier before the other warpgroup's first would end its phase."""
    problem, ahead = parse_shape("B=1 H=2 S=200 D=128 op=backward"), {"STAGGER": True, "ORDER": "softmax_first"}
    config = type(START)(START.family, START.params | {"DS_PLACE": "shared"} | ahead)
    assert "P_PLACE=shared" in (FAMILY.why_invalid(problem, config, H100) or "")


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS)
def test_a_missing_wait_is_found(wait):
    assert faults(BESIDE, "", (wait, ""))
