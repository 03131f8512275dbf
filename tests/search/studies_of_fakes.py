"""Searches whose workers are fakes (search_fakes.py)."""

from collections import Counter

from evoattn.engine.tools import Tools
from evoattn.families.registry import FAMILIES, load_space
from evoattn.fleet.base import LocalFleet
from evoattn.model import gpu
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel
from evoattn.model.space import KernelConfig
from evoattn.samplers.base import SamplerSetup
from evoattn.samplers.registry import make_sampler
from evoattn.search.request import SearchPlan
from evoattn.search.study import Search
from tests.search.search_fakes import INFO, FakeCompiler, FakeDevice

PROBLEM = AttentionProblem(1, 4, 4, 256, 256, 64)
GPU = gpu.GPUS["h100"]


def why_invalid(family: str, params: dict) -> str | None:
    return FAMILIES[family].why_invalid(PROBLEM, KernelConfig(family, params), GPU)


def fakes(device=FakeDevice, **limits) -> Tools:
    """No compiler, and `device` for a GPU worker."""
    return Tools(
        compile=lambda candidate: CompiledKernel(b"", "", INFO),
        make_compiler=FakeCompiler,
        make_device=device,
        **limits,
    )


def space_of(**choices: str):
    """flash_mma's space, restricted to values separated by commas."""
    space = load_space("flash_mma", GPU)
    return {"flash_mma": space.restricted({name: tuple(v.split(",")) for name, v in choices.items()})}


def make_search(storage, spaces, tools, jobs=1, offline=False, sampler="random", boards=("",)):
    """A search of the study `fake`, new or resumed."""
    study = storage.find_study("fake") or storage.create_study(
        "fake", PROBLEM, GPU, offline, sampler, 0, tuple(spaces), {}, {}
    )
    made = make_sampler(sampler, SamplerSetup(spaces, 0, why_invalid))
    return Search(storage, study, SearchPlan(PROBLEM, GPU, None, spaces), made, LocalFleet(jobs, boards), tools=tools)


class Scripted:
    """A sampler that proposes what it was given."""

    def __init__(self, *proposals):
        self.left, self.told, self.rejected = list(proposals), [], Counter()

    def ask(self, n):
        taken, self.left = self.left[:n], self.left[n:]
        return taken

    def tell(self, proposal, trial):
        self.told.append((proposal, trial))

    def restore(self, trials):
        pass
