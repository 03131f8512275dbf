"""Problems: counts against brute force, strides against torch, and every wrong shape refused by a sentence. What a
shape says and what the op makes of a call of that shape are one problem."""

from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evoattn.model.dtype import QUERY_DTYPES
from evoattn.model.mask import MASKS
from evoattn.model.problem import LAYOUTS, AttentionProblem, ProblemError
from evoattn.model.shape_text import lookup, named_problems, parse_shape
from evoattn.ops.arguments import DTYPES, KV_DTYPES
from evoattn.ops.call import Call, StridedProblem, behind, out_like, terms_of
from evoattn.portfolio.workload import DRAWS, drawn

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


TORCH = {name: dtype for dtype, name in (DTYPES | KV_DTYPES).items()}
ONE = "B=2,H=4,Sq=1,Sk=300,D=64"


def called(problem):
    """The problem of a call of these lengths, as the op reads it off tensors without data."""
    dtype, of_keys = TORCH[problem.dtype], TORCH[problem.kv or problem.dtype]
    batch, rows = problem.batch, problem.shape("q")[2]
    q = torch.empty(problem.shape("q"), dtype=dtype, device="meta")
    k = torch.empty(problem.shape("k"), dtype=of_keys, device="meta")
    v = torch.empty(*problem.shape("k")[:3], problem.head_dim_v, dtype=of_keys, device="meta")
    if problem.layout == "bshd":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    integers = torch.zeros(batch + 1, dtype=torch.int32)
    of_scales = {"": (), "head": (problem.batch, problem.kv_heads), "token": problem.shape("k")[:3]}[problem.scales]
    scales = torch.zeros(of_scales, device="meta") if problem.scales else None
    past, ahead = map(int, problem.window.split(":")) if problem.window else (-1, -1)
    terms = terms_of(
        sinks=torch.zeros(problem.heads) if problem.sink else None,
        alibi_slopes=torch.zeros(problem.heads) if problem.alibi else None,
        bias=torch.zeros(problem.term_shapes["bias"], device="meta") if problem.bias else None,
        seqused_k=integers[1:] if "seqused" in problem.term_shapes else None,
        block_table=torch.zeros(batch, problem.table_pages, dtype=torch.int32) if problem.page else None,
        cu_seqlens_q=integers if problem.varlen else None,
        k_scale=scales,
        v_scale=scales,
        cu_seqlens_k=integers if "cu_seqlens_k" in problem.term_shapes else None,
    )
    of_query = problem.dtype == "e4m3"  # attention_fp8's
    terms = behind(terms, (scales,) if of_query else ())
    window, longest = (past, ahead) if problem.window else None, (problem.seqlen_q, problem.seqlen_k)
    words = {"q_scaled": of_query, "turned": problem.turned}
    call = Call(q, k, v, problem.mask, None, True, window, problem.softcap, terms, problem.lse, **words)
    call.longest = longest if problem.varlen else (0, 0)
    asked = call.problem(out_like(q, v).stride())
    assert isinstance(asked, StridedProblem), asked
    sizes, least = (asked.seqlen_q, asked.shape("q")[2]), (problem.seqlen_q, rows)
    assert all(map(int.__ge__, sizes, least)) if problem.varlen and problem.page else sizes == least
    return asked.as_searched


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(DRAWS))
def test_drawn_problems_are_those_of_their_calls(kind):
    for problem in drawn([kind], range(930, 934), 10):
        whole = problem.with_(seqlen_k=problem.table_pages * problem.page) if problem.page else problem
        # Tensors without data do not show that V lies within K; the scale is no part of plain calls.
        # The order of dimensions in memory does not show where one of them has one row.
        picked = whole.with_unknown_lengths().with_(shared_kv=False, scale=None)
        assert called(whole).with_(layout="bhsd") == picked.with_(layout="bhsd"), problem.describe()
        assert problem.canonical().canonical() == problem.canonical()


@pytest.mark.parametrize(
    "said, mask, window",
    [
        ("mask=causal_lower_right", "full", ""),
        ("mask=causal_lower_right,window=127:0", "full", "127:0"),
        ("mask=causal_lower_right,window=299:0", "full", ""),
        ("mask=full,window=127:127", "full", "127:0"),
        ("mask=causal_upper_left", "causal_upper_left", ""),
        ("mask=causal_upper_left,window=9:0", "causal_upper_left", "9:0"),
    ],
)
def test_one_query(said, mask, window):
    problem = parse_shape(f"{ONE},{said}")
    asked = problem.canonical()
    assert (asked.mask, asked.window) == (mask, window)
    assert called(problem) == asked


def test_a_window_that_hides_nothing_is_none():
    problem = parse_shape("B=1,H=4,S=100,D=64,mask=causal_upper_left,window=127:0")
    assert problem.canonical() == problem.with_(window="")
    longer = problem.with_(seqlen_q=200, seqlen_k=200)
    assert longer.canonical() is longer


def test_lengths_that_only_the_device_knows_stay_open():
    cache = parse_shape("B=3,H=4,Sq=1,Sk=512,D=64,mask=causal_lower_right,seqused=17:400")
    assert cache.canonical().seqused == "17:400" and cache.with_unknown_lengths() == cache.with_(
        mask="full", seqused="0:512"
    )
    packed = parse_shape("B=3,H=4,S=512,D=64,varlen=3+512+17")
    assert packed.canonical() is packed and packed.with_unknown_lengths() == packed.with_(varlen="sum:532/sum:532")
