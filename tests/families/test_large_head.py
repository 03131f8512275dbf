"""large_head: fp32 precision, every refusal explained, starting configs."""

import pytest

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.cases import make_case
from evoattn.correctness.validate import check
from evoattn.families.large_head.family import LargeHead
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import lookup
from evoattn.model.space import KernelConfig
from evoattn.search.starting import starting_configs
from tests.families.on_interpreter import built

FAMILY, L4, H100 = LargeHead(), GPUS["l4"], GPUS["h100"]
SPACE = load_space("large_head", H100)
BASE = dict(
    BLOCK_M=4, BLOCK_N=16, DIM_SPLIT=1, EXCHANGE="none", DEPENDENT_LAUNCH=False, MATH="fma", WARPS=4, LANES=32,
    SCORE_ROWS=2, SCORE_KEYS=4, VALUE_THREADS=64, Q_PLACE="shared", STAGES=1, UNROLL=1,
)  # fmt: skip
TENSOR = {"MATH": "tf32x3", "BLOCK_M": 16, "SCORE_ROWS": 16, "SCORE_KEYS": 8, "VALUE_THREADS": 128}
SPREAD = {
    "MATH": "tf32x3_spread",
    "BLOCK_M": 16,
    "SCORE_ROWS": 16,
    "SCORE_KEYS": 16,
    "VALUE_THREADS": 128,
    "Q_PLACE": "global",
}
SPLIT = {"DIM_SPLIT": 4, "EXCHANGE": "workspace", "LANES": 8, "VALUE_THREADS": 32}


def problem(seqlen_q=13, seqlen_k=37, head_dim=512, **others) -> AttentionProblem:
    return AttentionProblem(1, 4, 2, seqlen_q, seqlen_k, head_dim, "fp32").with_(**others)


def config(**genes) -> KernelConfig:
    return SPACE.make_config(BASE | genes)


@pytest.mark.slow
@pytest.mark.parametrize("genes", [SPLIT, TENSOR | {"DIM_SPLIT": 32, "EXCHANGE": "workspace"}], ids=["fma", "tf32x3"])
def test_fp32_keeps_one_part_in_a_hundred_thousand(genes):
    """The share of fp32's own error that the rule allows grows with the logits; plain ones leave 1e-5 of the largest
    output."""
    p = problem(4, 17, 8192)
    c = config(**genes)
    case = make_case("plain", p, 1, "cpu", double=True)
    largest = case.answer["o"].values.abs().max().item()
    assert check(InterpreterBackend(), built(FAMILY, p, c, L4), case).max_error <= 1e-6 * largest


REFUSED_OF = [
    (problem(), SPREAD | {"Q_PLACE": "shared"}, ("detour",)),
    (problem(4000, 4000, 8192), SPLIT | {"DIM_SPLIT": 64, "LANES": 32}, ("over 1073741824",)),
    (
        problem(1, 1 << 20, heads=1, kv_heads=1),
        SPLIT
        | {"BLOCK_M": 1, "SCORE_ROWS": 1, "BLOCK_N": 4, "WARPS": 2, "VALUE_THREADS": 64, "LANES": 32, "DIM_SPLIT": 1},
        ("grid y",),
    ),
]


def test_small_heads_and_too_many_are_unsupported():
    assert FAMILY.why_unsupported(problem(head_dim=24), L4) and FAMILY.why_unsupported(problem(head_dim=32), L4) is None
    assert "256 to 8192 in bf16" in FAMILY.why_unsupported(problem(head_dim=248, dtype="bf16"), L4)
    assert FAMILY.why_unsupported(problem(head_dim=256, dtype="bf16"), L4) is None
    assert "65536 times 2" in FAMILY.why_unsupported(AttentionProblem(65536, 2, 2, 1, 1, 256), L4)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_named_problems_have_starting_configs(gpu):
    for name in ("hdim512_fp32", "hdim2048_fp32", "hdim4096_fp32", "hdim8192_fp32"):
        assert len(starting_configs(SPACE, lookup(name), gpu)) >= 2, name


STARTING = [
    (lookup("hdim512_fp32"), H100, {"EXCHANGE": "none"}),
    (lookup("hdim2048_fp32"), H100, {"EXCHANGE": "cluster"}),
    (lookup("hdim2048_fp32"), H100, {"EXCHANGE": "workspace"}),
    (lookup("hdim8192_fp32"), H100, {"EXCHANGE": "workspace"}),
]
