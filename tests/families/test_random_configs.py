"""Valid configs, drawn at random over many problems, and of them those that have most pairs of values of genes between
them: each is right on the interpreter, with no race and no access out of bounds."""

import random
from functools import cache

import pytest

from evoattn.evaluation.compile import score
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model import gpu
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, SearchSpace, spelling
from evoattn.samplers.pool import ConfigPool
from tests.families import test_backward_mma, test_large_head, test_large_head_mma, test_split_kv
from tests.families.covering import covering, gene_pairs
from tests.families.on_interpreter import built, judged, small_faults

pytestmark = pytest.mark.slow

DRAWN = 24
"""Configs of a family for each problem, of which one is run there; families take turns on the problems."""
MORE = {"flash_mma": 3, "flash_wgmma": 1}
"""And of these families so many more over all problems."""
OWN = (test_split_kv, test_large_head, test_large_head_mma, test_backward_mma)
"""Whose `DRAWN_FOR` has problems that suit the family, each with a GPU and genes that are fixed."""
ELSEWHERE = {module.FAMILY.name for module in OWN}
FEW = 1
"""Of their configs for each problem."""
PROBLEMS = [
    AttentionProblem(1, 16, 16, 1024, 1024, 64),
    AttentionProblem(1, 8, 8, 512, 512, 64, "bf16", "causal_upper_left"),
    AttentionProblem(2, 8, 2, 77, 1025, 128, "bf16", "causal_lower_right"),
    AttentionProblem(1, 4, 4, 203, 203, 16),
    AttentionProblem(1, 4, 1, 113, 239, 24, "fp16", "full", "bshd"),
    AttentionProblem(2, 2, 2, 799, 127, 32, "bf16", "causal_upper_left", "bshd"),
    AttentionProblem(1, 6, 3, 1, 799, 80, "fp16", "causal_lower_right"),
    AttentionProblem(1, 2, 2, 333, 333, 104, "bf16"),
    AttentionProblem(1, 4, 2, 260, 260, 192, "fp16", "causal_upper_left"),
    AttentionProblem(1, 2, 2, 127, 65, 256, "bf16", "causal_lower_right"),
]


HOPPER_PROBLEMS = [
    AttentionProblem(1, 16, 16, 1024, 1024, 64),
    AttentionProblem(2, 8, 2, 77, 1025, 128, "bf16", "causal_lower_right"),
    AttentionProblem(1, 4, 1, 600, 700, 96, "fp16", "causal_upper_left", "bshd"),
    AttentionProblem(1, 2, 2, 333, 203, 200, "bf16"),
    AttentionProblem(1, 4, 2, 64, 1500, 64, "fp16", "causal_lower_right"),  # few tiles: KEY_SPLIT up to 4
]


def draw(space: SearchSpace, problem: AttentionProblem, spec: gpu.GpuSpec, count: int, seed: int) -> list[KernelConfig]:
    """`count` valid configs; every refused draw is explained by one sentence."""

    def why_invalid(name, params):
        reason = FAMILIES[name].why_invalid(problem, KernelConfig(name, params), spec)
        assert reason is None or (reason.endswith(".") and "\n" not in reason and len(reason) > 20), reason
        return reason

    pool = ConfigPool({space.family: space}, why_invalid, random.Random(seed))
    return [KernelConfig(*pool.draw(space.family)) for _ in range(count)]


def serving(problem: AttentionProblem, spec: gpu.GpuSpec) -> set[str]:
    """The families that can serve the problem and are drawn from here."""
    return {name for name, f in FAMILIES.items() if name not in ELSEWHERE and not f.why_unsupported(problem, spec)}


def chosen(problems: list[AttentionProblem], space: SearchSpace, spec: gpu.GpuSpec, more: int):
    """Of each problem one config and `more` of them all: (problem, config)."""
    pools = [[(p, config) for config in draw(space, p, spec, DRAWN, seed)] for seed, p in enumerate(problems)]
    found = []
    for pool in pools:
        found = covering(pool, gene_pairs, found, 1)
    return covering([one for pool in pools for one in pool], gene_pairs, found, more)


