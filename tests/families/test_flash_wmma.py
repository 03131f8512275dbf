"""flash_wmma: what `why_invalid` promises, and that the kernels that it lets through are right, with no race, on the
interpreter."""

from __future__ import annotations

import pytest

from evoattn.families.flash_wmma.family import FlashWmma
from evoattn.families.flash_wmma.resources import FlashWmmaGenes, smem_bytes, smem_parts
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from tests.families.on_interpreter import built, judged
from tests.support.source_edits import line_edit

FAMILY, L4 = FlashWmma(), GPUS["l4"]
BASE = dict(
    BLOCK_M=32, BLOCK_N=32, ROW_WARPS=2, COLUMN_WARPS=1, THREADS_PER_ROW=4, STAGES=1, COPY="async", PADDING_BYTES=16,
    Q_PLACE="shared", O_PLACE="fragments", BLOCKS_PER_SM=1,
)  # fmt: skip
SHARED = {"O_PLACE": "shared", "COLUMN_WARPS": 2}


def problem(seqlen_q=1024, seqlen_k=1024, head_dim=64, heads=4, kv_heads=2, **rest) -> AttentionProblem:
    return AttentionProblem(1, heads, kv_heads, seqlen_q, seqlen_k, head_dim, **rest)


def config(**genes) -> KernelConfig:
    return load_space("flash_wmma", L4).make_config(BASE | genes)


RIGHT = [
    (problem(113, 203), {}, "large_logits"),
    (problem(50, 163), SHARED, "rising_maximum"),
    (
        problem(33, 127, 24, mask="causal_lower_right", layout="bshd"),
        {**SHARED, "COPY": "registers", "PADDING_BYTES": 0},
        "plain",
    ),
    (
        problem(127, 33, 72, dtype="bf16", mask="causal_lower_right"),
        {"STAGES": 2, "Q_PLACE": "fragments"},
        "late_huge_key",
    ),
    (
        problem(60, 130, 64, mask="causal_upper_left"),
        {"BLOCK_M": 48, "ROW_WARPS": 3, "COLUMN_WARPS": 2},
        "rising_maximum",
    ),
    (
        problem(90, 65, 80),
        {"BLOCK_M": 80, "ROW_WARPS": 5, "COLUMN_WARPS": 3, "THREADS_PER_ROW": 16, "STAGES": 3},
        "late_huge_key",
    ),
    (problem(3, 3, 16, mask="causal_upper_left"), {}, "equal_keys"),
    (problem(20, 70, 256, dtype="bf16"), {"COLUMN_WARPS": 4, "BLOCK_N": 48, "THREADS_PER_ROW": 8}, "plain"),
]


FAULTS = {
    "missing barrier": ({}, "none still reads the last V, P, factors\n", "__syncthreads();", ""),
    "missing warp barrier": ({}, "whole rows of S are written\n", "rows_barrier();", ""),
    "P over unread scores": ({}, "all lanes have read their scores", "__syncwarp();", ""),
    "weak wait": ({"STAGES": 2}, "cp_async_wait<STAGES - 2>();\n", "STAGES - 2", "STAGES - 1"),
    "O not rescaled": ({}, "o_frag[m][i].x[e] *= factor;\n", "*= factor", "*= 1.f"),
    "rows out of bounds": ({}, "if (block_row + row >= seqlen_q) break;\n", "block_row + row >= seqlen_q", "false"),
}


def passes(genes: dict, *edits) -> bool:
    p, c = problem(113, 203), config(**genes)
    assert FAMILY.why_invalid(p, c, L4) is None
    return judged(built(FAMILY, p, c, L4, *edits), p, "rising_maximum").passed


@pytest.mark.slow
@pytest.mark.parametrize("stages", sorted({genes.get("STAGES", 1) for genes, *_ in FAULTS.values()}))
def test_what_the_faults_are_put_into_is_right(stages):
    assert passes({"STAGES": stages})


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_is_found(fault):
    genes, line, old, new = FAULTS[fault]
    assert not passes(genes, line_edit(line, old, new))


REFUSED = [
    ({"BLOCK_M": 48}, "3 tiles of 16"),
    ({"COLUMN_WARPS": 4, "BLOCK_M": 128, "ROW_WARPS": 8, "BLOCKS_PER_SM": 2}, "1536"),
    ({"BLOCK_N": 16, "THREADS_PER_ROW": 16}, "pairs"),
    ({"COPY": "registers", "STAGES": 2}, "overlaps nothing"),
    ({"BLOCK_M": 128, "ROW_WARPS": 1}, "registers"),
    ({"BLOCKS_PER_SM": 4, "BLOCK_N": 64}, "102400"),
    ({"BLOCK_M": 128, "BLOCK_N": 128, "ROW_WARPS": 8}, "row factors 512 + Q 18432 + K and V 36864 + S 67584"),
]


REFUSED_OF = [
    (problem(dtype="fp32"), {}, "fp32"),
    (problem(head_dim=264), {}, "264"),
    (problem(head_dim=8), {}, "not 8"),
    (problem(16, 1024), {}, "16 queries"),
    (problem(1024, 16), {}, "16 keys"),
    (problem(1024, 60), {"STAGES": 3}, "2 tiles"),
    (problem(head_dim=16), {"COLUMN_WARPS": 3}, "leaves warps"),
    (problem(1024, 17), {}, None),
]


def test_64_rows_fit_past_the_48_kib_of_static_shared_memory():
    """The L4 notes stopped at 32 rows: 64 with the output tile took 56.75 KB.

    Dynamic shared memory opens them, and 128 rows too.
    """
    p = problem()
    assert (
        48 * 1024
        < smem_bytes(p, FlashWmmaGenes.of(config(BLOCK_M=64, ROW_WARPS=4, BLOCK_N=64, **{**SHARED, "COLUMN_WARPS": 1})))
        < 99 * 1024
    )
    for genes in (
        {"BLOCK_M": 64, "ROW_WARPS": 4, "BLOCK_N": 64, "O_PLACE": "shared"},
        {"BLOCK_M": 128, "ROW_WARPS": 8, "BLOCK_N": 64},
    ):
        assert (
            smem_bytes(p, FlashWmmaGenes.of(config(**genes))) > 48 * 1024
            and FAMILY.why_invalid(p, config(**genes), L4) is None
        )
    assert sum(smem_parts(p, FlashWmmaGenes.of(config())).values()) == smem_bytes(p, FlashWmmaGenes.of(config()))


STARTING = [(problem(head_dim=head_dim), L4, which) for head_dim, which in ((64, 0), (64, 3), (128, 2), (256, 1))]
