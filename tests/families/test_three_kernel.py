"""three_kernel: what `why_invalid` promises, its starting configs, scratch and launches."""

import pytest

from evoattn.families.registry import load_space
from evoattn.families.three_kernel.family import ThreeKernel, score_stride
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.search.starting import starting_configs
from tests.families.on_interpreter import built, configs, problem

FAMILY, L4, H100 = ThreeKernel(), GPUS["l4"], GPUS["h100"]
BASE = dict(
    PRODUCT="mma", BLOCK_M=32, BLOCK_N=64, BLOCK_K=32, WARPS_M=2, WARPS_N=1, S_TYPE="fp16", SOFTMAX="rewrite",
    P_PLACE="in_place", THREADS_PER_ROW=16, ROWS_PER_BLOCK=4, VECTOR_WIDTH=4, KEPT_VECTORS=2, PV_BLOCK_M=32,
    PV_BLOCK_K=32, PV_WARPS=2, PV_STAGES=2, HEAD_ORDER="forward", TILES_A_BLOCK=1, DEPENDENT_LAUNCH="none",
)  # fmt: skip
TILES = {"SOFTMAX": "tiles", "THREADS_PER_ROW": 1, "ROWS_PER_BLOCK": 32, "KEPT_VECTORS": 1, "HEAD_ORDER": "zigzag"}
LATE = TILES | {"SOFTMAX": "tiles_late"}
EARLY = {"DEPENDENT_LAUNCH": "early"}
WGMMA = TILES | {"PRODUCT": "wgmma", "BLOCK_M": 64, "WARPS_M": 4, "PV_BLOCK_M": 64, "PV_BLOCK_K": 64, "PV_WARPS": 4}


config = configs("three_kernel", H100, BASE)


def kernel(p: AttentionProblem, c: KernelConfig, *edits, machine_code: bool = False):
    """Compiled for an H100 where only that runs it."""
    hopper = c["PRODUCT"] == "wgmma" or c["DEPENDENT_LAUNCH"] != "none"
    return built(FAMILY, p, c, H100 if hopper else L4, *edits, machine_code=machine_code)


REFUSED = [
    (TILES | {"PV_BLOCK_K": 128}, "64 keys"),
    (LATE | {"ROWS_PER_BLOCK": 128}, "ROWS_PER_BLOCK"),
    (WGMMA, "sm_90a"),
    (EARLY, "DEPENDENT_LAUNCH=early needs griddepcontrol"),
]


REFUSED_OF = [
    (problem(heads=65536), {}, "65535"),
]
STARTING = [
    (problem(head_dim=head_dim), L4, which) for head_dim, which in ((32, 1), (64, 0), (64, 3), (128, 4), (256, 3))
]


def test_starting_configs_are_of_the_architecture():
    products = [
        {c["PRODUCT"] for c in starting_configs(load_space("three_kernel", gpu), problem(), gpu)} for gpu in (L4, H100)
    ]
    assert products == [{"mma"}, {"mma", "wgmma"}]
    configs = starting_configs(load_space("three_kernel", H100), problem(), H100)
    first = next(config for config in configs if config["PRODUCT"] == "wgmma")
    info = kernel(problem(), first, machine_code=True).compiled.info
    assert info.spill_bytes == 0 and not info.warnings


def test_scratch_holds_whole_chunks():
    p = problem(3, 13)
    assert score_stride(p) == 16
    assert FAMILY.workspace(p, config(), H100) == {"s": 4 * 3 * 16 * 2, "rows": 4 * 3 * 8}
    assert FAMILY.workspace(problem(3, 130), config(**TILES), H100) == {
        "s": 4 * 3 * 136 * 2,
        "tiles": 4 * 3 * 3 * 8,
        "rows": 4 * 3 * 8,
    }
    assert set(FAMILY.workspace(problem(3, 130), config(**LATE), H100)) == {"s", "tiles"}
    assert FAMILY.workspace(p, config(P_PLACE="own", S_TYPE="fp32"), H100) == {
        "s": 4 * 3 * 16 * 4,
        "p": 4 * 3 * 16 * 2,
        "rows": 4 * 3 * 8,
    }


@pytest.mark.parametrize("softmax", ("tiles", "tiles_late"))
def test_all_launches_but_the_first_may_begin_early(softmax):
    genes = LATE | {"SOFTMAX": softmax}

    def overlaps(when):
        return [n.overlaps for n in FAMILY.launches(problem(), config(**genes, DEPENDENT_LAUNCH=when), H100)]

    others = len(overlaps("none")) - 1
    assert others == {"tiles": 2, "tiles_late": 1}[softmax]
    assert (
        overlaps("none") == [False] * (others + 1)
        and overlaps("early") == overlaps("late") == [False] + [True] * others
    )
