"""three_kernel: right on the interpreter with no race, wrong with a fault in it; what `why_invalid` promises, its
starting configs, scratch and launches."""

from __future__ import annotations

import random

import pytest

from evoattn.families.registry import load_space
from evoattn.families.three_kernel.family import ThreeKernel, score_stride
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.search.starting import starting_configs
from tests.families.on_interpreter import built, judged
from tests.support.source_edits import line_edit

FAMILY, L4, H100 = ThreeKernel(), GPUS["l4"], GPUS["h100"]
BASE = dict(
    PRODUCT="mma", BLOCK_M=32, BLOCK_N=64, BLOCK_K=32, WARPS_M=2, WARPS_N=1, S_TYPE="fp16", SOFTMAX="rewrite",
    P_PLACE="in_place", THREADS_PER_ROW=16, ROWS_PER_BLOCK=4, VECTOR_WIDTH=4, KEPT_VECTORS=2, PV_BLOCK_M=32,
    PV_BLOCK_K=32, PV_WARPS=2, PV_STAGES=2, HEAD_ORDER="forward", TILES_A_BLOCK=1, DEPENDENT_LAUNCH="none",
)  # fmt: skip
TILES = {"SOFTMAX": "tiles", "THREADS_PER_ROW": 1, "ROWS_PER_BLOCK": 32, "KEPT_VECTORS": 1, "HEAD_ORDER": "zigzag"}
TILES_ONLY = {"THREADS_PER_ROW": 1, "S_TYPE": "fp16", "P_PLACE": "in_place", "KEPT_VECTORS": 1, "VECTOR_WIDTH": 4}
LATE = TILES | {"SOFTMAX": "tiles_late"}
EARLY = {"DEPENDENT_LAUNCH": "early"}
WIDE = {"BLOCK_M": 128, "WARPS_M": 8}
WGMMA = TILES | {"PRODUCT": "wgmma", "BLOCK_M": 64, "WARPS_M": 4, "PV_BLOCK_M": 64, "PV_BLOCK_K": 64, "PV_WARPS": 4}


def problem(seqlen_q=1024, seqlen_k=1024, head_dim=64, heads=4, kv_heads=2, **rest) -> AttentionProblem:
    return AttentionProblem(1, heads, kv_heads, seqlen_q, seqlen_k, head_dim, **rest)


def config(**genes) -> KernelConfig:
    return load_space("three_kernel", H100).make_config(BASE | genes)


def kernel(p: AttentionProblem, c: KernelConfig, *edits, machine_code: bool = False):
    """Compiled for an H100 where only that runs it."""
    hopper = c["PRODUCT"] == "wgmma" or c["DEPENDENT_LAUNCH"] != "none"
    return built(FAMILY, p, c, H100 if hopper else L4, *edits, machine_code=machine_code)


