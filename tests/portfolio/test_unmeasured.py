"""Problems that no class was measured for: the next wider head's kernels, refined, or the cost model's choice."""

from dataclasses import replace

import pytest

from evoattn.cost.cost import scores
from evoattn.families import registry
from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import lookup
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import load_space
from evoattn.portfolio.pick import class_kernels, pick, portfolio_kernels

H100 = GPUS["h100"]


def test_a_head_dim_that_was_not_measured_takes_the_next_and_says_so():
    found = pick(parse_shape("B=2,H=8,S=2000,D=112,dtype=fp16,mask=full"), H100)
    assert found and found.estimated and "head_dim 112 was not measured" in found.why


def test_what_the_next_head_dim_has_is_refined():
    """Kernels of a head_dim of 32 for long caches have tiles of 512 keys; here are 4."""
    found = pick(lookup("seed_s4_d4"), H100)
    assert found and found.estimated and found.expected_regret is None and "by the cost model" in found.why
    assert found.config["BLOCK_N"] <= 64 < class_kernels(lookup("seed_s4_d4"), H100)[0]["BLOCK_N"]


def test_a_card_that_was_not_tried_takes_the_kernels_as_they_are():
    problem = parse_shape("B=11,H=48,Hkv=12,S=55,D=96")
    cut = replace(H100, name="cut", sm_count=114)
    assert pick(problem, cut).config == class_kernels(problem, cut)[0] and pick(problem, cut).estimated


WIDE = (
    "B=1,H=4,Sq=64,Sk=16,D=512,dtype=fp32",
    "B=1,H=4,S=64,D=2048,dtype=fp32",
    "B=1,H=4,S=16,D=4096,dtype=fp32",
    "B=1,H=4,S=16,D=8192,dtype=fp32",
    "B=3,H=16,Hkv=4,Sq=1,Sk=3000,D=1032,dtype=fp32,layout=bshd",
    "B=2,H=2,S=300,D=3000,dtype=fp32,mask=causal",
    "B=1,H=8,S=1024,D=1024",
    "B=1,H=8,Hkv=2,Sq=5,Sk=4096,D=4096,dtype=bf16,mask=causal_lower_right",
)


@pytest.mark.parametrize("shape", WIDE)
def test_heads_wider_than_all_that_were_measured_get_a_pick_by_the_cost_model(shape):
    problem = parse_shape(shape)
    found = pick(problem, H100)
    assert found and found.estimated and found.expected_regret is None and "cost model" in found.why
    family = registry.lookup(found.family)
    assert family.why_impossible(problem, found.config, H100) is None
    known = [c for c in load_space(found.family, H100).starting_configs() if not family.why_invalid(problem, c, H100)]
    mine, *others = scores(problem, [found.config, *known], H100)
    assert all(mine < 1.05 * other for other in others), "a climb may begin at any of them"
    assert portfolio_kernels(problem, H100)[0] == found.config, "a search begins there"
