"""large_head_mma: every refusal explained, starting configs."""

import pytest

from evoattn.families.large_head_mma.family import LargeHeadMma
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import lookup
from evoattn.model.space import KernelConfig
from evoattn.search.starting import starting_configs

FAMILY, H100 = LargeHeadMma(), GPUS["h100"]
SPACE = load_space("large_head_mma", H100)
BASE = dict(
    BLOCK_M=32, BLOCK_N=64, DV_SPLIT=1, SCORES="recompute", ROW_WARPS=2, COLUMN_WARPS=2, DIM_CHUNK=64, KEY_CHUNK=32,
    STAGES=2, Q_PLACE="streamed", SMEM_LAYOUT="swizzled", RESCALE="always", BLOCK_ORDER="rows", BLOCKS_PER_SM=1,
)  # fmt: skip


def problem(seqlen_q=43, seqlen_k=131, head_dim=320, **others) -> AttentionProblem:
    return AttentionProblem(1, 2, 1, seqlen_q, seqlen_k, head_dim).with_(**others)


def config(**genes) -> KernelConfig:
    return SPACE.make_config(BASE | genes)


REFUSED_OF = [
    (problem(200, 200), {"BLOCK_M": 128, "ROW_WARPS": 8, "COLUMN_WARPS": 4}, ("over 16 warps",)),
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
