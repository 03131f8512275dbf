"""A portfolio has no classes in which PyTorch was faster."""

import pytest

from evoattn.model.shape_text import parse_shape
from evoattn.portfolio.behind import beside_pytorch, faster
from evoattn.portfolio.campaign import Part, card
from evoattn.portfolio.engine.kernel import Group

MANY, DECODE = (parse_shape(f"B=4,H=32,{lengths},D=512,dtype=fp32,mask=full") for lengths in ("S=2000", "Sq=1,Sk=2000"))
CLASSES = {"many": 1, "many-brief": 2, "decode": 3, "few": 4, "many-grouped": 5}


def ratios(*rows):
    peers = {str(index): times for index, (_, times) in enumerate(rows)}
    group = Group("32 d512 full", [problem for problem, _ in rows], ())
    return beside_pytorch([Part(group, {"kernels": [], "us": [], "peers": peers}, card("NVIDIA H200"))])


def test_a_problem_counts_by_the_backend_that_pytorch_would_choose():
    found = ratios((MANY, {"ours": 8.0, "efficient": 4.0, "math": 2.0}), (MANY, {"ours": 8.0, "math": 16.0}))
    assert found == {("32", "d512", "many", ""): pytest.approx(1.0)}
    assert not ratios((MANY, {"ours": 8.0}))


def test_kinds_that_are_behind_have_no_class_in_any_mask_and_beside_them_only_those_known_to_be_ahead():
    found = ratios((MANY, {"ours": 8.0, "efficient": 4.0}), (DECODE, {"ours": 1.0, "math": 3.0}))
    assert faster("32 d512 causal", CLASSES, found) == {"decode": 3}
    assert faster("16 d512 causal", CLASSES, found) == CLASSES, "of other bits nothing is known"
    assert faster("32 d512 full", CLASSES, ratios((DECODE, {"ours": 1.0, "math": 3.0}))) == CLASSES
