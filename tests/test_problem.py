"""Problems: counts against brute force, strides against torch, and every wrong shape refused by a sentence."""

from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evoattn.model.dtype import QUERY_DTYPES
from evoattn.model.mask import MASKS
from evoattn.model.problem import LAYOUTS, AttentionProblem, ProblemError
from evoattn.model.shape_text import lookup, named_problems, parse_shape

sizes = st.integers(1, 40)


def visible(problem: AttentionProblem) -> torch.Tensor:
    ones = torch.ones(problem.seqlen_q, problem.seqlen_k, dtype=torch.bool)
    return ones.tril(problem.causal_offset) if problem.causal else ones


@given(sizes, sizes, st.sampled_from(tuple(MASKS)), st.integers(1, 3), st.integers(1, 4))
@pytest.mark.slow
def test_flops_count_the_visible_pairs(seqlen_q, seqlen_k, mask, batch, heads):
    problem = AttentionProblem(batch, heads, heads, seqlen_q, seqlen_k, 64, mask=mask)
    assert problem.visible_pairs == batch * heads * int(visible(problem).sum())
    assert problem.flops == 4 * 64 * problem.visible_pairs


@pytest.mark.slow
@given(sizes, st.sampled_from(LAYOUTS))
def test_strides_are_those_of_the_layout(seqlen, layout):
    problem = AttentionProblem(2, 3, 3, seqlen, seqlen, 16, layout=layout)
    order = (2, 3, seqlen, 16) if layout == "bhsd" else (2, seqlen, 3, 16)
    tensor = torch.empty(order)
    view = tensor if layout == "bhsd" else tensor.transpose(1, 2)
    assert view.shape == problem.shape("q")
    assert view.stride() == problem.strides("q")


def test_parse_shape_fills_in_what_is_left_out():
    assert parse_shape("B=1,H=16,S=1024,D=64") == AttentionProblem(1, 16, 16, 1024, 1024, 64)
    assert parse_shape(
        "B=2,H=8,Hkv=2,Sq=1,Sk=77,D=128,dtype=bf16,mask=causal_lower_right,layout=bshd"
    ) == AttentionProblem(2, 8, 2, 1, 77, 128, "bf16", "causal_lower_right", "bshd")


@pytest.mark.parametrize(
    "text, changes",
    [
        ("b=1,h=16,s=1024,d=64", {}),
        ("B=1, H=16, S=1024, D=64, mask=causal", {"mask": "causal_upper_left"}),
        ("B=1,H=16,S=1024,D=64,mask=is_causal", {"mask": "causal_upper_left"}),
        ("B=1,H=16,S=1024,D=64,mask=Lower_Right", {"mask": "causal_lower_right"}),
        ("B=1,H=16,S=1024,D=64,dtype=float16", {}),
        ("B=1,H=16,S=1024,D=64,DTYPE=half", {}),
        ("B=1,H=16,S=1024,D=64,dtype=torch.bfloat16", {"dtype": "bf16"}),
        ("B=1,H=16,S=1024,D=64,dtype=BFloat16", {"dtype": "bf16"}),
        ("B=1,H=16,S=1024,D=64,dtype=float32", {"dtype": "fp32"}),
        ("B=1,H=16,S=1024,D=64,lse=true,layout=BSHD", {"lse": True, "layout": "bshd"}),
    ],
)
def test_the_usual_spellings_are_understood(text, changes):
    assert parse_shape(text) == AttentionProblem(1, 16, 16, 1024, 1024, 64).with_(**changes)


@pytest.mark.parametrize(
    "text, listed",
    [
        ("B=1,H=1,S=4,D=64,dtype=fp4", ("fp16", "bf16", "fp32", "float32", "e4m3")),
        ("B=1,H=1,S=4,D=64,mask=window", ("full", "causal", "causal_lower_right")),
        ("B=1,H=1,S=4,D=64,layout=sbhd", ("bhsd", "bshd")),
        ("B=1,H=1,S=4,D=64,colour=red", ("Hkv", "Sq", "layout", "lse", "dtype", "mask")),
        ("B=1,H=1", ("seqlen_q (S=)", "head_dim (D=)")),
    ],
)
def test_a_refusal_lists_what_is_possible(text, listed):
    with pytest.raises(ProblemError) as error:
        parse_shape(text)
    assert all(word in str(error.value) for word in listed)