RIGHT = [
    (problem(113, 203), {"SOFTMAX": "statistics"}, "large_logits"),
    (
        problem(50, 163, mask="causal_upper_left"),
        {"SOFTMAX": "statistics", "PV_BLOCK_M": 64, "THREADS_PER_ROW": 64},
        "rising_maximum",
    ),
    (
        problem(33, 127, 24, mask="causal_lower_right", layout="bshd"),
        {"PV_BLOCK_M": 16, "PV_WARPS": 1, "HEAD_ORDER": "zigzag"},
        "plain",
    ),
    (
        problem(127, 33, 72, dtype="bf16", mask="causal_lower_right"),
        {"S_TYPE": "bf16", "P_PLACE": "own"},
        "late_huge_key",
    ),
    (
        problem(64, 517, 32),
        {"S_TYPE": "fp32", "P_PLACE": "own", "THREADS_PER_ROW": 128, "KEPT_VECTORS": 1},
        "large_logits",
    ),
    (problem(3, 3, 16, mask="causal_upper_left"), {}, "equal_keys"),
    (problem(20, 70, 256, dtype="bf16"), {"PV_STAGES": 3, "WARPS_M": 1, "WARPS_N": 2, "BLOCK_K": 128}, "plain"),
    (problem(67, 203), TILES | {"WARPS_N": 2}, "large_logits"),
    (
        problem(50, 163, 24, dtype="bf16", mask="causal_upper_left"),
        LATE | {"BLOCK_N": 128, "PV_BLOCK_M": 64},
        "rising_maximum",
    ),
    (problem(127, 33, 72, mask="causal_lower_right", layout="bshd"), TILES, "late_huge_key"),
    (problem(70, 209), WGMMA, "large_logits"),
    (problem(113, 203, 72, dtype="bf16", mask="causal_lower_right"), WGMMA | LATE | {"BLOCK_N": 128}, "rising_maximum"),
    (problem(203, 113, 24, mask="causal_lower_right", layout="bshd"), WGMMA | LATE, "late_huge_key"),
    (problem(130, 70, 40, mask="causal_upper_left"), WGMMA | WIDE | {"PV_BLOCK_M": 128, "PV_WARPS": 8}, "equal_keys"),
    (problem(113, 517), WGMMA | LATE | {"TILES_A_BLOCK": 4}, "rising_maximum"),
    (
        problem(203, 333, 72, dtype="bf16", mask="causal_lower_right"),
        WGMMA | WIDE | {"TILES_A_BLOCK": 8},
        "large_logits",
    ),
    (problem(70, 130), WGMMA | {"SOFTMAX": "rewrite", "THREADS_PER_ROW": 16, "HEAD_ORDER": "forward"}, "plain"),
    (problem(113, 203), {"SOFTMAX": "statistics", "DEPENDENT_LAUNCH": "late"}, "large_logits"),
    (problem(50, 163, 24, dtype="bf16", mask="causal_upper_left"), LATE | EARLY, "rising_maximum"),
    (problem(70, 700, mask="causal_lower_right"), WGMMA | EARLY | {"TILES_A_BLOCK": 2, "PV_STAGES": 3}, "large_logits"),
    (problem(127, 33, 72, mask="causal_lower_right"), WGMMA | LATE | {"DEPENDENT_LAUNCH": "late"}, "late_huge_key"),
]


