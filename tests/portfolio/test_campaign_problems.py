"""Problems on which picks lose most come more often than they are drawn."""

from __future__ import annotations

from collections import Counter

import pytest

from evoattn.model.shape_text import parse_shape
from evoattn.portfolio.campaign import EMPHASIS, brief, by_group, chosen, emphasis_of, emphasized, group_of
from evoattn.portfolio.workload import draw, draw_variants


def test_each_kind_has_its_part():
    found = emphasized((p for seed in range(400, 412) for p in draw(seed, 60)), 50)
    counts = Counter(map(emphasis_of, found))
    assert sum(part for part, _ in EMPHASIS.values()) == pytest.approx(1)
    assert counts == {name: round(part * 50) for name, (part, _) in EMPHASIS.items()}
    assert len(set(found)) == len(found)


def test_brief_problems_read_little_and_compute_little():
    assert brief(parse_shape("B=7,H=16,Sq=1,Sk=448,D=80"))
    assert not brief(parse_shape("B=10,H=32,Sq=1,Sk=10377,D=128"))  # 1.7 GB
    assert not brief(parse_shape("B=1,H=16,S=4096,D=128"))


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ("B=3,H=8,Sq=64,Sk=896,D=128,dtype=fp32", "fp32"),
        ("B=8,H=16,S=8192,D=128,dtype=fp32", "others"),
        ("B=14,H=4,Sq=5,Sk=28224,D=160,mask=causal_lower_right", "few rows, large cache"),
        ("B=2,H=32,Sq=1,Sk=768,D=96", "few rows"),
        ("B=1,H=16,Hkv=2,S=690,D=128,mask=causal_lower_right", "causal, one wave"),
        ("B=13,H=5,Hkv=1,S=6080,D=128,mask=causal_lower_right", "others"),
        ("B=16,H=16,S=197,D=64", "brief, few keys"),
        ("B=2,H=16,S=704,D=96", "brief"),
    ],
)
def test_a_problem_is_of_a_kind_by_its_features(shape, kind):
    assert emphasis_of(parse_shape(shape)) == kind


def test_a_problem_stands_for_its_group_with_its_variants():
    groups = by_group(draw_variants(1, 400))
    assert {"16 d64 causal+window+sink", "16 d128 causal+window", "16 d256 causal+softcap"} <= groups.keys()
    for name, problems in groups.items():
        assert all(group_of(p) == name for p in problems)


def test_problems_that_were_timed_are_not_chosen_again():
    drawn = draw(410, 30)
    first = chosen(drawn, [], 10, False)
    assert len(first) == 10 and not set(first) & set(chosen(drawn, first, 10, False))
