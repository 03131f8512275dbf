"""split_kv: what `why_invalid` promises, splits, launches and shared memory."""

import pytest

from evoattn.families.registry import load_space
from evoattn.families.render import render
from evoattn.families.split_kv.family import SplitKv
from evoattn.families.split_kv.resources import SplitKvGenes, split_of
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import named_problems
from evoattn.search.starting import starting_configs
from tests.families.on_interpreter import built, configs

FAMILY, L4, H100 = SplitKv(), GPUS["l4"], GPUS["h100"]
BASE = dict(
    COMPUTE="mma", LOAD="registers", BLOCK_M=8, BLOCK_N=64, WARPS=2, STAGES=1, VECTOR_BYTES=16, DOT_LANES=4, SPLITS=3,
    MERGE="last_block", DEPENDENT_LAUNCH="none", BLOCKS_PER_SM=1,
)  # fmt: skip
FMA = {"COMPUTE": "fma", "BLOCK_M": 4, "BLOCK_N": 32, "DOT_LANES": 8}
RING = {"LOAD": "cp_async", "STAGES": 2}


def problem(seqlen_q=1, seqlen_k=1024, head_dim=64, heads=8, kv_heads=2, batch=1, **rest) -> AttentionProblem:
    return AttentionProblem(batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, **rest)


config = configs("split_kv", L4, BASE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which"), [("decode_b1_8k", 0), ("decode_b1_8k", 3), ("decode_mha_b1_16k", 0), ("seed_s512", 2)]
)
def test_starting_configs_compile_without_spills(name, which):
    p = named_problems()[name]
    config = starting_configs(load_space("split_kv", H100), p, H100)[which]
    kernel = built(FAMILY, p, config, H100, machine_code=True).compiled
    assert kernel.info.spill_bytes == 0 and ".v4.b32" in kernel.ptx


@pytest.mark.parametrize(
    ("seqlen_k", "splits", "expected"), [(8192, 16, (16, 512)), (799, 32, (25, 32)), (1, 64, (1, 16)), (17, 2, (2, 16))]
)
def test_no_split_is_empty(seqlen_k, splits, expected):
    p, c = problem(1, seqlen_k), config(SPLITS=splits)
    assert split_of(p, SplitKvGenes.of(c)) == expected
    assert FAMILY.launches(p, c, H100)[0].grid == (expected[0], 2, 1)


def test_a_cluster_has_a_block_for_each_split():
    p, c = problem(3, 100, kv_heads=1), config(MERGE="cluster", SPLITS=6, BLOCK_N=32, WARPS=1)
    (launch,) = FAMILY.launches(p, c, H100)
    assert (launch.grid, launch.cluster) == ((18, 1, 1), (6, 1, 1)) and "__cluster_dims__(6, 1, 1)" in render(
        FAMILY, p, c, H100
    ).source
    assert "at most 8" in FAMILY.why_invalid(problem(), config(MERGE="cluster", SPLITS=12), H100)


def test_one_split_needs_one_launch_and_no_scratch():
    p, c = problem(), config(SPLITS=1, MERGE="kernel")
    assert len(FAMILY.launches(p, c, H100)) == 1 and not FAMILY.workspace(p, c, H100)
    assert [n.kernel for n in FAMILY.launches(p, config(MERGE="kernel"), H100)] == ["split_kv", "split_kv_merge"]
