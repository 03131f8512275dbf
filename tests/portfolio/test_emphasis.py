"""Problems on which picks lose most come more often than they are drawn."""

from __future__ import annotations

from collections import Counter

import pytest

from evoattn.portfolio.emphasis import KINDS, emphasized, kind_of
from evoattn.portfolio.workload import draw


def test_each_kind_has_its_part():
    found = emphasized((p for seed in range(400, 406) for p in draw(seed, 60)), 50)
    counts = Counter(map(kind_of, found))
    assert sum(part for part, _ in KINDS.values()) == pytest.approx(1)
    assert counts == {name: round(part * 50) for name, (part, _) in KINDS.items()}
    assert len(set(found)) == len(found)
