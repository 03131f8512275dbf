"""A fault that once passed the tests: a kept choice that cannot serve the very problem is picked."""

from evoattn.families import registry
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import load_space
from evoattn.portfolio.canonical import canonical
from evoattn.portfolio.climb import Climbed
from evoattn.portfolio.climb_cache import ClimbCache
from evoattn.portfolio.pick import lasting_pick, pick


def test_what_is_picked_can_serve_the_very_problem():
    problem, gpu = AttentionProblem(1, 8, 8, 512, 512, 64, "fp16"), GPUS["l4"]
    config = load_space("flash_wgmma", GPUS["h100"]).starting_configs()[0]
    assert registry.lookup("flash_wgmma").why_impossible(problem, config, gpu)
    climbs = ClimbCache()
    climbs.add((canonical(problem), gpu), Climbed(config, 1.0, 1))
    assert lasting_pick(problem, gpu, climbs).config == config
    picked = pick(problem, gpu, climbs)
    assert not registry.lookup(picked.family).why_impossible(problem, picked.config, gpu)
