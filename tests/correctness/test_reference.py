"""The answer that everything is judged by, against torch's own attention in float64, and the judge against planted
errors. Strides past 2^31 without the memory for them: right kernels do not notice, an offset of 32 bits does."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from evoattn import ptx
from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness import reference
from evoattn.correctness.cases import make_case
from evoattn.correctness.interpreter_cases import FarProblem, can_be_far, far_places, interpreter_cases
from evoattn.correctness.judge import judge, judge_rounding
from evoattn.correctness.terms import torch_dtype
from evoattn.correctness.validate import check
from evoattn.families.built import BuiltKernel
from evoattn.families.flash_scalar.family import FlashScalar
from evoattn.families.registry import load_space
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.mask import MASKS
from evoattn.model.problem import AttentionProblem
from tests.support.compiles import ptx_kept


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlens", [(37, 53), (53, 37), (1, 9), (9, 1)])
def test_exact_attention_is_sdpa_in_float64(mask, seqlens):
    problem = AttentionProblem(2, 4, 2, *seqlens, 24, "fp16", mask, "bshd")
    tensors = reference.make_inputs(problem, 3, "cpu")
    q, k, v = (tensors[t].double() for t in "qkv")
    allowed = torch.ones(seqlens, dtype=torch.bool).tril(problem.causal_offset) if problem.causal else None
    expected = scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
    if allowed is not None:
        expected[:, :, ~allowed.any(-1)] = 0
    exact = reference.exact_attention(problem, *(tensors[t] for t in "qkv"), torch.float64)
    torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-12)


def test_chunks_change_nothing():
    problem = AttentionProblem(1, 4, 2, 50, 70, 16, mask="causal_lower_right")
    tensors = reference.make_inputs(problem, 0, "cpu")
    whole, in_chunks = (
        reference.exact_attention(problem, *(tensors[t] for t in "qkv"), torch.float64, scores)
        for scores in (1 << 20, 7 * 70)
    )
    torch.testing.assert_close(in_chunks, whole)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_huge_keys_reach_one_row_of_a_warp_alone(scale):
    problem = AttentionProblem(1, 1, 1, 40, 330, 64, "bf16", scale=scale)
    tensors = reference.make_inputs(problem, 0, "cpu", "huge_keys_within")
    scores = (tensors["q"].double() @ tensors["k"].double().mT)[0, 0] * problem.softmax_scale / math.log(2)
    highest = scores.max(1).values
    assert (highest[:16] > 10).sum() > 4  # octaves
    assert highest[16:32].topk(2).indices[0] == 5 and highest[21] > 250 and highest[16:32].topk(2).values[1] < 5
    assert scores[21].topk(7).values[1:] == pytest.approx([7.7, 7.7, 7.3, 4.7, 4.7, 4.3], abs=0.1)
    assert scores[21].topk(8).values[7].abs() < 0.1


def test_scores_past_fp16_are_those_of_eight_keys_by_turns():
    problem = AttentionProblem(1, 1, 1, 18, 40, 64, "fp16")
    tensors = reference.make_inputs(problem, 0, "cpu", "scores_past_fp16")
    scores = (tensors["q"].double() @ tensors["k"].double().mT)[0, 0] * problem.softmax_scale / math.log(2)
    high = scores[[*range(8), *range(9, 17)]]
    assert high.max(1).indices.tolist() == [38, 37, 36, 35, 34, 33, 32, 31] * 2
    assert (high.max(1).values > 65504).all() and (high.sort(1).values[:, -2] == 0).all()
    assert (scores[[8, 17]] < -65504).all() and (scores[8] == scores[8, 0]).all()


@pytest.mark.parametrize("row, order", [(45, 1), (61, -1)])
def test_one_key_of_each_tile_is_higher_than_all_before_or_behind_it(row, order):
    problem = AttentionProblem(1, 1, 1, 64, 8 * 48, 64, "bf16")
    tensors = reference.make_inputs(problem, 0, "cpu", "huge_keys_within", tile=48)
    scores = (tensors["q"].double() @ tensors["k"].double().mT)[0, 0] * problem.softmax_scale / math.log(2)
    highest = scores[row].reshape(8, 48).topk(2)
    rises = highest.values[:, 0].diff() * order
    assert (rises > 128).all() and (highest.values[:, 1].abs() < 0.1).all()  # octaves: the range of bf16
    assert {0, 1, 5} <= set((highest.indices[:, 0] // 8).tolist()) and set(highest.indices[:, 0].tolist()) & {
        *range(1, 48, 2)
    }
    others = scores[row // 16 * 16 : row // 16 * 16 + 16].max(1).values.sort().values
    assert others[-2] < 5  # of the same warp


@pytest.mark.parametrize("kind", reference.KINDS)
def test_inputs_are_finite_whatever_the_scale(kind):
    problem = AttentionProblem(1, 1, 1, 40, 330, 64, "fp16", scale=1e-6)
    assert all(tensor.isfinite().all() for tensor in reference.make_inputs(problem, 0, "cpu", kind).values())


def test_inputs_of_an_unknown_kind_are_refused():
    with pytest.raises(ValueError, match="'large logits' is none of plain, large_logits"):
        reference.make_inputs(AttentionProblem(1, 1, 1, 2, 2, 16), 0, "cpu", "large logits")


@pytest.mark.parametrize("kind", reference.KINDS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_rounding_passes_and_a_skipped_tile_does_not(dtype, kind):
    """An output rounded from the exact one is within the rule; one that leaves out 16 of 1024 keys is not."""
    problem = AttentionProblem(1, 2, 2, 33, 1024, 64, dtype)
    tensors = reference.make_inputs(problem, 5, "cpu", kind)
    answer = reference.make_answer(problem, tensors, double=True)
    rounded = answer["o"].values.to(torch_dtype(AttentionProblem(1, 1, 1, 1, 1, 8, dtype)))
    assert judge({"o": rounded}, answer)[0] == ""
    short = problem.with_(seqlen_k=1008)
    skipped = reference.exact_attention(
        short, tensors["q"], tensors["k"][:, :, :1008], tensors["v"][:, :, :1008], torch.float64
    )
    assert "error is" in judge({"o": skipped}, answer)[0]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_largest_output_may_be_one_unit_off_where_all_happen_to_be_representable(dtype):
    problem = AttentionProblem(1, 1, 1, 64, 17, 32, dtype)
    tensors = reference.make_inputs(problem, 3, "cpu")
    tensors["v"].fill_(3)
    answer, units = reference.make_answer(problem, tensors), torch.finfo(torch_dtype(problem)).eps * 2
    for off, right in ((1, True), (2, False)):
        o = torch.full(problem.shape("o"), 3.0)
        o[0, 0, 5, 7] += off * units
        assert (judge({"o": o.to(torch_dtype(problem))}, answer)[0] == "") == right


def test_answers_that_are_cut_are_told_from_rounded_ones():
    problem = AttentionProblem(1, 2, 1, 40, 67, 64, "bf16")
    exact = torch.randn(problem.shape("o"), generator=torch.Generator().manual_seed(0)).double()
    cut = (exact.float().view(torch.int32) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)
    assert not judge_rounding(exact.to(torch.bfloat16), exact)
    assert "too short on average" in judge_rounding(cut, exact)
    assert "too long on average" in judge_rounding((1.003 * exact).to(torch.bfloat16), exact)
    assert not judge_rounding(cut[:, :1, :39], exact[:, :1, :39]), "few rows"
    exact[:, 1] = 0
    assert "too short" in judge_rounding(torch.where(exact == 0, 0, cut), exact), "rows that see no key do not count"


def test_only_plain_inputs_of_16_bit_problems_are_judged_by_their_rounding():
    plain = AttentionProblem(1, 2, 1, 8, 16, 64, "bf16")
    assert make_case("", plain, 0, "cpu", double=True).answer["o"].rounds_evenly
    assert not make_case("", plain, 0, "cpu").answer["o"].rounds_evenly
    assert not make_case("", plain, 0, "cpu", "rising_maximum", double=True).answer["o"].rounds_evenly
    eight = plain.with_(dtype="e4m3", scales="head")
    assert make_case("", eight, 0, "cpu", double=True).answer["o"].rounds_evenly
    for other in (plain.with_(dtype="fp32"), plain.with_(softcap=20.0), eight.with_(op="forward_in_fp16")):
        assert not make_case("", other, 0, "cpu", double=True).answer["o"].rounds_evenly


def test_large_scores_of_fp32_problems_are_allowed_their_own_rounding():
    """A kernel's fp32 scores of 10,000 are 5e-4 off as soon as they are rounded, and its weights with them."""
    problem = AttentionProblem(1, 2, 1, 40, 67, 256, "fp32")
    for kind, most in (("plain", 2e-6), ("large_logits_late_key", 1e-2)):
        tensors = reference.make_inputs(problem, 3, "cpu", kind)
        answer = reference.make_answer(problem, tensors)
        largest = reference.largest_score(problem, tensors)
        rounding = (2 + 16 / 3) * 2.0**-24 * largest * answer["o"].values.abs().max().item()
        assert (
            rounding < 4 * most
            and rounding < answer["o"].allowed_error < rounding + 4e-5 * answer["o"].values.abs().max().item()
        )


