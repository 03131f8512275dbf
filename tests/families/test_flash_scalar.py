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


REFUSED_OF = [
    (SEED, dict(BLOCK_M=4, ROWS_PER_THREAD=8), "BLOCK_M=4 is no multiple of ROWS_PER_THREAD=8"),
    (SEED, dict(BLOCK_M=4), "makes 16 threads"),
    (SEED, dict(BLOCK_M=128, THREADS_PER_ROW=32), "makes 4096 threads"),
    (SEED, dict(BLOCK_N=16, THREADS_PER_ROW=32, BLOCK_M=8), "16 keys do not divide over THREADS_PER_ROW=32"),
    (SEED.with_(dtype="fp32"), {}, "VECTOR_WIDTH=8 of fp32 is 32 bytes"),
    (SEED, dict(PADDING=4), "PADDING=4 elements leaves rows unaligned for vectors of VECTOR_WIDTH=8"),
    (SEED.with_(head_dim=16), dict(THREADS_PER_ROW=32), "THREADS_PER_ROW=32 pads head_dim 16 to 32"),
    (SEED, dict(VECTOR_WIDTH=1, KV_STAGES=2), "KV_STAGES=2 needs cp.async"),
    (
        SEED.with_(heads=1, kv_heads=1, seqlen_q=16),
        dict(BLOCK_ORDER="heads"),
        "BLOCK_ORDER=heads changes nothing with 1 heads",
    ),
    (
        SEED.with_(seqlen_q=16),
        dict(BLOCK_ORDER="heads"),
        "BLOCK_ORDER=heads changes nothing with 16 heads and 1 query tiles",
    ),
    (
        SEED,
        dict(Q_IN_REGISTERS=True, P_IN_SHARED=False, THREADS_PER_ROW=2, UNROLL=4),
        "UNROLL=4 changes nothing over UNROLL=2",
    ),
    (SEED, dict(BLOCKS_PER_SM=2), "BLOCKS_PER_SM=2 changes nothing"),
    (SEED.with_(head_dim=256), dict(KV_STAGES=2), "a block of l4 has 101376"),
    (SEED.with_(head_dim=256), dict(BLOCK_M=64, BLOCK_N=32, BLOCKS_PER_SM=2), "do not fit one SM of l4"),
    (SEED, dict(BLOCK_N=128, THREADS_PER_ROW=2, UNROLL=4), "instruction cache"),
    (SEED, dict(BLOCK_M=128, ROWS_PER_THREAD=8), "registers per thread are needed"),
]


def test_head_dims_beyond_256_are_unsupported():
    assert FAMILY.why_unsupported(SEED.with_(head_dim=8), L4) and FAMILY.why_unsupported(SEED.with_(head_dim=264), L4)


def test_the_notes_kernel_comes_first():
    first = SPACE.starting_configs()[0]
    (launch,) = FAMILY.launches(SEED, first, L4)
    assert (first["BLOCK_M"], first["BLOCK_N"], launch.threads) == (32, 64, 128)
