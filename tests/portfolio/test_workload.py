"""The drawn problems are the same for the same seed, and those that others draw with the same rules."""

import hashlib
import math

import pytest

from evoattn.engine.groups import distance, features
from evoattn.families import registry
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import named_problems, parse_shape
from evoattn.model.variant import parse_window
from evoattn.portfolio.workload import BUILD_SEEDS, DRAWS, KINDS, SCORES, WIDE, draw

SEED_7 = [
    "B=7 H=1 S=128 D=64 fp16 causal_lower_right bshd",
    "B=9 H=1 S=15616 D=128 fp32 causal_lower_right",
    "B=1 H=32/4 S=8197 D=160 bf16 causal_upper_left",
]
"""By the program that judges results."""


def test_a_seed_always_gives_the_same_problems():
    assert [p.describe() for p in draw(7, 3)] == SEED_7
    assert draw(7, 20) == draw(7, 25)[:20]
    assert draw(7, 20) != draw(8, 20)


DIGESTS_7 = dict(
    plain="4868b0f9", wide="15285947", scores="01766956", packed="7b6f4153", cached="49cdb195", paged="a10d5a40",
    mixed="68355e60", latent="db301b83", latent_paged="3f073e6f", biased="c8ec44e6", eight_bits="c2af0f9e",
    eight_bit_chunks="8175cc23", fp8="be6e2a06", fp8_turned="4c302611",
)  # fmt: skip
"""Of each kind's first hundred problems of seed 7: lists were made for such ones, and judged on them."""


@pytest.mark.parametrize("kind", DRAWS)
def test_each_kind_draws_what_it_drew(kind):
    said = " ".join(problem.describe() for problem in DRAWS[kind](7, 100))
    assert hashlib.sha256(said.encode()).hexdigest()[:8] == DIGESTS_7[kind]


def test_variants_are_those_of_models():
    problems = DRAWS[SCORES](3, 400)
    assert DRAWS[SCORES](3, 10) == problems[:10]
    assert all(p.variants and set(p.variants) <= {"window", "softcap", "sink"} for p in problems)
    assert {p.head_dim for p in problems} == {64, 128, 256}
    windows = [p for p in problems if p.window]
    assert any(p.mask == "full" for p in windows), "an encoder's window"
    assert all(sum(parse_window(p.window)) < p.seqlen_k or p.mask == "full" for p in windows)
    assert any(p.seqlen_q == 1 for p in problems) and any(p.seqlen_q == p.seqlen_k > 1000 for p in problems)


def test_keys_that_a_window_hides_are_no_keys():
    wide, narrow = (p for p in (parse_shape(f"B=1,H=8,S=4096,D=64,mask=causal,window={w}:0") for w in (8000, 127)))
    assert features(wide, GPUS["h100"])["keys"] == 12
    assert features(narrow, GPUS["h100"])["keys"] == 7
    decode = parse_shape("B=1,H=8,Sq=1,Sk=4096,D=64,mask=full,window=127:9999")
    assert features(decode, GPUS["h100"])["keys"] == 7, "no keys lie behind the last query"


FIELDS_OF = {
    "packed": {"varlen"},
    "cached": {"seqused"},
    "paged": {"seqused", "page"},
    "mixed": {"varlen", "page"},
    "latent": {"value_dim"},
    "latent_paged": {"page"},
    "biased": {"alibi", "bias"},
    "eight_bits": {"kv"},
    "fp8": {"scales"},
    "fp8_turned": {"scales", "turned"},
    "eight_bit_chunks": {"kv"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_fields_and_a_kernel(kind):
    problems = DRAWS[kind](3, 120)
    assert DRAWS[kind](3, 10) == problems[:10] != DRAWS[kind](4, 10)
    for problem in problems:
        assert FIELDS_OF[kind] & set(problem.variants), problem.describe()
        assert any(not f.why_unsupported(problem, GPUS["h100"]) for f in registry.FAMILIES.values())
    assert len({p.batch for p in problems}) > 5 and len({p.seqlen_k for p in problems}) > 5


def test_features_count_tiles_rows_and_heads_by_sms():
    problem = AttentionProblem(3, 8, 2, 1000, 4096, 128)
    found = features(problem, GPUS["h100"].with_limits({"sm_count": 64}))
    expected = {
        "queries": math.log2(1000),
        "keys": 12.0,
        "rows per SM": math.log2(3 * 1000 * 8 / 64),
        "tiles per SM": math.log2(3),  # 8 tiles of rows, 24 heads
        "last wave": 0.0,
        "K/V heads per SM": math.log2(6 / 64),
        "group": 2.0,
    }
    assert found == pytest.approx(expected)
    assert distance(found, found | {"keys": 10.0, "group": 1.0}) == pytest.approx(math.hypot(2 * 0.7, 0.5))


def test_sequences_of_a_kind_are_alike_in_some_problems_and_differ_in_others():
    for kind in ("packed", "cached", "paged"):
        spans = [[keys for _, keys in p.sequences] for p in DRAWS[kind](0, 200) if p.batch > 2]
        assert any(len(set(keys)) == 1 for keys in spans) and any(max(keys) > 10 * min(keys) for keys in spans)


def test_packed_sequences_count_by_the_queries_that_they_have():
    few, many = (
        parse_shape(f"B=16,H=8,S=4096,D=64,mask=causal,varlen={lengths}") for lengths in ("256:256", "4096:4096")
    )
    assert features(few, GPUS["h100"])["queries"] == 8
    assert features(many, GPUS["h100"])["queries"] == 12
    tiles = [features(p, GPUS["h100"])["tiles per SM"] for p in (few, many)]
    assert tiles[0] < tiles[1] - 3


def test_wide_heads_are_those_of_models_and_others():
    problems = DRAWS[WIDE](3, 300)
    assert DRAWS[WIDE](3, 10) == problems[:10] != DRAWS[WIDE](4, 10)
    assert not any(p.variants for p in problems)
    assert {p.head_dim for p in problems} == {320, 384, 512}
    assert {p.dtype for p in problems} == {"fp16", "bf16", "fp32"}
    assert {p.seqlen_q == 1 for p in problems} == {p.group_size > 1 for p in problems} == {True, False}
    assert all(any(not f.why_unsupported(p, GPUS["h100"]) for f in registry.FAMILIES.values()) for p in problems)
    named = {p.with_(name="") for p in named_problems().values()}
    assert not named & {p for seed in BUILD_SEEDS for p in DRAWS[WIDE](seed, 12)}, "they are for judging"
