"""Two hundred valid configs, drawn at random over ten problems: each is right on the interpreter, with no race and no access out of bounds."""

import os
import random

import pytest

from evoattn import gpu
from evoattn.config import KernelConfig, load_space
from evoattn.families.registry import FAMILIES
from evoattn.problem import AttentionProblem
from evoattn.render import render
from evoattn.samplers.pool import ConfigPool
from evoattn.tasks import COMPILE_SECONDS, CompileHandler
from evoattn.trial import TrialState
from evoattn.worker import Ending, Pool, wait_for_any

GPU = gpu.GPUS["l4"]
A_PROBLEM = 10
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


def draw(family: str, problem: AttentionProblem, count: int, seed: int) -> list[KernelConfig]:
    """`count` valid configs; every refused draw is explained by one sentence."""
    def why_invalid(name, params):
        reason = FAMILIES[name].why_invalid(problem, KernelConfig(name, params), GPU)
        assert reason is None or reason.endswith(".") and "\n" not in reason and len(reason) > 20, reason
        return reason

    pool = ConfigPool({family: load_space(family, GPU)}, why_invalid, random.Random(seed))
    return [KernelConfig(*pool.draw(family)) for _ in range(count)]


@pytest.mark.parametrize("problem", PROBLEMS, ids=AttentionProblem.describe)
def test_random_valid_configs_are_right(problem):
    families = [name for name in ("flash_scalar", "flash_mma") if FAMILIES[name].why_unsupported(problem, GPU) is None]
    tasks = [(render(FAMILIES[f], problem, c, GPU), c) for f in families for c in draw(f, problem, A_PROBLEM, seed=PROBLEMS.index(problem))]
    assert len(tasks) == 2 * A_PROBLEM
    pool, outcomes = Pool(min(4, os.cpu_count()), CompileHandler, (problem, GPU, True)), []
    try:
        while len(outcomes) < 2 * A_PROBLEM:
            for worker in pool.idle():
                if tasks:
                    candidate, config = tasks.pop()
                    worker.submit(config, (candidate, config), 4 * COMPILE_SECONDS)
            wait_for_any(pool.workers, 0.1)
            outcomes += pool.poll()
    finally:
        pool.stop()
    wrong = [
        (outcome.tag.describe(), outcome.value) for outcome in outcomes
        if outcome.ending is not Ending.RESULT or outcome.value.state is not TrialState.ESTIMATED
    ]
    assert not wrong
