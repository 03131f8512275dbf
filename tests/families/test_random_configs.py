"""Valid configs, drawn at random over many problems: each is right on the interpreter, with no race and no access out
of bounds."""

import random

import pytest

from evoattn.evaluation.evaluate import evaluate_offline
from evoattn.evaluation.tasks import Compile
from evoattn.families.registry import FAMILIES
from evoattn.model import gpu
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import TrialState
from evoattn.model.space import KernelConfig, SearchSpace, load_space
from evoattn.samplers.pool import ConfigPool

pytestmark = pytest.mark.slow

MANY, FEW = 3, 1
"""Configs per problem: of families whose kernels the interpreter runs soon, and of all others, a new one too."""
COUNTS = {"flash_scalar": MANY, "flash_mma": MANY, "flash_wgmma": MANY}
ELSEWHERE = {"split_kv", "large_head", "large_head_mma"}
"""Families whose own tests draw configs, at problems that suit them."""
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


def wrong_ones(problem: AttentionProblem, spec: gpu.GpuSpec, configs: list[KernelConfig]) -> list[tuple[str, object]]:
    """The configs that do not come out `ESTIMATED`, with what became of them."""
    tasks = [Compile(FAMILIES[c.family], c, problem) for c in configs]
    outcomes = [(task.config, evaluate_offline(task, spec)) for task in tasks]
    return [(c.describe(), outcome) for c, outcome in outcomes if outcome.state is not TrialState.ESTIMATED]


def serving(problem: AttentionProblem, spec: gpu.GpuSpec) -> list[str]:
    """The families that can serve the problem and are drawn from here."""
    return [
        name
        for name, family in FAMILIES.items()
        if name not in ELSEWHERE and family.why_unsupported(problem, spec) is None
    ]


@pytest.mark.parametrize("problem", PROBLEMS, ids=AttentionProblem.describe)
def test_random_valid_configs_are_right(problem):
    spec, seed = gpu.GPUS["l4"], PROBLEMS.index(problem)
    names = serving(problem, spec)
    assert names
    # S in 16 bits is as coarse as the low-precision answer that the rule allows for: single small cases lie just over
    # it, rightly WRONG_RESULT.
    spaces = {name: load_space(name, spec).restricted({"S_TYPE": ("fp32",)}) for name in names}
    configs = [c for name in names for c in draw(spaces[name], problem, spec, COUNTS.get(name, FEW), seed)]
    assert not wrong_ones(problem, spec, configs)


@pytest.mark.parametrize("problem", HOPPER_PROBLEMS, ids=AttentionProblem.describe)
def test_random_valid_configs_are_right_on_hopper(problem):
    """Families that no older GPU runs, and the wgmma products of three_kernel."""
    spec, seed = gpu.GPUS["h100"], HOPPER_PROBLEMS.index(problem)
    names = [name for name in serving(problem, spec) if name not in serving(problem, gpu.GPUS["l4"])]
    assert "flash_wgmma" in names
    configs = [c for name in names for c in draw(load_space(name, spec), problem, spec, COUNTS.get(name, FEW), seed)]
    space = load_space("three_kernel", spec).restricted({"PRODUCT": ("wgmma",), "SOFTMAX": ("tiles", "tiles_late")})
    configs += draw(space, problem, spec, FEW, seed)
    assert not wrong_ones(problem, spec, configs)
