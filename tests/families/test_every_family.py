"""What holds for every family: one kernel for all lengths, and starting configs wherever it runs."""

import pickle
import random
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

from evoattn.families.base import Family
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model.dtype import WIDE_DTYPES
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.mask import MASKS, Mask
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio.workload import draw
from evoattn.samplers.pool import ConfigPool
from evoattn.search.starting import starting_configs
from tests.added_mask import added
from tests.support.own_problems import own_problems

DRAWS = 2
SEED = 29
WITHOUT_START = {("flash_wgmma", "seed_s64")}
"""(family, problem): 64 queries of 64 keys are less than the smallest of its known configs is for."""
FEWEST_STARTS = {"flash_scalar": 1, "flash_wmma": 4, "flash_mma": 5, "three_kernel": 5}
"""Families whose starting configs are meant for every head_dim up to 256, and how many each has at least."""

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
A_CARD_EACH = {spec.arch: spec for spec in sorted(GPUS.values(), key=lambda spec: spec.dram_bytes)}
"""By architecture the card with most memory: nothing else differs but rates and the number of SMs."""
every_gpu = pytest.mark.parametrize("gpu", A_CARD_EACH.values(), ids=[spec.name for spec in A_CARD_EACH.values()])


def supported(family: Family, gpu: GpuSpec) -> list[AttentionProblem]:
    return own_problems(family, gpu)


@every_family
def test_its_space_has_the_sides_of_a_tile(family):
    assert {"BLOCK_M", "BLOCK_N"} <= set(load_space(family.name, GPUS["h100"]).names())


@every_family
def test_its_genes_have_values_of_their_types(family):
    """Those of a class that says their names, types, values and meanings."""
    kinds = get_type_hints(family.genes)
    for p in family.genes.parameters():
        values, kind = set(p.values), kinds[p.name]
        assert p.meaning and len(values) == len(p.values) > 0, p.name
        assert all(type(value) is kind for value in values) if kind in (int, bool) else set(get_args(kind)) == values
        assert p.default is None or p.default in values, p.name


@every_family
def test_it_can_be_pickled(family):
    """It travels to workers by its class."""
    assert type(pickle.loads(pickle.dumps(family))) is type(family)


@every_family
def test_a_new_mask_is_refused_until_the_family_takes_it_up(family):
    gpu = GPUS["h100"]
    with added(Mask("window", past=5, ahead=0)):
        served = [p.with_(mask="window") for p in supported(family, gpu)]
        assert served
        for p in served:
            refused = f"{family.name} takes the masks full, causal_upper_left and causal_lower_right, not window."
            assert family.why_unsupported(p, gpu) == refused
            for c in load_space(family.name, gpu).starting_configs()[:3]:
                assert family.why_invalid(p, c, gpu) == family.why_impossible(p, c, gpu) == refused


@pytest.mark.slow
@every_family
def test_a_kernel_serves_all_lengths(family):
    """One source for every problem with the same head_dim, dtype and mask (`Family`)."""
    gpu = GPUS["h100"]
    space = load_space(family.name, gpu)
    for p in (named.with_(mask=mask) for named in supported(family, gpu) for mask in MASKS):
        pool = ConfigPool(
            {family.name: space},
            lambda name, params, p=p: family.why_invalid(p, KernelConfig(name, params), gpu),
            random.Random(p.seqlen_k),
        )
        other = p.with_(
            batch=3, heads=6, kv_heads=2, seqlen_q=77, seqlen_k=35, layout="bshd" if p.layout == "bhsd" else "bhsd"
        )
        for _ in range(DRAWS):
            c = KernelConfig(*pool.draw())
            assert render(family, p, c, gpu).source == render(family, other, c, gpu).source, (
                f"{p.describe()} {c.describe()}"
            )


@pytest.mark.slow
@every_gpu
@every_family
@pytest.mark.sampled(3)
def test_every_named_problem_has_a_starting_config(family, gpu):
    space = load_space(family.name, gpu)
    for p in supported(family, gpu):
        assert starting_configs(space, p, gpu) or (family.name, p.name) in WITHOUT_START, p.describe()


@pytest.mark.slow
@every_gpu
def test_every_drawn_problem_has_a_starting_config_of_some_family(gpu):
    for p in draw(SEED, 100):
        able = [name for name, family in FAMILIES.items() if family.why_unsupported(p, gpu) is None]
        assert any(starting_configs(load_space(name, gpu), p, gpu) for name in able), p.describe()


def test_many_tiles_begin_with_large_ones_and_few_tiles_with_a_split():
    space, gpu = load_space("flash_wgmma", GPUS["h100"]), GPUS["h100"]
    many = starting_configs(space, AttentionProblem(8, 32, 32, 4096, 4096, 64), gpu)[0]
    few = starting_configs(space, AttentionProblem(1, 2, 2, 512, 512, 64), gpu)[0]
    assert many["BLOCK_M"] * many["BLOCK_N"] > few["BLOCK_M"] * few["BLOCK_N"]
    assert few["KEY_SPLIT"] > 1 == many["KEY_SPLIT"]


@pytest.mark.slow
@every_gpu
@pytest.mark.parametrize("name", FEWEST_STARTS)
@pytest.mark.sampled(3)
def test_starting_configs_are_valid_at_every_head_dim(name, gpu):
    family, space = FAMILIES[name], load_space(name, gpu)
    for dtype in set(WIDE_DTYPES).intersection(family.dtypes):
        for head_dim in range(16, 257, 8):
            for mask in ("full", "causal_upper_left"):
                p = AttentionProblem(1, 4, 2, 4096, 4096, head_dim, dtype, mask)
                assert len(starting_configs(space, p, gpu)) >= FEWEST_STARTS[name], p.describe()


@pytest.mark.slow
@every_family
@pytest.mark.sampled(2)
def test_a_source_does_not_depend_on_the_number_of_sms(family):
    """Only launches do, so that a recorded or exported source is that of every card of its architecture."""
    gpu = GPUS["h100"]
    space, few = load_space(family.name, gpu), replace(gpu, sm_count=3)
    for p in supported(family, gpu):
        for c in starting_configs(space, p, gpu):
            assert render(family, p, c, gpu) == render(family, p, c, few), f"{p.describe()} {c.describe()}"
