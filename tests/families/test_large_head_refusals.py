"""large_head: every refusal explained, and starting configs that are valid and compile."""

from __future__ import annotations

import pytest

from evoattn.backends.compiler import compile_source
from evoattn.families.large_head.genes import LargeHeadGenes
from evoattn.families.large_head.resources import smem_bytes
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import lookup
from evoattn.model.problem import AttentionProblem
from evoattn.search.starting import starting_configs
from tests.families.test_large_head import FAMILY, H100, L4, SPACE, SPLIT, SPREAD, TENSOR, config, problem

LARGEST = AttentionProblem(1, 4, 4, 64, 64, 8192, "fp32")
CACHE = {"BLOCK_M": 32, "SCORE_ROWS": 4, "WARPS": 16, "VALUE_THREADS": 512, "STAGES": 0}


@pytest.mark.parametrize(
    ("p", "genes", "words"),
    [
        (LARGEST, CACHE, ("1048576", "BLOCK_M=32 rows of Q")),  # a cache of many queries
        (
            LARGEST,
            {"Q_PLACE": "global", "STAGES": 2, "VALUE_THREADS": 128},
            ("2097440", "STAGES=2"),
        ),  # double buffering
        (problem(), {"DIM_SPLIT": 5, "EXCHANGE": "workspace"}, ("DIM_SPLIT=5", "512")),
        (problem(), {"DIM_SPLIT": 4}, ("EXCHANGE=none",)),
        (problem(), {"EXCHANGE": "cluster"}, ("DIM_SPLIT=1",)),
        (problem(), {"DIM_SPLIT": 4, "EXCHANGE": "cluster"}, ("sm_89",)),
        (problem(), SPLIT | {"DEPENDENT_LAUNCH": True}, ("DEPENDENT_LAUNCH", "sm_89")),
        (problem(), {"DEPENDENT_LAUNCH": True}, ("DEPENDENT_LAUNCH", "EXCHANGE=none")),
        (problem(), SPREAD | {"SCORE_KEYS": 8, "WARPS": 2}, ("WARPS=2", "16 by 8")),
        (problem(), SPREAD | {"Q_PLACE": "shared"}, ("detour",)),
        (problem(head_dim=1056), SPREAD | {"VALUE_THREADS": 128}, ("slice of 1056",)),
        (problem(), {"SCORE_KEYS": 16}, ("SCORE_KEYS=16 are for MATH=tf32x3",)),
        (problem(dtype="bf16"), TENSOR, ("bf16 needs but one",)),
        (problem(), TENSOR | {"LANES": 16}, ("LANES=16",)),
        (problem(), TENSOR | {"VALUE_THREADS": 64}, ("leave it 8",)),
        (problem(head_dim=320), TENSOR, ("slice of 320",)),
        (problem(), {"SCORE_ROWS": 8}, ("SCORE_ROWS=8",)),
        (problem(), {"LANES": 8, "SCORE_KEYS": 8, "BLOCK_N": 8}, ("2 score tiles",)),
        (problem(), {"DIM_SPLIT": 32, "EXCHANGE": "workspace"}, ("LANES=32", "4 vectors")),
        (problem(), {"BLOCK_M": 1, "SCORE_ROWS": 1}, ("do not divide over 128 threads",)),
        (problem(head_dim=256), {"VALUE_THREADS": 128}, ("idle",)),
        (problem(4000, 4000, 8192), SPLIT | {"DIM_SPLIT": 64, "LANES": 32}, ("over 1073741824",)),
        (
            problem(1, 1 << 20, heads=1, kv_heads=1),
            SPLIT
            | {
                "BLOCK_M": 1,
                "SCORE_ROWS": 1,
                "BLOCK_N": 4,
                "WARPS": 2,
                "VALUE_THREADS": 64,
                "LANES": 32,
                "DIM_SPLIT": 1,
            },
            ("grid y",),
        ),
        (
            problem(64, 64),
            {"BLOCK_M": 64, "SCORE_ROWS": 8, "SCORE_KEYS": 8, "VALUE_THREADS": 32, "Q_PLACE": "global"},
            ("registers",),
        ),
        (problem(1, heads=2), {}, ("for 1 rows",)),
        (problem(seqlen_k=7), {}, ("for 7 keys",)),
        (problem(seqlen_k=16), {"STAGES": 2}, ("STAGES=2",)),
        (problem(), {"UNROLL": 8}, ("UNROLL=8 changes nothing",)),
    ],
)
def test_every_refusal_is_a_sentence_with_numbers(p, genes, words):
    reason = FAMILY.why_invalid(p, config(**genes), L4)
    assert reason is not None and reason.endswith(".") and all(word in reason for word in words), reason


def test_small_heads_and_too_many_are_unsupported():
    assert FAMILY.why_unsupported(problem(head_dim=24), L4) and FAMILY.why_unsupported(problem(head_dim=32), L4) is None
    assert "256 to 8192 in bf16" in FAMILY.why_unsupported(problem(head_dim=248, dtype="bf16"), L4)
    assert FAMILY.why_unsupported(problem(head_dim=256, dtype="bf16"), L4) is None
    assert "65536 times 2" in FAMILY.why_unsupported(AttentionProblem(65536, 2, 2, 1, 1, 256), L4)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_named_problems_have_starting_configs(gpu):
    for name in ("hdim512_fp32", "hdim2048_fp32", "hdim4096_fp32", "hdim8192_fp32"):
        assert len(starting_configs(SPACE, lookup(name), gpu)) >= 2, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "exchange"),
    [
        ("hdim512_fp32", "none"),
        ("hdim2048_fp32", "cluster"),
        ("hdim2048_fp32", "workspace"),
        ("hdim8192_fp32", "workspace"),
    ],
)
def test_the_first_of_each_exchange_compiles_without_spills(name, exchange):
    c = next(c for c in starting_configs(SPACE, lookup(name), H100) if c["EXCHANGE"] == exchange)
    kernel = compile_source(render(FAMILY, lookup(name), c, H100).source, H100.arch)
    assert kernel.info.spill_bytes == kernel.info.stack_bytes == kernel.info.static_smem_bytes == 0
    assert max(launch.smem_bytes for launch in FAMILY.launches(lookup(name), c, H100)) == max(
        smem_bytes(lookup(name), LargeHeadGenes.of(c))
    )
