"""Where climbs begin beside the kernels of a class: each is valid, and keys are shared out among idle SMs."""

from __future__ import annotations

from evoattn.families import registry
from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import parse_shape
from evoattn.model.space import KernelConfig, load_space
from evoattn.portfolio.refine import all_genes
from evoattn.portfolio.starts import other_shapes

H100 = GPUS["h100"]
SPACE = load_space("flash_wgmma", H100)
GENES = all_genes(SPACE)
LONG = parse_shape("B=1,H=20,Sq=256,Sk=11546,D=160,dtype=bf16,mask=causal_lower_right")
MANY = parse_shape("B=33,H=64,Hkv=8,S=1280,D=64,dtype=fp16,mask=full")


def started(problem):
    start = KernelConfig("flash_wgmma", SPACE.starting_configs()[0].params)
    return other_shapes(start, problem, H100, GENES)


def test_few_tiles_of_rows_share_their_keys_among_the_sms():
    """40 tiles of 128 rows on 132 SMs: three blocks each."""
    shapes = [(c["BLOCK_M"], c["KEY_SPLIT"]) for c in started(LONG)]
    assert (128, 3) in shapes and not any(m == 128 and s > 3 for m, s in shapes)


def test_many_tiles_do_not():
    found = started(MANY)
    assert {c["KEY_SPLIT"] for c in found} == {1} and {c["GROUP_ROWS"] for c in found} == {False, True}
    assert len({c["BLOCK_M"] for c in found}) > 2


def test_all_are_valid_and_have_known_values():
    for problem in (LONG, MANY):
        for config in started(problem):
            assert registry.lookup(config.family).why_invalid(problem, config, H100) is None
            assert all(value in GENES[name] for name, value in config.params.items())


def test_other_families_and_unknown_genes_have_none():
    assert other_shapes(KernelConfig("flash_mma", {}), LONG, H100, GENES) == []
    assert other_shapes(SPACE.starting_configs()[0], LONG, H100, {}) == []
