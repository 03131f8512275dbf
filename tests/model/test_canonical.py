"""What a shape says and what the op makes of a call of that shape are one problem."""

import pytest
import torch

from evoattn.model.shape_text import parse_shape
from evoattn.ops.arguments import DTYPES, KV_DTYPES
from evoattn.ops.call import Call, StridedProblem, behind, out_like, terms_of
from evoattn.portfolio.workload import DRAWS, drawn

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
