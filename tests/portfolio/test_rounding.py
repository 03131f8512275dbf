"""Lengths that picks and climbs are made for: near the true ones, and few of them while a sequence grows."""

from __future__ import annotations

import pytest

from evoattn.model.problem import MAX_TENSOR_BYTES, AttentionProblem
from evoattn.portfolio.rounding import climbed, grown, lasting, rounded

TOKEN = AttentionProblem(batch=34, heads=1, kv_heads=1, seqlen_q=1, seqlen_k=4160, head_dim=64)


def test_lengths_are_rounded_up_by_little() -> None:
    for queries, keys in ((1, 1), (3, 17), (16, 256), (17, 257), (1000, 1025), (65537, 131071)):
        problem = TOKEN.with_(seqlen_q=queries, seqlen_k=keys, mask="causal_lower_right")
        about = rounded(problem)
        assert queries <= about.seqlen_q <= queries * 1.04 + 15 and keys <= about.seqlen_k <= keys * 1.04 + 15
        assert queries > 16 or about.seqlen_q == queries
        assert rounded(about) == about


def test_a_length_that_cannot_be_rounded_stays() -> None:
    keys = MAX_TENSOR_BYTES // (96 * 2)
    problem = AttentionProblem(batch=1, heads=1, kv_heads=1, seqlen_q=1, seqlen_k=keys, head_dim=96)
    assert rounded(problem) == problem
    assert climbed(problem) == problem


@pytest.mark.parametrize("queries", [1, 16])
def test_climbs_are_made_for_a_little_more_keys(queries: int) -> None:
    for keys in range(1, 9000):
        above = climbed(TOKEN.with_(seqlen_q=queries, seqlen_k=keys)).seqlen_k
        assert keys <= above <= max(16, min(keys * 9 / 8, keys + 64) if keys < 1024 else keys * 9 / 8, 2 * keys - 1)


def test_climbs_are_made_for_few_numbers_of_keys() -> None:
    lengths = {climbed(TOKEN.with_(seqlen_k=keys)).seqlen_k for keys in range(1, 8193)}
    assert len(lengths) == 3 + 15 + 3 * 8 and all(climbed(TOKEN.with_(seqlen_k=n)).seqlen_k == n for n in lengths)


def test_a_growing_problem_comes_by_every_pick() -> None:
    begin, most = TOKEN.with_(seqlen_k=100), 9000
    found = list(grown(begin, most))
    picks = {lasting(begin.with_(seqlen_k=keys)): keys for keys in range(most, 99, -1)}
    assert [problem.seqlen_k for problem in found] == sorted(picks.values())
    assert list(grown(begin, 0)) == list(grown(begin, 112)) == [begin]


def test_prompts_are_picked_for_as_they_are() -> None:
    prompt = TOKEN.with_(seqlen_q=17, seqlen_k=4161)
    assert lasting(prompt) == prompt and climbed(prompt) == rounded(prompt)


def test_what_says_the_keys_again_is_rounded_with_them() -> None:
    assert lasting(TOKEN.with_(seqlen_k=4161)).seqlen_k == 4224
    assert lasting(TOKEN.with_(seqlen_k=4161, seqused="0:4161")) == TOKEN.with_(seqlen_k=4224, seqused="0:4224")
    assert lasting(TOKEN.with_(seqlen_k=4161, seqused="7:90")) == TOKEN.with_(seqlen_k=4224, seqused="7:90")


def test_pages_and_packed_sequences_stay() -> None:
    paged = TOKEN.with_(seqlen_k=4161, seqused="0:4161", page=16, layout="bshd")
    packed = TOKEN.with_(seqlen_k=4161, varlen="sum:34/sum:900")
    assert lasting(paged) == paged and lasting(packed) == packed
