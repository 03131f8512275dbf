"""A key of NaN, or one whose score is infinite, makes the answers NaN that torch's formula makes NaN, and no others."""

import math

import pytest
import torch

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.cases import Case, make_case
from evoattn.correctness.eight_bits import dequantised
from evoattn.correctness.reference import exact_attention
from evoattn.correctness.validate import run_case
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import ROUNDED
from evoattn.model.space import KernelConfig
from tests.families.on_interpreter import built, judged

H100 = GPUS["h100"]
pytestmark = pytest.mark.slow
GENES = dict(
    BLOCK_M=64, BLOCK_N=64, STAGES=1, BLOCKS_PER_SM=1, PRODUCER="warp", OVERLAP=False, PING_PONG=False,
    RESCALE="always", KEY_SPLIT=1, SCHEDULE="single", TILE_ORDER="by_head", CAUSAL_SKIP=False, POLYNOMIAL_EIGHTHS=2,
    Q_IN_REGISTERS=False, STORE="rows", GROUP_ROWS=False,
)  # fmt: skip
POLYNOMIALS = ({}, {"RESCALE": "lazy_8"}, {"RESCALE": "lazy_8", "OVERLAP": True, "POLYNOMIAL_EIGHTHS": 3})
PROBLEM = AttentionProblem(1, 8, 8, 70, 150, 64, "bf16")
FIRST_KEYS = 3, 71
"""That are no numbers, of head 0: the next heads have the next keys, so that every column of four is met by either, in
the first tile and in one behind it."""


def with_keys(problem: AttentionProblem, first: int) -> Case:
    case = make_case("not numbers", problem, 3, "cpu")
    for head in range(problem.kv_heads):
        case.tensors["k"][0, head, first + head, 5] = math.nan if head < problem.kv_heads // 2 else math.inf
    if problem.op in ROUNDED:  # counts for no scale of the rows beside it
        case.tensors["q"][0, :, 9, 3] = -math.inf
        case.tensors["q"] *= 1000  # which no number of 8 bits is without a scale
    return case


def wrong(config: KernelConfig, problem: AttentionProblem) -> str:
    """What differs from the formula; empty if nothing does."""
    family = FAMILIES[config.family]
    kernel = built(family, problem, config, H100)
    for first in FIRST_KEYS:
        case = with_keys(problem, first)
        result, outputs = run_case(InterpreterBackend(), kernel, case)
        if outputs is None:
            return result.reason
        plain, tensors = dequantised(problem, case.tensors, torch.float64)
        exact = exact_attention(plain, *(tensors[name] for name in "qkv"), torch.float64)
        answer = outputs["o"].double()
        if not torch.equal(answer.isnan(), exact.isnan()):
            return f"{int(answer.isnan().sum())} outputs are NaN, not {int(exact.isnan().sum())}"
        near = 2e-2 if problem.element.bytes > 1 else 1e-1  # e4m3 has 4 digits
        if not torch.allclose(answer, exact, atol=near, rtol=near, equal_nan=True):
            return "a number differs"
    return ""


@pytest.mark.parametrize("mask", ["full", "causal_lower_right"])
@pytest.mark.parametrize("genes", POLYNOMIALS, ids=str)
@pytest.mark.sampled(3)
def test_exponentials_by_the_polynomial(genes, mask):
    config = load_space("flash_wgmma", H100).make_config(GENES | genes)
    problem = PROBLEM.with_(mask=mask)
    assert not FAMILIES["flash_wgmma"].why_impossible(problem, config, H100)
    assert wrong(config, problem) == ""


def test_rows_that_are_rounded_on_the_way():
    problem = PROBLEM.with_(dtype="e4m3", op="forward_of_bf16", mask="causal_upper_left", scale=1e-4)
    family, starting = FAMILIES["fp8_wgmma"], load_space("fp8_wgmma", H100).starting_configs()
    assert wrong(next(c for c in starting if not family.why_impossible(problem, c, H100)), problem) == ""


@pytest.mark.parametrize(
    "name", [n for n, f in FAMILIES.items() if (f.plain and "forward" in f.operations) or n == "fp8_wgmma"]
)
def test_a_starting_config_of_each_family(name):
    family, starting = FAMILIES[name], load_space(name, H100).starting_configs()
    problems = [
        PROBLEM.with_(seqlen_q=17, head_dim=dim, dtype=dtype) for dtype in family.dtypes for dim in (64, 320, 512)
    ]
    problem, config = next((p, c) for p in problems for c in starting if not family.why_impossible(p, c, H100))
    assert wrong(config, problem) == ""


@pytest.mark.parametrize("family", ["backward_mma", "backward_wgmma"])
def test_an_expression_that_is_no_number_behind_the_last_row(family):
    problem = AttentionProblem(1, 2, 1, 71, 40, 64, "fp16", op="backward", score="s/(71-q)")
    module, starting = FAMILIES[family], load_space(family, H100).starting_configs()
    config = next(c for c in starting if not module.why_impossible(problem, c, H100))
    fault = ("if (query >= seqlen_q) score = NEGATIVE_INFINITY;", "")
    passed = [judged(built(module, problem, config, H100, *e), problem).passed for e in ((), (fault,))]
    assert passed == [True, False]
