"""A fault that once passed the tests: of several launches one that fits nowhere was passed over."""

from dataclasses import replace

from evoattn.cost.fitted import load
from evoattn.cost.physics import physics
from evoattn.families import registry
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import load_space
from evoattn.search.starting import starting_configs


def test_a_call_of_which_one_launch_fits_nowhere_has_no_time():
    gpu, problem = GPUS["h100"], AttentionProblem(1, 8, 8, 256, 256, 64, "fp16")
    config = starting_configs(load_space("three_kernel", gpu), problem, gpu)[0]
    works = registry.lookup("three_kernel").work(problem, config)
    weights = load().weights[config.family]
    assert len(works) > 1 and physics(works, gpu, weights)
    for place in range(len(works)):
        broken = [replace(w, smem_bytes=1 << 30) if i == place else w for i, w in enumerate(works)]
        assert physics(broken, gpu, weights) is None
