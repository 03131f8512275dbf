"""A rule in place of the portfolio, for device tests that must not depend on one: the first starting config that can
serve the problem."""

from functools import cache

from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.search.starting import starting_configs
from tests.ops.fake_device import Pick

LATENT = ("latent_wgmma", "latent_columns")
ORDER = ("split_kv", "flash_wgmma", "flash_mma", *LATENT, "large_head_mma", "large_head", "flash_scalar")
BACKWARD = tuple(name for name in ("backward_wgmma", "backward_mma", "backward_scalar") if name in FAMILIES)
FEW_QUERIES = 8
"""Up to so many, splitting the keys comes first."""

load = cache(load_space)


def stand_in(problem: AttentionProblem, gpu: GpuSpec) -> Pick | None:
    forward = ORDER if problem.seqlen_q <= FEW_QUERIES else (*ORDER[1:], ORDER[0])
    for name in BACKWARD if problem.op == "backward" else forward:
        family = FAMILIES[name]
        if family.why_unsupported(problem, gpu):
            continue
        for config in starting_configs(load(name, gpu), problem, gpu):
            return Pick(name, config, "the first starting config that can serve it")
    return None
