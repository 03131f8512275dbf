"""split_kv on sm_90: tiles of K and V by the tensor copy engine, a merge that begins early."""

import itertools

from evoattn.families.registry import load_space
from evoattn.families.split_kv.family import SplitKv
from evoattn.model.gpu import GPUS
from evoattn.model.launch import TensorMap
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

FAMILY, L4, H100 = SplitKv(), GPUS["l4"], GPUS["h100"]
SPACE = load_space("split_kv", H100)
BASE = dict(
    COMPUTE="mma", LOAD="tma", BLOCK_M=8, BLOCK_N=32, WARPS=2, STAGES=2, VECTOR_BYTES=16, DOT_LANES=4, SPLITS=3,
    MERGE="last_block", DEPENDENT_LAUNCH="none", BLOCKS_PER_SM=1,
)  # fmt: skip
EARLY = {"MERGE": "kernel", "DEPENDENT_LAUNCH": "early"}
FMA = {"COMPUTE": "fma", "BLOCK_M": 4, "DOT_LANES": 8}


def problem(seqlen_q=1, seqlen_k=239, head_dim=64, heads=8, kv_heads=2, batch=1, **rest) -> AttentionProblem:
    return AttentionProblem(batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, **rest)


def config(**genes) -> KernelConfig:
    return SPACE.make_config(BASE | genes)


def test_lanes_that_read_together_meet_different_banks():
    """Every group of eight lanes, of every piece of K and of V: 16-byte chunks of eight bank groups; of sixteen that
    read half a chunk each, all halves.

    As `swizzled_row` says."""

    def row(place: int) -> int:
        return place ^ place % 2 * 4

    def conflict_free(lanes: list[tuple[int, int]]) -> bool:
        return all(len({chunk ^ row(place) % 8 for place, chunk in lanes[i : i + 8]}) == 8 for i in range(0, 32, 8))

    k_mma = [(lane // 4, lane % 4) for lane in range(32)]
    v_mma = [[(lane % 4 * 2 + odd, lane // 4) for lane in range(32)] for odd in range(2)]
    halves = [[(lane // 4, lane % 4) for lane in range(32)], *v_mma]
    for lanes in ([(place, half // 2, half % 2) for place, half in of] for of in halves):
        for some in (lanes[:16], lanes[16:]):
            assert len({(chunk ^ row(place) % 8, half) for place, chunk, half in some}) == 16
    fma = [[(lane // lanes, lane % lanes % 8) for lane in range(32)] for lanes in (1, 2, 4, 8, 16, 32)]
    assert all(conflict_free(lanes) for lanes in itertools.chain([k_mma], v_mma, fma))
    assert sorted(map(row, range(8))) == list(range(8))


REFUSED_OF = [
    (problem(1, 4096), {}, "sm_90", L4),
    (problem(1, 4096), EARLY | {"LOAD": "cp_async"}, "griddepcontrol", L4),
]


def test_only_the_merge_overlaps():
    assert [launch.overlaps for launch in FAMILY.launches(problem(), config(**EARLY), H100)] == [False, True]
    assert [launch.overlaps for launch in FAMILY.launches(problem(1, 16), config(**EARLY), H100)] == [
        False
    ]  # nothing to merge
    assert not any(launch.overlaps for launch in FAMILY.launches(problem(), config(MERGE="kernel"), H100))


def test_maps_are_of_16_bit_columns():
    values = {p.name: p.values for p in load_space("split_kv", L4).parameters}
    assert "tma" not in values["LOAD"] and values["DEPENDENT_LAUNCH"] == ("none",)  # not offered where it cannot be
    k_map, v_map = FAMILY.launches(problem(dtype="fp32", head_dim=96), config(**FMA), H100)[0].args[1:3]
    assert isinstance(k_map, TensorMap) and (k_map.buffer, v_map.buffer) == ("k", "v")
    assert k_map.shape == (64, 239, 3, 2, 1) and k_map.box == (64, 16, 3, 1, 1)
