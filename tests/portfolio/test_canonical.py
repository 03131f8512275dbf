"""Lengths that picks are made for: near the true ones, and few of them while a sequence grows."""

import pytest

from evoattn.model.problem import MAX_TENSOR_BYTES, AttentionProblem
from evoattn.model.shape_text import parse_shape
from evoattn.portfolio.pick import canonical, grown, likely
from evoattn.portfolio.workload import DRAWS

TOKEN = AttentionProblem(batch=34, heads=1, kv_heads=1, seqlen_q=1, seqlen_k=4160, head_dim=64)


def test_lengths_are_rounded_up_by_little() -> None:
    for queries, keys in ((17, 257), (1000, 1025), (65537, 131071)):
        problem = TOKEN.with_(seqlen_q=queries, seqlen_k=keys, mask="causal_lower_right")
        about = canonical(problem)
        assert queries <= about.seqlen_q <= queries * 1.04 + 3 and keys <= about.seqlen_k <= keys * 1.04 + 3
        assert canonical(about) == about


def test_a_length_that_cannot_be_rounded_stays() -> None:
    keys = MAX_TENSOR_BYTES // (96 * 2)
    problem = AttentionProblem(batch=1, heads=1, kv_heads=1, seqlen_q=1, seqlen_k=keys, head_dim=96)
    assert canonical(problem) == problem


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 16])
def test_few_queries_are_picked_for_with_a_little_more_keys(queries: int) -> None:
    for keys in range(1, 9000):
        about = canonical(TOKEN.with_(seqlen_q=queries, seqlen_k=keys))
        most = max(16, min(keys * 9 / 8, keys + 64) if keys < 1024 else keys * 9 / 8, 2 * keys - 1)
        assert about.seqlen_q == queries and keys <= about.seqlen_k <= most


@pytest.mark.slow
def test_few_queries_are_picked_for_with_few_numbers_of_keys() -> None:
    lengths = {canonical(TOKEN.with_(seqlen_k=keys)).seqlen_k for keys in range(1, 8193)}
    assert len(lengths) == 3 + 15 + 3 * 8 and all(canonical(TOKEN.with_(seqlen_k=n)).seqlen_k == n for n in lengths)


@pytest.mark.slow
def test_a_growing_problem_comes_by_every_pick() -> None:
    begin, most = TOKEN.with_(seqlen_k=100), 9000
    found = list(grown(begin, most))
    picks = {canonical(begin.with_(seqlen_k=keys)): keys for keys in range(most, 99, -1)}
    assert [problem.seqlen_k for problem in found] == sorted(picks.values())
    assert list(grown(begin, 0)) == list(grown(begin, 112)) == [begin]


@pytest.mark.parametrize("kind", ("packed", "cached", "paged"))
def test_what_only_the_device_knows_changes_nothing(kind: str) -> None:
    for problem in DRAWS[kind](601, 60):
        told = {"seqused": f"0:{problem.seqlen_k}"} if problem.seqused else {}
        if problem.varlen:
            rows = [problem.shape(name)[2] for name in "qk"]
            told = {"varlen": f"sum:{rows[0]}/sum:{rows[1]}"}
        as_called = problem.with_(**told)
        assert likely(problem) == likely(as_called) and canonical(problem) == canonical(as_called)
        seen = likely(problem)
        assert seen.key_lengths and max(keys for _, keys in seen.sequences) <= problem.seqlen_k


def test_packed_sequences_are_as_long_as_they_are_in_the_mean() -> None:
    problem = TOKEN.with_(batch=8, seqlen_q=900, seqlen_k=900, varlen="sum:3200/sum:3200")
    lengths = [rows for rows, _ in likely(problem).sequences]
    assert sum(lengths) == pytest.approx(3200, rel=0.05) and max(lengths) - min(lengths) == 128
    whole = problem.with_(varlen="sum:7200/sum:7200")
    assert set(likely(whole).sequences) == {(900, 900)}, "all of them are as long as can be"


def test_a_step_with_prompts_is_taken_for_single_tokens_beside_few_prompts() -> None:
    step = "B=13,H=8/2,Sq=1839,Sk=4096,D=128,layout=bshd,page=64,mask=causal_lower_right,varlen=sum:{}/sum:20000"
    for rows, prompts in ((1851, 1), (3001, 3), (12 * 1839, 13)):
        queries, keys = zip(*likely(parse_shape(step.format(rows))).sequences, strict=True)
        assert sum(queries) == rows and max(queries) == 1839 and sum(n > 1 for n in queries) == prompts
        assert all(few <= many for few, many in zip(queries, keys, strict=True)) and max(keys) <= 4096


def test_batches_of_packed_sequences_share_picks() -> None:
    batches = [TOKEN.with_(batch=b, seqlen_q=1000, seqlen_k=1000, varlen=f"sum:{b * 250}") for b in range(33, 37)]
    assert len({canonical(problem) for problem in batches}) == 1


def test_single_tokens_over_pages_stay_so_where_some_sequences_have_none() -> None:
    step = TOKEN.with_(batch=4, page=64, layout="bshd", varlen="sum:3/sum:9000")
    assert canonical(step).varlen.startswith("log:1:1/log:")


def test_expressions_and_block_lists_share_picks() -> None:
    def made(length: int, blocks: str) -> AttentionProblem:
        words = f"predicate=t0[b,q]==t0[b,k],tables=t0:int64:1x{length}"
        return canonical(parse_shape(f"B=1,H=8,S={length},D=64,dtype=bf16,blocks={blocks},{words}"))

    assert made(4090, "128x128:1/3/7") == made(4096, "128x128:1/4/8")
    for blocks, rounded in (("0/3/3", "0/4/4"), ("3/5/8", "4/4/8"), ("1/32/64", "1/32/66"), ("0/1/5", "0/1/4")):
        assert made(4096, f"128x128:{blocks}").blocks == f"128x128:{rounded}"
    assert made(4096, "128x128:300").blocks == "128x128:300" and made(64, "8x8:1/3/7:mixed").blocks == "8x8:1/3/7:mixed"
    assert made(4096, "128x128:1/3/7").tables == "t0:int64:1x1"