def test_a_row_without_an_answer_leaves_the_largest_score_of_the_others():
    problem = AttentionProblem(1, 2, 2, 5, 7, 64, "fp16", "full")
    tensors = reference.make_inputs(problem, 3, "cpu")
    tensors["q"][0, 0, 2] = 0
    largest = reference.largest_score(problem, tensors)
    tensors["q"][0, 0, 2, -1] = math.inf
    assert reference.largest_score(problem, tensors) == largest > 0


def test_low_scores_with_terms_are_allowed_their_rounding_on_the_interpreter():
    """Slopes added to -40,000 in fp32 leave weights that are 0.1 % off."""
    problem, rest = AttentionProblem(1, 1, 1, 40, 51, 64, "fp16"), {"alibi": True}
    for one, factor in ((problem, 0.0), (problem.with_(**rest), 2 * 2.0**-24 * 4e4)):
        tensors = reference.make_inputs(one, 3, "cpu", "low_equal_scores")
        least, allowed = (reference.make_answer(one, tensors, double)["o"].allowed_rms for double in (False, True))
        assert allowed - least == pytest.approx(
            factor * reference.rms(reference.make_answer(one, tensors)["o"].values), abs=3e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 1024])
def test_fp32_scores_may_be_sums_of_products_one_after_another(head_dim):
    """Such a sum of 1,024 leaves errors that one rounding of a score would not: 1.6e-4 with logits of 130. Keys
    that are the last bit of a 16-bit float off are still found."""
    problem = AttentionProblem(1, 1, 1, 130, 513, head_dim, "fp32")
    tensors = reference.make_inputs(problem, 2, "cpu", "large_logits")
    q, k, v = (tensors[name][0, 0] for name in "qkv")
    answer = reference.make_answer(problem, tensors)

    def output(k: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = torch.zeros(130, 513)
        for d in range(head_dim):
            scores = scores + q[:, d : d + 1] * k[:, d]
        return {"o": (torch.softmax(scores * problem.softmax_scale, -1) @ v)[None, None]}

    assert judge(output(k), answer)[0] == ""
    assert judge(output(k.half().float()), answer)[0]


def test_scores_that_are_kept_in_16_bits_are_allowed_their_rounding():
    """Two keys decide row 21, of which torch's formula in fp16 rounds the scores to numbers that happen to be near."""
    problem = AttentionProblem(1, 1, 1, 40, 641, 16, "fp16", "causal_lower_right")
    tensors = reference.make_inputs(problem, 6, "cpu")
    plain = reference.make_answer(problem, tensors, double=True)
    answer = reference.with_kept_scores(plain, problem, tensors, "float16")
    octaves = (tensors["q"].float() @ tensors["k"].float().mT * (0.25 * math.log2(math.e))).half().float()
    octaves.masked_fill_(torch.ones(40, 641).triu(602).bool(), -math.inf)

    def output(scores):
        weights = torch.exp2(scores - scores.amax(-1, keepdim=True))
        return {"o": (weights.half().float() @ tensors["v"].float() / weights.sum(-1, keepdim=True)).half()}

    assert "largest error" in judge(output(octaves), plain)[0] and not judge(output(octaves), answer)[0]
    octaves[..., 577:609] = -math.inf
    assert judge(output(octaves), answer)[0], "32 keys of 641 are left out"


def test_rows_with_one_answer_are_no_sample_of_roundings():
    problem = AttentionProblem(1, 1, 1, 40, 99, 32, "fp16")
    for seed in range(60):
        case = make_case("low", problem, seed, "cpu", "low_equal_scores", double=True)
        exact = case.answer["o"].values
        off = 2.0**-11 * exact  # a weight of all keys that is rounded by as much as one can be
        for one in (exact - off, exact + off):
            assert judge({"o": one.half()}, case.answer)[0] == "", seed
        assert judge({"o": (exact - 3 * off).half()}, case.answer)[0], seed
    row = torch.randn(64, generator=torch.Generator().manual_seed(5)).double()
    cut = (row.float().view(torch.int32) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)
    assert not judge_rounding(cut.expand(1, 1, 80, 64), row.expand(1, 1, 80, 64))


COPY = """
extern "C" __global__ void copy(const int4* x, int4* out, TYPE stride) {
  out[threadIdx.x] = x[threadIdx.x * stride];
}"""


@pytest.mark.parametrize("kind, right", [("long long", True), ("int", False)])
def test_an_offset_of_32_bits_lands_elsewhere(kind, right):
    """Eight rows of 16 bytes, 3 · 2^32 bytes apart: their index times the stride passes 32 bits."""
    program = ptx_kept(COPY.replace("TYPE", kind), "sm_80").ptx
    x, out, stride = np.arange(32, dtype=np.int32), np.zeros(32, np.int32), (3 << 28) + 1
    number = np.int64(stride) if right else np.int32(stride)
    far = {"x": np.arange(8, dtype=np.uint16) * 3}
    faults = ptx.run_launch(program, "copy", 1, 8, ["x", "out", number], {"x": x, "out": out}, far=far).faults
    assert (not faults and np.array_equal(out, x)) if right else "32 bits has lost" in faults[0]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_strides_and_places_agree(layout):
    """The address of each row by its far strides is that of its compact place, and as many spans as are noted there."""
    problem = AttentionProblem(2, 4, 2, 5, 7, 24, "bf16", layout=layout)
    strides, places = FarProblem(2, 4, 2, 5, 7, 24, "bf16", layout=layout).strides, far_places(problem)
    for tensor in "qkvo":
        batch, heads, rows, _ = problem.shape(tensor)
        for index in np.ndindex(batch, heads, rows):
            near, far = (sum(i * s * 2 for i, s in zip(index, of(tensor)[:3])) for of in (problem.strides, strides))
            apart = (7, 5, 2) if tensor in "vo" else (5, 3, 1)
            spans = sum(i * of_one for i, of_one in zip(index, apart))
            assert far - near == int(places[tensor][near // 16]) << 32 == spans << 32
    assert can_be_far(problem) and not can_be_far(problem.with_(head_dim=4))


@pytest.mark.parametrize("batch, keys, far", [(1, 300, True), (2, 250, True), (2, 300, False)])
def test_keys_in_use_are_far_where_tensor_maps_have_such_strides(batch, keys, far):
    """Batches of keys in use are whole rows apart, 2^32 bytes each, and a tensor map's strides are below 2^40 bytes."""
    problem = AttentionProblem(batch, 2, 1, 5, keys, 64, "fp16", seqused="0:500")
    assert can_be_far(problem) == far
    strides = FarProblem(batch, 2, 1, 5, keys, 64, "fp16", seqused="0:500").strides
    assert all((max(strides(tensor)) * 2 < 1 << 40) == far for tensor in "kv")


@pytest.mark.parametrize("bias, heads, batches", [("s", 0, 0), ("hs", 3, 0), ("bs", 0, 5), ("bhs", 3, 5)])
def test_rows_of_a_bias_are_far_too(bias, heads, batches):
    words = (2, 4, 2, 5, 7, 24, "bf16")
    problem, far = AttentionProblem(*words, bias=bias), FarProblem(*words, bias=bias)
    moved = [b - a for a, b in zip(problem.strides("bias"), far.strides("bias"))]
    assert moved == [batches << 31, heads << 31, 1 << 31, 0]
    last = [extent - 1 for extent in problem.term_shapes["bias"][:3]]
    assert far_places(problem)["bias"][-1] == 5 * last[0] + 3 * last[1] + last[2]


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [*(pytest.param(t, marks=pytest.mark.slow) for t in "qkv"), "o"])
def test_a_kernel_that_drops_a_batch_or_counts_in_32_bits_is_found(tensor):
    family, gpu = FlashScalar(), GPUS["l4"]
    problem = AttentionProblem(2, 4, 2, 128, 128, 16, "fp16")
    config = next(
        c for c in load_space("flash_scalar", gpu).starting_configs() if not family.why_invalid(problem, c, gpu)
    )
    far = next(case for case in interpreter_cases(problem, config) if case.far)
    source = render(family, problem, config, gpu).source
    step = f"batch * {tensor}_batch_stride"
    assert source.count(step) == 1

    def run(text):
        kernel = BuiltKernel(family, config, gpu, ptx_kept(text, gpu.arch))
        return check(far.backend(InterpreterBackend()), far.placed(kernel), far.make(1))

    assert run(source).passed and not run(source.replace(step, "0")).passed
    assert "32 bits has lost" in run(source.replace(step, f"int({step})")).reason
