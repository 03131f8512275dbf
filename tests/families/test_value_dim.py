"""A head_dim of V of its own, and a V within K, in the families that serve them: right on the interpreter's cases, and
wrong where tiles of V or O are taken for those of K or Q."""

import pytest

from tests.families.test_variants import PLAIN, STRUCTURES, faults

PROBLEMS = {
    "V narrower than K, sink": PLAIN.with_(head_dim=96, value_dim=64, mask="causal_upper_left", sink=True),
    "V wider than K": PLAIN.with_(head_dim=32, value_dim=88, mask="causal_lower_right", dtype="fp16"),
    "V within K": PLAIN.with_(head_dim=96, value_dim=64, shared_kv=True),
}
FAMILIES = ("flash_wgmma", "flash_mma")
ALL = [
    pytest.param(family, structure, problem, id=f"{family}: {structure}: {problem}")
    for family in FAMILIES
    for structure in STRUCTURES[family][1]
    for problem in PROBLEMS
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "structure", "problem"), ALL)
def test_it_is_right(family, structure, problem):
    assert faults(family, structure, PROBLEMS[problem]) == []


WRONG = {
    "tiles of V as far apart as those of K, wgmma": (
        ("flash_wgmma", "persistent, rows begin ahead", "V narrower than K, sink"),
        ("v_descriptor + descriptor_step(Smem::V_TILE_BYTES)", "v_descriptor + descriptor_step(Smem::K_TILE_BYTES)"),
    ),
    "O where the next warpgroup's Q lies": (
        ("flash_wgmma", "a warpgroup passes over tiles", "V wider than K"),
        ("warpgroup * Smem::Q_PLACE_BYTES,", "warpgroup * TensorTile<HEAD_DIM>::bytes(64),"),
    ),
    "O is stored over the columns of Q": (
        ("flash_wgmma", "scores again, a cluster", "V wider than K"),
        ("rows_to_global<VALUE_DIM>(smem", "rows_to_global<HEAD_DIM>(smem"),
    ),
    "tiles of V as far apart as those of K, mma": (
        ("flash_mma", "together", "V narrower than K, sink"),
        ("v_ring_smem + tile % V_STAGES * V_TILE_BYTES", "v_ring_smem + tile % V_STAGES * K_TILE_BYTES"),
    ),
    "O over rows of Q that another warp reads": (
        ("flash_mma", "O where Q was", "V wider than K"),
        ("QPlace::DIRECT || HEAD_DIM != VALUE_DIM)", "QPlace::DIRECT)"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_one_is_found(fault):
    (family, structure, problem), edit = WRONG[fault]
    assert faults(family, structure, PROBLEMS[problem], (edit,))
