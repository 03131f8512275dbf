"""append_kv: what it is not for."""

import pytest

from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import ProblemError
from evoattn.model.shape_text import parse_shape

L4, FAMILY = GPUS["l4"], FAMILIES["append_kv"]
STARTS = load_space("append_kv", L4).starting_configs()


def test_what_it_is_not_for():
    with pytest.raises(ProblemError, match="share of columns"):
        parse_shape("B=1,H=2,S=50,D=16,op=append_pairs,seqused=0:9,scale=1.5")
    windowed = parse_shape("B=1,H=2,S=50,D=16,op=append,seqused=0:9,window=9:0")
    assert "window" in (FAMILY.why_unsupported(windowed, L4) or "")
    narrow = parse_shape("B=1,H=2,S=50,D=24,op=append_halves,seqused=0:9")
    assert "divide the columns that turn" in (FAMILY.why_invalid(narrow, STARTS[0], L4) or "")