def test_every_spelling_leads_to_a_word_of_the_problem():
    """A mask or dtype that is added to the problem needs a row among the spellings."""
    for name, words in (("dtype", QUERY_DTYPES), ("mask", MASKS), ("layout", LAYOUTS)):
        for word in words:
            assert getattr(parse_shape(f"B=1,H=1,S=4,D=64,{name}={word}"), name) == word


@given(
    sizes, sizes, st.sampled_from(tuple(MASKS)), st.sampled_from(QUERY_DTYPES), st.sampled_from(LAYOUTS), st.booleans()
)
def test_short_names_tell_problems_apart(seqlen_q, seqlen_k, mask, dtype, layout, lse):
    base = AttentionProblem(1, 16, 16, 8, 8, 64)
    other = AttentionProblem(1, 16, 16, seqlen_q, seqlen_k, 64, dtype, mask, layout, lse=lse)
    assert (other.short_name() == base.short_name()) == (other == base)
    assert other.short_name().replace("_", "").isalnum()


def test_short_names_are_made_of_the_shape():
    assert AttentionProblem(1, 16, 16, 1024, 1024, 64).short_name() == "b1_h16_s1024_d64_fp16_full"
    decode = AttentionProblem(8, 32, 8, 1, 4096, 128, "bf16", "causal_upper_left", "bshd", lse=True)
    assert decode.short_name() == "b8_h32_kv8_sq1_sk4096_d128_bf16_causal_bshd_lse"
    assert lookup("seed_h100").short_name() == "seed_h100"


@pytest.mark.parametrize(
    "text, changes",
    [
        ("B=1 H=32/8 S=4096 D=128 bf16 causal", {}),
        ("B=1,H=32/8,S=4096,D=128,bf16,causal", {}),
        ("B=1, H=32/8, S=4096, D=128 bf16 causal", {}),
        (" B = 1 H = 32/8; S = 4096; D = 128, bf16, mask = causal, ", {}),
        ("any_name: B=1 H=32/8 S=4096 D=128 bf16 causal", {}),
        ("B=1 H=32/8 S=4096 D=128 bf16 is_causal bshd sink lse", {"layout": "bshd", "sink": True, "lse": True}),
    ],
)
def test_a_shape_may_be_as_it_is_printed(text, changes):
    plain = AttentionProblem(1, 32, 8, 4096, 4096, 128, "bf16", "causal_upper_left")
    assert parse_shape(text) == plain.with_(**changes)


def test_every_named_problem_is_read_as_it_is_printed():
    for problem in named_problems().values():
        nameless = problem.with_(name="")
        assert parse_shape(nameless.describe()) == parse_shape(problem.describe()) == nameless, problem.name


@pytest.mark.parametrize("number", [1 / 3, 96**-0.5, 30.123456789, 1e-5, 50.0])
def test_scales_and_caps_are_printed_with_all_their_digits(number):
    problem = AttentionProblem(1, 2, 2, 64, 64, 96, scale=number, softcap=number)
    assert parse_shape(problem.describe()) == problem


@pytest.mark.slow
@given(st.text(max_size=40))
def test_no_text_breaks_the_shape_parser(text):
    with suppress(ProblemError):
        parse_shape(text)


def test_named_problems_hold_the_table_of_kernel_facts():
    assert len(named_problems()) >= 51
    assert lookup("llama_gqa_prefill").group_size == 4
    assert lookup("seed_h100").flops == 4 * 16 * 1024 * 1024 * 64
    with pytest.raises(ProblemError, match="seed_h100"):
        lookup("seed_h1000")


def test_a_size_beyond_what_a_shape_takes_says_the_limit():
    with pytest.raises(ProblemError, match="S must be a whole number from 1 to 999999999, not '1000000000'"):
        parse_shape("B=1,H=1,S=1000000000,D=64")
