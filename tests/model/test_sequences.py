"""Packed sequences: how lengths are written, shapes and counts, and the reference one sequence at a time."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from evoattn.correctness import reference
from evoattn.correctness.cases import device_cases, sequenced
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.shape_text import parse_shape

SHAPE = "B=3,H=4,Hkv=2,Sq=37,Sk=53,D=24"


@pytest.mark.parametrize(
    "text, sequences",
    [
        ("3+0+17", ((3, 3), (0, 0), (17, 17))),
        ("3+0+17/5+53+0", ((3, 5), (0, 53), (17, 0))),
        ("sum:50/sum:7", ((17, 3), (17, 2), (16, 2))),
        ("9:9", ((9, 9),) * 3),
        ("40:60", ((37, 40), (37, 53), (37, 50))),  # cut to the longest
        ("1:30/log:4:25", ((1, 4), (30, 25), (16, 10))),
    ],
)
def test_lengths_are_written_read_and_kept(text, sequences):
    problem = parse_shape(f"{SHAPE},varlen={text}")
    assert sorted(problem.sequences) == sorted(sequences)
    assert ":" in text or problem.sequences == sequences, "lengths that are named keep their order"
    assert problem.describe().endswith(f"varlen={text}")
    assert AttentionProblem(**problem.to_dict()) == problem
    assert problem.short_name().replace("_", "").isalnum()


def test_different_lengths_have_different_short_names():
    texts = ("3+0+17", "3+0+17/3+0+16", "3:17", "log:3:17", "sum:20", "3+0+17/1+1+1")
    assert len({parse_shape(f"{SHAPE},varlen={text}").short_name() for text in texts}) == len(texts)
    long = "+".join(["7"] * 300)
    assert len(parse_shape(f"B=300,H=1,S=8,D=64,varlen={long}").short_name()) < 100


@pytest.mark.parametrize("varlen", [5, ["3", "0", "17"]])
def test_lengths_are_a_text(varlen):
    with pytest.raises(ProblemError, match="varlen must be a text of lengths"):
        parse_shape(SHAPE).with_(varlen=varlen)


def test_more_rows_than_an_int32_counts_are_refused():
    shape = {"batch": 3, "heads": 1, "kv_heads": 1, "seqlen_q": 1 << 30, "seqlen_k": 1 << 30, "head_dim": 8}
    assert AttentionProblem(**shape, varlen=f"sum:{(1 << 31) - 1}").shape("q")[2] == (1 << 31) - 1
    with pytest.raises(ProblemError, match="2147483648 rows in all"):
        AttentionProblem(**shape, varlen=f"sum:{1 << 31}")


def test_shapes_and_counts_are_those_of_all_sequences():
    problem = parse_shape(f"{SHAPE},varlen=3+0+17/5+9+20,mask=causal_lower_right,layout=bshd,lse=1")
    assert problem.shape("q") == problem.shape("o") == (1, 4, 20, 24) and problem.shape("k") == (1, 2, 34, 24)
    assert problem.strides("q")[1:] == (24, 4 * 24, 1), "[total, heads, head_dim], as flash-attention has it"
    assert problem.lse_shape == (1, 4, 20)
    pairs = sum(i + keys - rows + 1 for rows, keys in problem.sequences for i in range(rows))
    assert problem.visible_pairs == 4 * pairs and problem.flops == 4 * 4 * 24 * pairs
    assert problem.bytes == 2 * 24 * (2 * 4 * 20 + 2 * 2 * 25) + 4 * 4 * 20  # nobody sees the 9


@pytest.mark.parametrize("mask", ["full", "causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize("sink", [False, True])
def test_the_reference_is_that_of_each_sequence_alone(mask, sink):
    problem = sequenced(parse_shape(f"{SHAPE},mask={mask},sink={int(sink)},lse=1,dtype=fp32"))
    tensors = reference.make_inputs(problem, 3, "cpu")
    answer = reference.make_answer(problem, tensors)
    assert tensors["cu_seqlens_q"].dtype == tensors["cu_seqlens_k"].dtype == torch.int32
    q, k, v = (tensors[name].double() for name in "qkv")
    first_q = first_k = 0
    for rows, keys in problem.sequences:
        own_q, own_k = slice(first_q, first_q + rows), slice(first_k, first_k + keys)
        first_q, first_k = own_q.stop, own_k.stop
        exact, lse = answer["o"].values[:, :, own_q], answer["lse"].values[:, :, own_q]
        if not rows:
            assert torch.isnan(k[:, :, own_k]).all() and torch.isnan(v[:, :, own_k]).all()
        elif not keys:
            assert not exact.any()
            assert (lse == (tensors["sinks"].double()[None, :, None] if sink else -math.inf)).all()
        elif not sink:
            shift = {"full": keys, "causal_upper_left": 0, "causal_lower_right": keys - rows}[mask]
            visible = torch.ones(rows, keys, dtype=torch.bool).tril(shift)
            seen = visible.any(-1)
            right = scaled_dot_product_attention(
                q[:, :, own_q], k[:, :, own_k], v[:, :, own_k], attn_mask=visible, enable_gqa=True
            )
            torch.testing.assert_close(exact[:, :, seen], right[:, :, seen], atol=1e-12, rtol=0)
            assert not exact[:, :, ~seen].any()
    assert first_q == tensors["cu_seqlens_q"][-1] == q.shape[2] and first_k == tensors["cu_seqlens_k"][-1]


def test_the_ladder_has_sequences_of_no_and_of_one_query_and_of_no_keys():
    cases = device_cases(parse_shape(f"{SHAPE},varlen=3+0+17"))
    for _, problem, _ in cases:
        queries, keys = zip(*problem.sequences, strict=True)
        assert 0 in queries and 1 in queries and 0 in keys and queries != keys
        assert max(queries) == problem.seqlen_q and max(keys) == problem.seqlen_k
