"""What cannot be is less than what a search passes over, and is what a card or a head_dim forbids."""

import random

import pytest

from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import parse_shape
from evoattn.model.space import KernelConfig, load_space

SHAPES = (
    "B=1,H=2,S=37,D=64,dtype=bf16,mask=full",
    "B=4,H=16,S=4096,D=64,dtype=bf16,mask=full",
    "B=2,H=8,Hkv=2,Sq=1,Sk=9000,D=128,dtype=bf16,mask=full",
    "B=1,H=4,S=700,D=128,dtype=fp32,mask=causal_lower_right",
)
RARELY_VALID = ("three_kernel", "large_head_mma", "flash_wmma", "large_head")
"""Of 2,000 random configs of these, none may be merely redundant."""


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_impossible_is_invalid_too(family, shape):
    problem, gpu, rng = parse_shape(shape), GPUS["h100"], random.Random(shape)
    space = load_space(family.name, gpu)
    only_redundant = 0
    for _ in range(2000):
        config = KernelConfig(family.name, {p.name: rng.choice(p.values) for p in space.parameters})
        impossible, invalid = family.why_impossible(problem, config, gpu), family.why_invalid(problem, config, gpu)
        assert invalid or not impossible, (config, impossible)
        only_redundant += bool(invalid and not impossible)
    supported = not family.why_unsupported(problem, gpu)
    assert only_redundant or not supported or family.name in RARELY_VALID


def test_a_balanced_schedule_cannot_count_more_tiles_than_a_word_holds():
    family, gpu = FAMILIES["flash_wgmma"], GPUS["h100"]
    config = next(
        KernelConfig("flash_wgmma", params | {"BLOCK_N": 80})
        for params in load_space("flash_wgmma", gpu).starting
        if params["SCHEDULE"] == "balanced"
    )
    longest = parse_shape("B=1,H=1,Sq=64,Sk=2700000,D=64,dtype=bf16,mask=full")
    assert "counts at most" in family.why_impossible(longest, config, gpu)
    assert not family.why_impossible(longest.with_(seqlen_k=2600000), config, gpu)
