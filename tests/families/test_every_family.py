"""What holds for every family: one kernel for all lengths, and starting configs wherever it runs. NVRTC compiles
starting configs of every family for every architecture in the table, for problems that they serve. What cannot be is
less than what a search passes over, and is what a card or a head_dim forbids."""

import pickle
import random
import re
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import get_args, get_type_hints

import pytest

from evoattn.backends.compiler import compile_candidate
from evoattn.families.base import MOST_ROWS, Family
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model.dtype import DTYPES, WIDE_DTYPES
from evoattn.model.gpu import GPUS, MAX_GRID_YZ, GpuSpec
from evoattn.model.mask import MASKS, Mask
from evoattn.model.paths import TEMPLATES
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from evoattn.portfolio.workload import draw
from evoattn.samplers.base import ConfigPool
from evoattn.search.starting import starting_configs
from tests.added_mask import added
from tests.support.compiles import compile_ptx
from tests.support.own_problems import own_problems

DRAWS = 1
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
    """One source for every problem with the same head_dim, dtype and mask (`Family`); problems have masks in turn."""
    gpu = GPUS["h100"]
    space = load_space(family.name, gpu)
    for p in (named.with_(mask=mask) for named, mask in zip(supported(family, gpu), cycle(MASKS))):
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


PAIRS = [
    (gpu, f) for gpu in A_CARD_EACH.values() for f in FAMILIES.values() if f.devices != "sm_90a" or gpu.arch == "sm_90a"
]
ASKED = re.compile(r"__CUDA_ARCH\w*__\s*(.*)")
HOPPER, CONVERTS_EIGHT_BITS = 900, 890
"""Of `__CUDA_ARCH__`. From the latter on one instruction converts floats of 8 bits; `test_eight_bit_cache.py` runs PTX
of both sides of it."""
SPILLS = 64
"""Bytes per thread that a known-good config may spill on an architecture that it was not tuned for."""


@pytest.mark.slow
@pytest.mark.parametrize("gpu, family", PAIRS, ids=lambda x: getattr(x, "arch", x.name))
@pytest.mark.sampled(5)
def test_starting_configs_compile(gpu, family):
    """One becomes machine code for each architecture, another for each; half of the others become PTX,
    which is all that NVRTC itself makes, for one architecture each."""
    configs, served = load_space(family.name, gpu).starting_configs(), served_by(family, gpu)
    assert len(served) > len(configs) / 3  # some are for shapes that have no name, or cards with more shared memory
    cards = [card for card, other in PAIRS if other is family]
    turn = cards.index(gpu)
    known = list(dict.fromkeys(config.id for card in cards for config, _ in served_by(family, card)))
    for config, problem in served:
        rendered = render(family, problem, config, gpu)
        if config is served[turn % len(served)][0]:
            kernel = compile_candidate(rendered)
            assert kernel.cubin and kernel.info.spill_bytes <= SPILLS, config.describe()
        elif known.index(config.id) % (2 * len(cards)) == 2 * turn:
            assert f".target {gpu.arch}" in compile_ptx(rendered.source, gpu.arch), config.describe()


def test_device_code_asks_for_two_architectures_only():
    """Else PTX for one architecture would say less of the others."""
    asked = [found for path in TEMPLATES.rglob("*") if path.is_file() for found in ASKED.findall(path.read_text())]
    assert set(asked) == {f">= {HOPPER}", f">= {CONVERTS_EIGHT_BITS}"}


@cache
def served_by(family, gpu):
    """The starting configs that serve a named problem, each with the first of those."""
    problems = own_problems(family, gpu)
    configs = load_space(family.name, gpu).starting_configs()
    return [(c, p) for c in configs if (p := first_valid(problems, family, c, gpu))]


def first_valid(problems, family, config, gpu):
    """The first problem that the config serves."""
    return next((p for p in problems if family.why_invalid(p, config, gpu) is None), None)


