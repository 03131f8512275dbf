"""Lengths that a problem records, keys behind them, pages: shapes, counts, inputs and the reference. Packed sequences:
how lengths are written, shapes and counts, and the reference one sequence at a time. Packed sequences: how lengths are
written, shapes and counts, and the reference one sequence at a time."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from evoattn.correctness import reference, sequences
from evoattn.correctness.cases import device_cases, sequenced
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.sequences import Lengths, parse_lengths
from evoattn.model.shape_text import parse_shape

PLAIN = AttentionProblem(5, 4, 2, 3, 70, 16)


def test_lengths_are_drawn_alike_each_time_and_mixed():
    drawn = parse_lengths("512:4096").draw(32)
    assert drawn == Lengths(512, 4096).draw(32)
    assert (min(drawn), max(drawn), len(set(drawn))) == (512, 4096, 32)
    assert abs(sum(drawn) / 32 - 2304) < 2
    for half in (drawn[:16], drawn[16:]):  # neither half of the batch is the long one
        assert 0.8 < sum(half) / 16 / 2304 < 1.2
    assert parse_lengths("0:2").draw(3) == (0, 2, 1)
    assert parse_lengths("7:9").draw(1) == (9,)


def test_a_logarithmic_range_has_more_short_ones():
    drawn = sorted(parse_lengths("log:16:4096").draw(65))
    assert (drawn[0], drawn[32], drawn[-1]) == (16, 256, 4096)


def test_only_keys_in_use_count():
    used = PLAIN.with_(seqused="0:60")
    assert used.key_lengths == (0, 45, 15, 60, 30)
    assert used.with_(seqlen_k=20).key_lengths == (0, 20, 15, 20, 20)
    assert used.visible_pairs == 4 * 3 * 150
    assert used.flops == 4 * 16 * used.visible_pairs
    assert used.bytes == 2 * (2 * 5 * 4 * 3 * 16 + 2 * 2 * 150 * 16)
    assert used.with_(window="9:0").visible_pairs == 4 * 4 * 30
    paged = used.with_(page=16)
    assert (paged.bytes, paged.flops) == (used.bytes, used.flops)


def test_a_page_is_one_piece_of_memory():
    paged = PLAIN.with_(seqused="0:60", page=16, layout="bshd")
    assert paged.shape("k") == (25, 2, 16, 16)
    assert paged.strides("k") == (16 * 2 * 16, 16, 2 * 16, 1)
    assert paged.term_shapes == {"seqused": (5,), "table": (5, 5)}
    assert paged.shape("q") == PLAIN.shape("q")


def test_what_is_no_key_is_nan_and_what_is_no_page_is_far_away():
    problem = PLAIN.with_(seqused="0:60", page=16)
    tensors = reference.make_inputs(problem, 1, "cpu")
    table, used = tensors["table"], tensors["seqused"]
    assert used.dtype == table.dtype == torch.int32
    assert used.tolist() == list(problem.key_lengths)
    pages = table[table != sequences.NO_PAGE].tolist()
    assert len(pages) == len(set(pages)) == sum(-(-n // 16) for n in problem.key_lengths)
    assert pages != sorted(pages)
    assert [int((row != sequences.NO_PAGE).sum()) for row in table] == [-(-n // 16) for n in problem.key_lengths]
    for name in "kv":
        assert int((~tensors[name].isnan()).sum()) == sum(problem.key_lengths) * 2 * 16


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mask": "causal_lower_right"},
        {"mask": "causal_upper_left"},
        {"window": "9:4", "sink": True},
        {"alibi": True},
        {"mask": "causal_upper_left", "alibi": True},
        {"bias": "bhs", "lse": True},
        {"shared_kv": True, "value_dim": 8},
        {"value_dim": 32},
    ],
)
def test_the_reference_is_that_of_each_sequence_alone(page, fields):
    problem = PLAIN.with_(seqused="0:60", page=page, **fields)
    tensors = reference.make_inputs(problem, 2, "cpu")
    whole = sequences.gathered(problem, tensors)
    v = whole["k"][..., :8] if problem.shared_kv else whole["v"]
    answer = reference.make_answer(problem, tensors, double=True)
    for b, keys in enumerate(problem.key_lengths):
        if not keys:
            assert not answer["o"].values[b].any()
            continue
        alone = problem.with_(batch=1, seqlen_k=keys, seqused="", page=0)
        own = {name: whole[name][b : b + 1, :, :keys] if name == "k" else whole[name][b : b + 1] for name in "qk"}
        for name in ("sinks", "slopes"):
            if name in tensors:
                own[name] = tensors[name]
        if problem.bias:
            own["bias"] = tensors["bias"][b : b + 1, ..., :keys]
        exact = reference.exact_attention(alone, own["q"], own["k"], v[b : b + 1, :, :keys], torch.float64, others=own)
        torch.testing.assert_close(answer["o"].values[b], exact[0])
        if problem.lse:
            torch.testing.assert_close(answer["lse"].values[b], reference.exact_lse(alone, own["q"], own["k"], own)[0])
        elif problem.mask == "full" and set(problem.variants) <= {"seqused", "page"}:
            q, k = own["q"].double(), own["k"].double()
            torch.testing.assert_close(
                exact, scaled_dot_product_attention(q, k, v[b : b + 1, :, :keys].double(), enable_gqa=True)
            )


def test_a_sequence_without_keys_leaves_its_sink():
    problem = PLAIN.with_(seqused="0:60", sink=True, lse=True)
    tensors = reference.make_inputs(problem, 2, "cpu")
    lse = reference.exact_lse(problem, tensors["q"], tensors["k"], tensors)
    torch.testing.assert_close(lse[0], tensors["sinks"].double()[:, None].expand(4, 3))
    assert reference.exact_lse(problem.with_(sink=False), tensors["q"], tensors["k"], tensors)[0].isneginf().all()


@pytest.mark.parametrize("family", ["split_kv", "flash_mma"])
def test_the_work_of_a_kernel_is_that_of_keys_in_use(family):
    gpu, plain = GPUS["h100"], AttentionProblem(16, 32, 8, 1, 4096, 128, "bf16")
    config = load_space(family, gpu).starting_configs()[0]
    used = plain.with_(seqused="0:4096")
    all_keys, half = (FAMILIES[family].work(p, config)[0] for p in (plain, used))
    assert 0.45 < half.steps / all_keys.steps < 0.55 and half.most_steps == all_keys.most_steps
    rows = 2 * 2 * 16 * 32 * 128  # bytes of Q, and of O where it is counted
    assert 0.49 < (half.read_bytes - rows / 2) / (all_keys.read_bytes - rows / 2) < 0.51


def test_entries_behind_the_last_key_may_name_a_page():
    """Not in plain inputs, where they are far outside of every cache."""
    problem = AttentionProblem(3, 1, 1, 1, 64, 16, seqused="0:64", page=16)
    for kind, behind in (("plain", sequences.NO_PAGE), ("extreme_terms", 0)):
        made = reference.make_inputs(problem, 0, "cpu", kind)
        for row, keys in zip(made["table"], problem.key_lengths):
            assert (row[-(-keys // 16) :] == behind).all() and (row[: -(-keys // 16)] != sequences.NO_PAGE).all()


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
def test_the_reference_is_that_of_each_packed_sequence(mask, sink):
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
