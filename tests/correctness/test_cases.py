"""The interpreter's cases grow with the config, and keep what a family compiles for."""

import pytest

from evoattn.correctness.cases import interpreter_cases
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig


def cases(mask="full", **params):
    problem = AttentionProblem(2, 8, 2, 4096, 4096, 64, "fp16", mask, "bhsd")
    config = KernelConfig("family", {"BLOCK_M": 64, "BLOCK_N": 32} | params)
    return [small for _, small, _ in interpreter_cases(problem, config)]


@pytest.mark.parametrize("mask", ["full", "causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize("stages, splits", [(1, 1), (3, 1), (2, 3)])
def test_every_stage_of_each_split_is_used_again(mask, stages, splits):
    many = cases(mask, STAGES=stages, SPLITS=splits)[0]
    tiles = -(-many.seqlen_k // 32)
    assert tiles >= min((2 * stages + 2) * splits, 13) and many.seqlen_k % 32
    assert many.masking.queries_to_see_all(many.seqlen_k) <= many.seqlen_q


@pytest.mark.parametrize("block_m", [16, 64, 256])
def test_two_blocks_of_rows_whole_tiles_a_part_of_one_and_two_batches(block_m):
    many, grouped, whole, part = cases(BLOCK_M=block_m)
    assert grouped.batch == 2 and grouped.group_size == 2 and grouped.layout == "bshd" and grouped.seqlen_q >= 40
    assert whole.seqlen_k == 64 and whole.seqlen_q % block_m == 0 and whole.kv_heads == 2
    assert many.seqlen_k % 32 and part.seqlen_k < 32
    assert part.seqlen_q > block_m and part.seqlen_q % block_m


def test_rows_that_see_no_key():
    part = cases("causal_lower_right")[-1]
    assert part.masking.offset(part.seqlen_q, part.seqlen_k) < 0


def test_dtype_head_dim_and_mask_stay():
    assert {(c.dtype, c.head_dim, c.mask) for c in cases("causal_upper_left")} == {("fp16", 64, "causal_upper_left")}