@cache
def on_l4() -> list[tuple[AttentionProblem, KernelConfig]]:
    spec, found = gpu.GPUS["l4"], []
    for turn, name in enumerate(sorted(set(FAMILIES) - ELSEWHERE)):
        # S in 16 bits is as coarse as the low-precision answer that the rule allows for: single small cases lie just
        # over it, rightly WRONG_RESULT.
        space = load_space(name, spec).restricted({"S_TYPE": ("fp32",)})
        served = [p for i, p in enumerate(PROBLEMS) if i % 2 == turn % 2 and name in serving(p, spec)]
        found += chosen(served, space, spec, MORE.get(name, 0))
    return found


@cache
def on_hopper() -> list[tuple[AttentionProblem, KernelConfig]]:
    """Of families that no older GPU runs, and the wgmma products of three_kernel."""
    spec, found = gpu.GPUS["h100"], []
    products = {"PRODUCT": ("wgmma",), "SOFTMAX": ("tiles", "tiles_late")}
    spaces = [load_space("three_kernel", spec).restricted(products)]
    for name in set(FAMILIES) - ELSEWHERE - set().union(*(serving(p, gpu.GPUS["l4"]) for p in HOPPER_PROBLEMS)):
        spaces.append(load_space(name, spec))
    for space in spaces:
        problems = [p for p in HOPPER_PROBLEMS if space.family in serving(p, spec)]
        found += chosen(problems, space, spec, MORE.get(space.family, 0))
    return found


def wrong_ones(drawn: list[tuple[AttentionProblem, KernelConfig]], problem: AttentionProblem, spec: gpu.GpuSpec):
    """The configs of the problem that are wrong on every second small case, in turns, or fit on no SM."""
    mine = [(turn % 2, config) for turn, (of, config) in enumerate(drawn) if of == problem]
    assert mine
    found = []
    for turn, config in mine:
        kernel = built(FAMILIES[config.family], problem, config, spec, machine_code=True)
        faults = small_faults(kernel, problem, slice(turn, None, 2))
        if faults or score(config, kernel.compiled.info, problem, spec) is None:
            found.append((config.describe(), faults))
    return found


@pytest.mark.parametrize("problem", PROBLEMS, ids=AttentionProblem.describe)
@pytest.mark.sampled(3)
def test_random_valid_configs_are_right(problem):
    assert not wrong_ones(on_l4(), problem, gpu.GPUS["l4"])


@pytest.mark.parametrize("problem", HOPPER_PROBLEMS, ids=AttentionProblem.describe)
@pytest.mark.sampled(3)
def test_random_valid_configs_are_right_on_hopper(problem):
    assert "flash_wgmma" in {config.family for of, config in on_hopper() if of == problem}
    assert not wrong_ones(on_hopper(), problem, gpu.GPUS["h100"])


@pytest.mark.parametrize(
    ("module", "problem", "spec", "fixed"),
    [
        pytest.param(module, *row, id=f"{module.FAMILY.name}: {row[0].describe()}")
        for module in OWN
        for row in module.DRAWN_FOR
    ],
)
@pytest.mark.sampled(4)
def test_configs_of_few_rows_or_wide_heads_are_right(module, problem, spec, fixed):
    """On the problem itself: the small cases of most configs take long."""
    space = load_space(module.FAMILY.name, spec).restricted({name: (spelling(value),) for name, value in fixed.items()})
    drawn = [(problem, config) for config in draw(space, problem, spec, 4 * FEW, problem.seqlen_k)]
    for _, config in covering(drawn, gene_pairs, most=FEW):
        kernel = built(module.FAMILY, problem, config, spec, machine_code=module is test_split_kv)
        result = judged(kernel, problem, "large_logits" if module is test_split_kv else "plain")
        assert result.passed, (config.describe(), result.reason)
        # large_head's estimate of registers lets some through that spill: slow, and right
        assert module is not test_split_kv or not kernel.compiled.info.spill_bytes, config.describe()
