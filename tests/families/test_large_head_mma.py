"""large_head_mma: right on the interpreter, its synchronization needed, every refusal explained, starting configs that
compile."""

from __future__ import annotations

import math

import pytest

from evoattn.families.large_head_mma.family import LargeHeadMma
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import lookup
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.search.starting import starting_configs
from tests.families.on_interpreter import built, judged

FAMILY, L4, H100 = LargeHeadMma(), GPUS["l4"], GPUS["h100"]
SPACE = load_space("large_head_mma", H100)
BASE = dict(
    BLOCK_M=32, BLOCK_N=64, DV_SPLIT=1, SCORES="recompute", ROW_WARPS=2, COLUMN_WARPS=2, DIM_CHUNK=64, KEY_CHUNK=32,
    STAGES=2, Q_PLACE="streamed", SMEM_LAYOUT="swizzled", RESCALE="always", BLOCK_ORDER="rows", BLOCKS_PER_SM=1,
)  # fmt: skip


def problem(seqlen_q=43, seqlen_k=131, head_dim=320, **others) -> AttentionProblem:
    return AttentionProblem(1, 2, 1, seqlen_q, seqlen_k, head_dim).with_(**others)


def config(**genes) -> KernelConfig:
    return SPACE.make_config(BASE | genes)


def outcome(p: AttentionProblem, c: KernelConfig, kind: str = "plain", gpu=L4, edits=()):
    return judged(built(FAMILY, p, c, gpu, *edits), p, kind)


SHARED = {"Q_PLACE": "shared", "STAGES": 3, "DIM_CHUNK": 32, "KEY_CHUNK": 16}


RIGHT = [
    (problem(), SHARED, "large_logits"),
    (
        problem(50, 203, 264, mask="causal_upper_left", layout="bshd"),
        {"RESCALE": "lazy", "BLOCK_ORDER": "heads_reversed"},
        "rising_maximum",
    ),
    (
        problem(33, 5, 512, dtype="bf16", mask="causal_lower_right"),
        {"BLOCK_N": 32, "DV_SPLIT": 4},
        "plain",
    ),  # rows that see no key
    (
        problem(17, 113, 1024, heads=6, kv_heads=3),
        SHARED | {"BLOCK_M": 16, "ROW_WARPS": 1, "DV_SPLIT": 2, "RESCALE": "vote"},
        "late_huge_key",
    ),
    (
        problem(1, 70, 376, dtype="bf16"),
        {"BLOCK_M": 16, "ROW_WARPS": 1, "COLUMN_WARPS": 4, "SMEM_LAYOUT": "padded"},
        "equal_keys",
    ),
    (
        problem(64, 64, 1536, heads=1, kv_heads=1),
        {"BLOCK_M": 64, "ROW_WARPS": 4, "COLUMN_WARPS": 1, "BLOCK_N": 32, "DV_SPLIT": 8},
        "plain",
    ),
]


CLUSTER = {"DV_SPLIT": 2, "SCORES": "cluster"}


IN_CLUSTER = [
    (problem(50, 203, mask="causal_lower_right", layout="bshd"), SHARED | {"RESCALE": "lazy"}, "rising_maximum"),
    (problem(33, 5, 512, dtype="bf16", mask="causal_lower_right"), {"BLOCK_N": 32, "DV_SPLIT": 4}, "large_logits"),
]
RIGHT += [(p, CLUSTER | genes, kind) for p, genes, kind in IN_CLUSTER]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tile % 2 * PARTIALS_BYTES", "0"),
        ("if constexpr (IN_CLUSTER) cluster_wait_acquire();", "//"),
        ("if constexpr (IN_CLUSTER) cluster_arrive_release();", "//"),
    ],
)
def test_a_fault_injected_into_a_cluster_is_found(old, new):
    result = outcome(problem(head_dim=512), config(**CLUSTER), gpu=H100, edits=((old, new),))
    assert not result.passed and math.isnan(result.max_error), result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("genes", "old", "new"),
    [
        ({}, "__syncthreads();  // this chunk is visible", "//"),
        (SHARED, "__syncthreads();  // this chunk is visible", "//"),
        ({}, "if (block_row + row >= seqlen_q) continue;", ""),
        ({}, "if (V_CHUNKS * 8 != DV_SLICE && column >= DV_SLICE) continue;", ""),
        ({}, "row < valid_rows ? 16 : 0", "16"),
        ({}, "if (chunk >= valid_chunks) valid_rows = 0;", ""),
    ],
)
@pytest.mark.sampled(5)
def test_an_injected_fault_is_found(genes, old, new):
    result = outcome(problem(head_dim=264), config(**genes), edits=((old, new),))
    assert not result.passed and math.isnan(result.max_error), result  # stopped by a fault, not by a wrong answer


