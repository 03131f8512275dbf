"""Kernels of every family as they would lie in a database, rendered from today's templates."""

from evoattn.export.recorded import Recorded
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model import gpu
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Evaluation, TrialState
from evoattn.model.space import KernelConfig, Value
from evoattn.storage import Storage

PROBLEMS = {
    "flash_wgmma": AttentionProblem(2, 8, 2, 300, 500, 128, "bf16", lse=True),
    "large_head": AttentionProblem(1, 4, 4, 64, 200, 1024, "fp32"),
    "large_head_mma": AttentionProblem(1, 4, 4, 64, 200, 512, "fp16"),
    "split_kv": AttentionProblem(2, 8, 2, 3, 4000, 64, "bf16", "causal_lower_right"),
}
ANY = AttentionProblem(2, 8, 2, 300, 500, 64, "fp16", "causal_upper_left")
HOPPER_GENES: dict[str, dict[str, Value]] = {
    "split_kv": {"LOAD": "tma", "DEPENDENT_LAUNCH": "early", "MERGE": "kernel"},
    "three_kernel": {"PRODUCT": "wgmma"},
    "flash_wgmma": {"SCHEDULE": "balanced"},
}
"""Genes that only sm_90 has, of kernels that are built for it."""


def a_config(family: str, problem: AttentionProblem, spec: gpu.GpuSpec, genes: dict[str, Value]) -> KernelConfig:
    """A config of the family that can serve the problem, with these genes, near a starting one where that has them."""
    import random

    from evoattn.model.space import spelling
    from evoattn.samplers.base import ConfigPool

    space = load_space(family, spec).restricted({name: (spelling(value),) for name, value in genes.items()})

    def why(name, params):
        return FAMILIES[name].why_impossible(problem, KernelConfig(name, params), spec)

    for config in space.starting_configs():
        if why(family, config.params) is None:
            return config
    drawn = ConfigPool({family: space}, why, random.Random(0)).draw(family)
    assert drawn is not None, f"no {family} with {genes}"
    return KernelConfig(*drawn)


def record(storage: Storage, family: str, gpu_name: str, genes: dict[str, Value] | None = None, **changes):
    """A trial of the family's kernel for that GPU in the database; `changes` are to the family's problem here."""
    spec, problem = gpu.lookup(gpu_name), PROBLEMS.get(family, ANY).with_(**changes)
    config = a_config(family, problem, spec, genes or {})
    candidate = render(FAMILIES[family], problem, config, spec)
    name = f"{family} {gpu_name} {config.id[:8]} {problem.describe()}"
    study = storage.create_study(name, problem, spec, True, "genetic", 0, (family,), {"evoattn": "0"}, {})
    return storage.record(study, config, candidate, Evaluation(TrialState.ESTIMATED), (), "starting")


def recorded(storage: Storage, family: str, gpu_name: str, genes: dict[str, Value] | None = None) -> Recorded:
    return Recorded.read(storage, record(storage, family, gpu_name, genes))