SHAPES = (
    "B=1,H=2,S=37,D=64,dtype=bf16,mask=full",
    "B=4,H=16,S=4096,D=64,dtype=bf16,mask=full",
    "B=2,H=8,Hkv=2,Sq=1,Sk=9000,D=128,dtype=bf16,mask=full",
    "B=1,H=4,S=700,D=128,dtype=fp32,mask=causal_lower_right",
)
WITH_REDUNDANT = (
    "append_kv", "backward_mma", "backward_scalar", "backward_wgmma", "flash_mma", "flash_scalar", "flash_wgmma",
    "fp8_wgmma", "latent_wgmma", "merge_parts", "quantize", "split_kv",
)  # fmt: skip
"""Of 2,000 random configs of these some are merely redundant."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_impossible_is_invalid_too(family, shape):
    problem, gpu, rng = parse_shape(shape), GPUS["h100"], random.Random(shape)
    space = family.space(problem, gpu)
    only_redundant = 0
    for _ in range(2000):
        config = KernelConfig(family.name, {p.name: rng.choice(p.values) for p in space.parameters})
        impossible, invalid = family.why_impossible(problem, config, gpu), family.why_invalid(problem, config, gpu)
        assert invalid or not impossible, (config, impossible)
        only_redundant += bool(invalid and not impossible)
    supported = not family.why_unsupported(problem, gpu)
    assert only_redundant or not supported or family.name not in WITH_REDUNDANT


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


@pytest.mark.parametrize(
    ("problem", "word"),
    [
        (AttentionProblem(1, 8, 2, 1 << 29, 64, 8), "2147483648 packed rows"),
        (AttentionProblem(1, 1, 1, 1_200_000_000, 1_200_000_000, 8, window="0:999999999"), "keys behind the first"),
    ],
    ids=["rows", "a window of late rows"],
)
def test_split_kv_counts_rows_and_keys_in_int32(problem, word):
    """The end of the last split would be negative, and its keys left out."""
    family, gpu = FAMILIES["split_kv"], GPUS["h100"]
    genes = {"BLOCK_M": 8, "BLOCK_N": 64, "WARPS": 2, "STAGES": 1, "SPLITS": 3, "MERGE": "last_block"}
    config = KernelConfig("split_kv", load_space("split_kv", gpu).starting[0] | genes)
    assert word in family.why_impossible(problem, config, gpu)
    half = problem.with_(seqlen_q=-(-problem.seqlen_q // 2), seqlen_k=-(-problem.seqlen_k // 2))
    assert "int32" not in (family.why_impossible(half, config, gpu) or "")


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_no_family_takes_sequences_that_an_int32_does_not_count_to_the_end_of_the_last_tile(family):
    gpu, dtype = GPUS["h200"], family.dtypes[0]
    longest = {"seqlen_k": (1 << 32) + 8}
    of_four_bytes = DTYPES[dtype].bytes == 4  # 64 GiB and more
    for sizes in ({"seqlen_k": MOST_ROWS + 8}, {"seqlen_q": MOST_ROWS + 8}, *[longest] * (not of_four_bytes)):
        problem = AttentionProblem(1, 1, 1, 64, 64, 4, dtype, op=family.operations[0]).with_(**sizes)
        assert "int32" in family.why_unsupported(problem, gpu)
        fewer = dict.fromkeys(sizes, MOST_ROWS)
        assert "int32" not in (family.why_unsupported(problem.with_(**fewer), gpu) or "")


def test_a_cluster_of_one_block_is_impossible():
    """Few keys come to one split: where that was merely redundant, the op took kernels that do not compile."""
    family, gpu, problem = FAMILIES["split_kv"], GPUS["h100"], parse_shape("B=1,H=6,Hkv=1,Sq=1,Sk=13,D=64,dtype=bf16")
    genes = {"BLOCK_M": 8, "BLOCK_N": 64, "WARPS": 2, "STAGES": 1, "MERGE": "cluster", "DEPENDENT_LAUNCH": "none"}
    base = load_space("split_kv", gpu).starting[0] | genes
    said = [family.why_impossible(problem, KernelConfig("split_kv", base | {"SPLITS": n}), gpu) for n in (1, 2)]
    assert "SPLITS=1 makes none" in said[0] and said[1] is None


@every_family
@pytest.mark.parametrize(
    "sizes", [dict(heads=65536, kv_heads=65536), dict(batch=65536), dict(seqlen_q=1 << 23)], ids=str
)
def test_grids_end_where_the_device_s_do(family, sizes):
    """A launch that the driver refuses takes the kernel from all calls of the process."""
    gpu, tried = GPUS["h200"], 0
    for named in supported(family, gpu):
        few = {"batch": 1, "heads": 1, "kv_heads": 1, "seqlen_q": 4, "seqlen_k": 64} | sizes
        problem = named.with_(head_dim=min(named.head_dim, 512), **few)
        for config in load_space(family.name, gpu).starting_configs():
            if family.why_impossible(problem, config, gpu) is None:
                tried += 1
                for launch in family.launches(problem, config, gpu):
                    assert launch.grid[0] < 1 << 31 and max(launch.grid[1:]) <= MAX_GRID_YZ, launch.grid
    assert tried or family.why_impossible(problem, config, gpu)
