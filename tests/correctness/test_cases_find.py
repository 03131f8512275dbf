"""Faults that one case of the interpreter alone finds, planted in configs that have their place."""

import pytest

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.validate import check_small_cases
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from tests.support.compiles import ptx_kept
from tests.support.source_edits import replaced

pytestmark = pytest.mark.slow
H100 = GPUS["h100"]
PLAIN = AttentionProblem(1, 2, 1, 1024, 1024, 64)
CAUSAL, PAGED = PLAIN.with_(mask="causal_upper_left"), PLAIN.with_(seqlen_q=1, seqused="1:1024", page=16)
LATENT = AttentionProblem(1, 2, 1, 256, 256, 192, "bf16", "causal_upper_left", value_dim=128, shared_kv=True)
LAZY = "if (RESCALE == Rescale::LAZY) all_negative"
TESTED = "if constexpr (TESTED) all_negative"
BOUNDED = "fminf(fmaxf(x, -65504.f), 65504.f)"
EDGE = "min(seqlen_k, end_row + offset)"
HALF = {"S_TYPE": "fp16", "SOFTMAX": "rewrite", "P_PLACE": "own"}
RISES = "|| raise) raise_"
BALANCED = {"SCHEDULE": "balanced"}
GIVER = "of_keys.takes()) {\n        const int giver = ((blockIdx.y - 1) * gridDim.x + blockIdx.x)"
MEMBER = "tile) * gang + blockIdx.x;"
TRANSPOSED = 'asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans'
RELEASE = "release(barrier(Smem::V_EMPTY, before.stage));", ""
SPLIT = {"LOAD": "tma", "SPLITS": 16, "STAGES": 2, "BLOCK_N": 64, "MERGE": "last_block"}
GRADIENTS = PLAIN.with_(op="backward")
LARGER_PASS = {"BLOCK_M": 16, "BLOCK_N": 16, "PART": 16, "WARPS": 1, "QUERY_WARPS": 1, "STAGES": 1, "DQ_WARPS": 1}
LARGER_PASS |= {"DQ": "pass", "PASS_M": 64, "PASS_N": 64, "PASS_WARPS": 4, "PASS_STAGES": 1}
FAULTS = {
    "a lazy shift that rises for half of the rows": ("flash_mma", PLAIN, {"RESCALE": "lazy"}, LAZY, "e < 2"),
    "a lazy shift that rises for every other key": ("flash_mma", PLAIN, {"RESCALE": "lazy"}, LAZY, "n % 2 == 0"),
    "a lazy shift that rises for all but the last keys": (
        "flash_wgmma",
        PLAIN,
        {"RESCALE": "lazy_8"},
        TESTED,
        "i < FLOATS - 4",
    ),
    "a lazy shift that rises for the first head": (
        "flash_wgmma",
        PLAIN,
        {"RESCALE": "lazy_8"},
        "row_max<KEEP_NAN, false>(s, rise);",
        "rise[0] = rise[1] = -1.f; if (blockIdx.y == 0) row_max<KEEP_NAN, false>(s, rise);",
    ),
    "a lazy shift that rises for the first head under a mask": (
        "flash_wgmma",
        PLAIN.with_(mask="causal_lower_right"),
        {"RESCALE": "lazy_8"},
        "row_max<KEEP_NAN, false>(s, rise);",
        "rise[0] = rise[1] = -1.f; if (blockIdx.y == 0) row_max<KEEP_NAN, false>(s, rise);",
    ),
    "a lazy shift that rises for all but some of the last keys": (
        "flash_mma",
        PLAIN.with_(mask="causal_upper_left"),
        {"RESCALE": "lazy", "BLOCK_N": 128},
        LAZY,
        "(e < 3 || n < KEY_TILES - 1)",
    ),
    "eight rows that rise beside eight that do not": (
        "latent_wgmma",
        LATENT.with_(seqlen_q=1, mask="full"),
        {},
        "rescale = !LAZY || __any_sync(ALL_LANES, rescale);",
        "rescale = factor[0] != 1.f;",
    ),
    "rows that rise all together": (
        "large_head_mma",
        PLAIN.with_(head_dim=512),
        {"RESCALE": "lazy", "BLOCK_M": 16, "ROW_WARPS": 1},
        "grew |= scaled > before;",
        "grew |= scaled < before;",
    ),
    "a stage that is used again in one of many splits": (
        "split_kv",
        PLAIN.with_(batch=2, heads=8, kv_heads=2, seqlen_q=1, seqlen_k=4096),
        SPLIT,
        "copy_again(v_map, v_ring, v_full_smem, tile, at.stage);",
        "copy_again(v_map, v_ring, v_full_smem, tile + 1, at.stage);",
    ),
    "weights and answers that are cut": ("flash_mma", PLAIN, {}, "cvt.rn.f16x2.f32", "cvt.rz.f16x2.f32"),
    "the third tile of rows": (
        "three_kernel",
        PLAIN,
        {"PV_BLOCK_M": 64},
        TRANSPOSED,
        f"if (blockIdx.x < 2) {TRANSPOSED}",
    ),
    "another tile of rows of a launch whose tiles are larger": (
        "backward_mma",
        GRADIENTS,
        LARGER_PASS,
        "block_row = row_block * PASS_M",
        "block_row = min(row_block, 0) * PASS_M",
    ),
    "another tile of keys of such a launch": (
        "backward_mma",
        GRADIENTS,
        LARGER_PASS,
        "first_block_key + tile * PASS_N",
        "first_block_key",
    ),
    "one key is no key": ("flash_scalar", PLAIN, {}, "keys_end > 0 ?", "keys_end > 1 ?"),
    "a score past fp16": ("three_kernel", PLAIN, HALF, BOUNDED, "fmaxf(x, -65504.f)"),
    "a row of scores below fp16": ("three_kernel", PLAIN, HALF, BOUNDED, "fminf(x, 65504.f)"),
    "a tile that the last row alone sees": ("flash_wgmma", CAUSAL, {}, EDGE, "min(seqlen_k, end_row + offset - 1)"),
    "a page behind the table": ("flash_wgmma", PAGED, {}, "key < keys ? __ldg", "key <= keys ? __ldg"),
    "keys that end within a tile": ("flash_mma", PLAIN, {}, "if (n * 8 >= keys)", "if (n % 8 >= keys)"),
    "a factor of a split's second tile": (
        "latent_wgmma",
        LATENT.with_(seqlen_q=3),
        {"SPLITS": 4, "RESCALE": "always"},
        ": old_shift - state.shift[row]);",
        ": state.shift[row]);",
    ),
    "a result of another block of the gang": (
        "flash_wgmma",
        PLAIN.with_(heads=300),
        BALANCED,
        GIVER,
        GIVER.replace(" + blockIdx.x", ""),
    ),
    "a tile of another block of the gang": ("flash_wgmma", PLAIN.with_(heads=300), BALANCED, MEMBER, "tile) * gang;"),
    "a stage that is never given back": ("latent_wgmma", LATENT, {"OVERLAP": True}, *RELEASE),
    "a ring's second lap where blocks share keys under a mask": (
        "flash_wgmma",
        CAUSAL,
        {"KEY_SPLIT": 2, "BLOCK_M": 64, "BLOCK_N": 128, "STAGES": 2},
        "parity ^= 1",
        "parity ^= 0",
    ),
    "a maximum that rises in masked tiles alone": (
        "flash_mma",
        PLAIN,
        {"RESCALE": "always"},
        RISES,
        "&& raise) raise_",
    ),
    "a maximum that rises in masked tiles alone, in pages": (
        "flash_mma",
        PAGED.with_(seqlen_q=64),
        {"RESCALE": "vote"},
        RISES,
        "&& raise) raise_",
    ),
    "a lazy shift of small tiles, for three of four scores": (
        "flash_mma",
        PLAIN.with_(mask="causal_lower_right"),
        {"RESCALE": "lazy", "BLOCK_M": 32, "BLOCK_N": 16, "STAGES": 1, "WARPS": 1},
        "e < 4; ++e) s[m][n][e] -= rise",
        "e < 3; ++e) s[m][n][e] -= rise",
    ),
}
WIDE = PLAIN.with_(head_dim=512)
HIDDEN = {
    "flash_scalar": ({}, ">= row_keys_end) score[i][j] = NEGATIVE_INFINITY"),
    "flash_mma": ({}, "if (n * 8 >= keys) s[m][n][2 * half] = NEGATIVE_INFINITY"),
    "large_head_mma": ({}, "if (n * 8 >= keys) s[m][n][2 * half] = NEGATIVE_INFINITY"),
    "latent_wgmma": ({}, "high_keys : low_keys)) s[i] = NEGATIVE_INFINITY"),
    "flash_wgmma": ({}, "high_keys : low_keys)) s[i] = NEGATIVE_INFINITY"),
    "flash_wmma": ({}, "if (key >= keys) s[i].x = NEGATIVE_INFINITY"),
    "large_head": ({}, "scores_smem[row * SCORE_STRIDE + key] : NEGATIVE_INFINITY"),
    "three_kernel": (HALF, "if (key + e >= keys) s[e] = NEGATIVE_INFINITY"),
    "split_kv": ({"COMPUTE": "fma"}, "key >= limit(r)) s[r][j] = NEGATIVE_INFINITY"),
}
"""By family genes, and where the score of a hidden key becomes minus infinity."""