REFUSED_OF = [
    (problem(), {"BLOCK_M": 48}, ("BLOCK_M=48",)),
    (problem(), {"BLOCK_N": 16}, ("BLOCK_N=16",)),
    (problem(), {"BLOCK_N": 96, "KEY_CHUNK": 64}, ("KEY_CHUNK=64",)),
    (problem(head_dim=264), {"DV_SPLIT": 2}, ("DV_SPLIT=2", "264")),
    (problem(), CLUSTER, ("sm_89",)),
    (problem(), {"SCORES": "cluster"}, ("DV_SPLIT=1",)),
    (problem(200, 200), {"BLOCK_M": 128, "ROW_WARPS": 8, "COLUMN_WARPS": 4}, ("over 16 warps",)),
    (problem(head_dim=1024), {"BLOCK_M": 16, "ROW_WARPS": 1}, ("128 vectors", "64 threads")),
    (problem(head_dim=264), {"COLUMN_WARPS": 8, "BLOCK_N": 128}, ("COLUMN_WARPS=8", "384")),
    (problem(16), {}, ("16 queries",)),
    (problem(seqlen_k=32), {}, ("32 keys",)),
    (problem(seqlen_k=64), {"STAGES": 8}, ("7 chunks",)),
    (problem(seqlen_k=64), {"RESCALE": "vote"}, ("RESCALE",)),
    (problem(), {"BLOCK_ORDER": "heads_reversed"}, ("causal",)),
    (problem(20), {"BLOCK_ORDER": "heads"}, ("same order",)),
    (problem(200, 200, 1024), {"BLOCK_M": 64, "DV_SPLIT": 4, "Q_PLACE": "shared"}, ("131072 of them for Q", "101376")),
    (problem(200, 200), {"BLOCK_N": 192, "BLOCKS_PER_SM": 2}, ("BLOCKS_PER_SM=2", "102400")),
    (problem(), {"BLOCKS_PER_SM": 2}, ("the same code",)),
    (problem(200, 200, 512), {"BLOCK_M": 64}, ("registers",)),
    (problem(dtype="fp32"), {}, ("fp32",)),
    (problem(head_dim=256), {}, ("not 256",)),
    (problem(head_dim=2056), {}, ("not 2056",)),
]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
@pytest.mark.sampled(4)
def test_starting_configs(gpu):
    """Every GPU has some for each head_dim."""
    for head_dim in range(264, 1032, 8):
        assert starting_configs(SPACE, problem(4096, 4096, head_dim, mask="causal_upper_left"), gpu), head_dim
    for name in ("hdim320_fp16", "hdim512_fp16", "hdim1024_fp16"):
        assert starting_configs(SPACE, lookup(name), gpu)


STARTING = [
    (lookup("hdim320_fp16"), H100, 0),
    (lookup("hdim512_fp16"), H100, 0),
    (lookup("hdim1024_fp16"), H100, 2),
    (lookup("hdim1024_fp16"), H100, 7),
]


DRAWN_FOR = [
    (problem(1, 203, 264, dtype="bf16"), L4, {}),
    (problem(40, 127, 512, mask="causal_upper_left", layout="bshd"), L4, {}),
    (problem(77, 33, 640, dtype="bf16", mask="causal_lower_right"), L4, {}),
]
