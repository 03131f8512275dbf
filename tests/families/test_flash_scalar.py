"""flash_scalar: right for every architecture, every refusal explained."""

from functools import partial

import pytest

from evoattn.families.flash_scalar.family import FlashScalar
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from tests.families.on_interpreter import built, judged

FAMILY = FlashScalar()
L4 = GPUS["l4"]
SPACE = load_space("flash_scalar", L4)
NOTES = dict(
    BLOCK_M=32, BLOCK_N=64, THREADS_PER_ROW=4, ROWS_PER_THREAD=1, VECTOR_WIDTH=8, PADDING=8, KV_STAGES=1,
    Q_IN_REGISTERS=False, P_IN_SHARED=True, BLOCK_ORDER="tiles", BLOCKS_PER_SM=1, UNROLL=1,
)  # fmt: skip
SEED = AttentionProblem(1, 16, 16, 1024, 1024, 64)


def config(**changes):
    return SPACE.make_config(NOTES | changes)


problem = partial(AttentionProblem, 1)


def outcome(problem, config, kind="plain", gpu=L4):
    return judged(built(FAMILY, problem, config, gpu), problem, kind)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["a100", "a10", "h100"])
def test_right_for_every_architecture(gpu):
    result = outcome(problem(1, 1, 5, 67, 64), config(), gpu=GPUS[gpu])
    assert result.passed, result.reason


def test_head_dims_beyond_256_are_unsupported():
    assert FAMILY.why_unsupported(SEED.with_(head_dim=8), L4) and FAMILY.why_unsupported(SEED.with_(head_dim=264), L4)


def test_the_notes_kernel_comes_first():
    first = SPACE.starting_configs()[0]
    (launch,) = FAMILY.launches(SEED, first, L4)
    assert (first["BLOCK_M"], first["BLOCK_N"], launch.threads) == (32, 64, 128)