FAULTS = {
    "weak wait": ({}, "cp_async_wait<(FIRST_CHUNKS < CHUNKS)>();\n", "(FIRST_CHUNKS < CHUNKS)", "2"),
    "sums of tiles merged as they are": (TILES, "sum = fmaf(tiles[i].y,", "tiles[i].x - maximum", "0.f"),
    "an edge not masked": (TILES, "if (key_of(n, e) >= visible[half])", "visible[half]", "FLOATS"),
    "a sum of the wrong reference": (LATE, "sum[half] = fmaf(sum[half], factor,", "factor,", "1.f,"),
    "wgmma: S over rows not yet copied": (
        WGMMA | {"TILES_A_BLOCK": 4},
        "if (TILES_A_BLOCK > 1 && threadIdx.x % 128 == 0) tma",
        "tma_store_wait_read();",
        "",
    ),
    "wgmma: K of the wrong stage": (
        WGMMA | {"TILES_A_BLOCK": 4},
        "mbarrier_wait(k_barriers",
        "tile / K_STAGES % 2",
        "0",
    ),
    "wgmma: one thread waits for all": (
        WGMMA | LATE | EARLY,
        "wait_for_kernels_before();                       //",
        "wait_for",
        "if (threadIdx.x == 0) wait_for",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(3)
def test_an_injected_fault_is_found(fault):
    genes, line, old, new = FAULTS[fault]
    p, c = problem(113, 203), config(**{"THREADS_PER_ROW": 64} | genes)
    assert not judged(kernel(p, c, line_edit(line, old, new)), p).passed


@pytest.mark.slow
@pytest.mark.parametrize(
    "p",
    [
        problem(113, 203, heads=2),
        problem(203, 113, 72, heads=2, dtype="bf16", mask="causal_lower_right", layout="bshd"),
    ],
    ids=AttentionProblem.describe,
)
def test_random_launches_that_overlap_are_right(p):
    space = load_space("three_kernel", H100).restricted({"DEPENDENT_LAUNCH": ("early", "late")})
    # S in 16 bits by itself is as coarse as the rule allows (test_random_configs).
    draw, found = random.Random(4), []
    while len(found) < 3:
        genes = {parameter.name: draw.choice(parameter.values) for parameter in space.parameters}
        c = space.make_config(genes | (TILES_ONLY if draw.random() < 0.7 else {"S_TYPE": "fp32", "PRODUCT": "mma"}))
        if FAMILY.why_invalid(p, c, H100) is None:
            found.append(c)
    results = [(c.describe(), judged(kernel(p, c), p)) for c in found]
    assert not [(words, result.reason) for words, result in results if not result.passed]


REFUSED = [
    ({"BLOCK_M": 64, "WARPS_M": 8}, "BLOCK_M=64"),
    ({"PV_WARPS": 4}, "PV_BLOCK_M=32"),
    ({"WARPS_N": 4}, "groups of 32"),
    ({"THREADS_PER_ROW": 256, "ROWS_PER_BLOCK": 8}, "2048 threads"),
    ({"S_TYPE": "bf16"}, "8 bits"),
    ({"SOFTMAX": "statistics", "S_TYPE": "fp32"}, "16 bits"),
    ({"SOFTMAX": "statistics", "P_PLACE": "own"}, "to do nothing"),
    ({"S_TYPE": "fp32"}, "in_place"),
    ({"S_TYPE": "fp32", "P_PLACE": "own", "VECTOR_WIDTH": 8}, "16 bytes"),
    ({"BLOCK_K": 128}, "64 columns"),
    ({"THREADS_PER_ROW": 1, "ROWS_PER_BLOCK": 32}, "whole rows"),
    (TILES | {"S_TYPE": "fp32"}, "S_TYPE"),
    (TILES | {"P_PLACE": "own"}, "P_PLACE"),
    (TILES | {"PV_BLOCK_K": 128}, "64 keys"),
    (LATE | {"ROWS_PER_BLOCK": 128}, "ROWS_PER_BLOCK"),
    (WGMMA, "sm_90a"),
    ({"TILES_A_BLOCK": 2}, "PRODUCT=mma"),
    (EARLY, "DEPENDENT_LAUNCH=early needs griddepcontrol"),
    ({"THREADS_PER_ROW": 256, "ROWS_PER_BLOCK": 1, "KEPT_VECTORS": 4}, "KEPT_VECTORS=4"),
    ({"PV_BLOCK_M": 128, "PV_BLOCK_K": 128, "PV_STAGES": 4}, "196608"),
    ({"BLOCK_M": 256, "WARPS_M": 2, "BLOCK_N": 128}, "registers"),
]


REFUSED_OF = [
    (problem(dtype="fp32"), {}, "fp32"),
    (problem(head_dim=264), {}, "264"),
    (problem(8), {"PV_BLOCK_M": 32}, "8 queries"),
    (problem(1024, 32), {}, "32 keys"),
    (problem(1024, 60), {"PV_STAGES": 3}, "2 steps"),
    (problem(heads=65536), {}, "65535"),
    (problem(1024, 100), {"THREADS_PER_ROW": 64}, "half of the threads"),
    (problem(dtype="bf16"), {"S_TYPE": "bf16"}, None),
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


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "which"), [(32, 1), (64, 0), (64, 3), (128, 4), (256, 3)])
def test_starting_configs_compile_without_spills(head_dim, which):
    p = problem(head_dim=head_dim)
    c = starting_configs(load_space("three_kernel", L4), p, L4)[which]
    assert kernel(p, c, machine_code=True).compiled.info.spill_bytes == 0


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