def first_config(family, problem, genes):
    """Of the starting configs with these genes, the first that serves the problem."""
    space = load_space(family, H100)
    made = (space.make_config({**config.params, **genes}) for config in space.starting_configs())
    return next(config for config in made if not FAMILIES[family].why_invalid(problem, config, H100))


def outcome(family, problem, config, source):
    kernel = ptx_kept(source, H100.arch)
    return check_small_cases(InterpreterBackend(), BuiltKernel(FAMILIES[family], config, H100, kernel), problem, 0)[-1]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(2, edits=True)
def test_it_is_found(fault):
    family, problem, genes, old, new = FAULTS[fault]
    if old in (LAZY, TESTED):
        new = old.replace(") all", f" && {new}) all").replace("if constexpr", "if")
    config = first_config(family, problem, genes)
    source = render(FAMILIES[family], problem, config, H100).source
    assert not outcome(family, problem, config, replaced(source, old, new)).passed


@pytest.mark.parametrize(
    ("family", "mask"), [(family, ("full", "causal_lower_right")[i % 2]) for i, family in enumerate(HIDDEN)]
)
@pytest.mark.sampled(2, edits=True)
def test_a_finite_score_of_hidden_keys_is_found(family, mask):
    problem = {"large_head": WIDE, "large_head_mma": WIDE, "latent_wgmma": LATENT}.get(family, PLAIN).with_(mask=mask)
    genes, place = HIDDEN[family]
    config = first_config(family, problem, genes)
    source = render(FAMILIES[family], problem, config, H100).source
    edited = replaced(source, place, place.replace("NEGATIVE_INFINITY", "-3e4f"))
    assert not outcome(family, problem, config, edited).passed
