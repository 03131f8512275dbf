"""`attn_mask` of `evoattn.attention`: torch's answer, and a kernel where another argument says the same."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import evoattn
from evoattn.correctness import reference
from evoattn.correctness.judge import judge
from evoattn.model.problem import AttentionProblem

PROBLEM = AttentionProblem(2, 4, 2, 37, 53, 16, "fp32")
PADDING = (torch.arange(53) < torch.tensor([[40], [53]]))[:, None, None, :]  # the first keys of each batch are real
MASKS = {
    "padding": PADDING,
    "padding and a causal mask": PADDING & torch.ones(37, 53, dtype=torch.bool).tril(16),
    "of all queries": torch.ones(37, 53, dtype=torch.bool).tril(3),
    "a number for each head": torch.linspace(-3, 3, 4 * 37 * 53).reshape(1, 4, 37, 53),
}


def inputs(problem=PROBLEM):
    tensors = reference.make_inputs(problem, 5, "cpu")
    return [tensors[name] for name in "qkv"]


@pytest.mark.parametrize("name", MASKS)
def test_the_answer_is_that_of_sdpa(name):
    q, k, v = inputs()
    answer = evoattn.attention(q, k, v, enable_gqa=True, attn_mask=MASKS[name])
    torch.testing.assert_close(answer, F.scaled_dot_product_attention(q, k, v, MASKS[name], enable_gqa=True))


@pytest.mark.parametrize("name", MASKS)
def test_a_kernel_serves_it_as_a_bias(device, name):
    q, k, v = inputs(PROBLEM.with_(dtype="fp16"))
    mask = MASKS[name] if MASKS[name].dtype == torch.bool else MASKS[name].half()
    answer = evoattn.attention(q, k, v, enable_gqa=True, attn_mask=mask, strict=True)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), as_number(mask), enable_gqa=True)
    assert (answer.double() - expected).abs().max() < 4e-3
    assert device.launches


def as_number(mask):
    return mask if mask.dtype == torch.bool else mask.double()


@pytest.mark.parametrize("made, mask", [(causal_upper_left, "upper_left"), (causal_lower_right, "lower_right")])
def test_a_causal_mask_of_torch_is_known_as_one(device, made, mask):
    problem = PROBLEM.with_(dtype="fp16", mask=f"causal_{mask}")
    tensors = reference.make_inputs(problem, 5, "cpu")
    q, k, v = (tensors[name] for name in "qkv")
    answer = evoattn.attention(q, k, v, enable_gqa=True, attn_mask=made(37, 53), strict=True)
    assert judge({"o": answer}, reference.make_answer(problem, tensors, double=True))[0] == ""
    asked = evoattn.attention(q, k, v, enable_gqa=True, causal=mask, strict=True)
    assert torch.equal(answer, asked) and device.loads == 1


@pytest.mark.parametrize("made", [causal_upper_left, causal_lower_right])
def test_explain_names_the_kernel_of_a_causal_mask(device, made):
    q, k, v = inputs(PROBLEM.with_(dtype="fp16"))
    said = evoattn.explain(q, k, v, made(37, 53), enable_gqa=True)
    kind = "upper_left" if made is causal_upper_left else "lower_right"
    assert said == evoattn.explain(q, k, v, causal=kind, enable_gqa=True) and "SDPA" not in said


def test_explain_tells_what_both_ways_make_of_a_mask_tensor(device):
    q, k, v = inputs(PROBLEM.with_(dtype="fp16"))
    said = evoattn.explain(q, k, v, PADDING, enable_gqa=True)
    bias = torch.zeros(2, 1, 1, 53, dtype=torch.float16)
    assert said.startswith(evoattn.explain(q, k, v, bias=bias, enable_gqa=True).removesuffix("."))
    assert said.endswith("PyTorch's own runs, as there is a mask tensor.")
    with evoattn.sdpa():
        F.scaled_dot_product_attention(q, k, v, PADDING, enable_gqa=True)
    assert not device.launches


@pytest.mark.parametrize(
    "words, said",
    [
        ({"attn_mask": MASKS["padding"], "is_causal": True, "return_lse": True}, "exclude each other"),
        ({"attn_mask": MASKS["padding"], "bias": torch.zeros(37, 53)}, "add the bias to the mask"),
        ({"attn_mask": causal_lower_right(37, 50)}, "of 37 queries and 50 keys"),
        ({"attn_mask": torch.ones(37, 50, dtype=torch.bool), "window": (3, 3)}, "broadcastable"),
        ({"attn_mask": torch.zeros(37, 53, dtype=torch.float16), "softcap": 9.0}, "query's dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_raises(words, said):
    with pytest.raises(ValueError, match=said):
        evoattn.attention(*inputs(), enable_gqa=True, **words)


@pytest.mark.parametrize("words", [{"out": [1]}, {"attn_mask": [1], "softcap": 2.0}], ids=["out", "attn_mask"])
def test_what_is_no_tensor_is_named(words):
    with pytest.raises(TypeError, match=f"{next(iter(words))} must be a tensor, not list"):
        evoattn.attention(*inputs(), enable_gqa=True, **words)


def test_explain_refuses_a_corner_that_is_none():
    with pytest.raises(ValueError, match="causal must be True, False"):
        evoattn.explain(*inputs(), causal="upper", enable_gqa=True)


def test_explain_reads_a_bias_as_the_call_does(device):
    """Kernels would round a float32 one beside 16 bits, which autocast has done already."""
    q, k, v = inputs(AttentionProblem(2, 4, 2, 37, 53, 64, "fp16"))
    bias, single = torch.zeros(1, 53), (q.float(), k.float(), v.float())
    said = evoattn.explain(q, k, v, bias=bias, enable_gqa=True)
    assert said == "SDPA runs: the bias is torch.float32 beside torch.float16, which kernels would round."
    with torch.autocast("cpu", dtype=torch.float16):
        for given in (bias, bias.half()):
            evoattn.attention(*single, bias=given, enable_gqa=True, strict=True)
            assert not evoattn.explain(*single, bias=given, enable_gqa=True).startswith("SDPA runs")
