"""A family and a mask that CONTRIBUTING's steps add, without a word of them in evoattn: the interpreter proves its
kernels, a search of several problems asks it, a search measures it, and `evoattn.attention` runs what won."""

import math
from pathlib import Path

import pytest
import torch

import evoattn
from evoattn.backends.compiler import compile_source
from evoattn.backends.driver_launch import LaunchConfig
from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.cases import make_case
from evoattn.correctness.validate import check
from evoattn.engine.breeding import Breeder
from evoattn.engine.budget import Budget
from evoattn.engine.groups import Group
from evoattn.engine.tools import Tools
from evoattn.evaluation.tasks import Compiled, HoldFinal
from evoattn.families import registry
from evoattn.families.base import Family, attention_args
from evoattn.families.built import BuiltKernel
from evoattn.families.genes import Genes, gene
from evoattn.families.registry import load_space
from evoattn.families.render import render
from evoattn.families.work import LaunchWork, Step, row_steps
from evoattn.fleet.base import LocalFleet
from evoattn.model.gpu import GPUS
from evoattn.model.launch import KernelLaunch
from evoattn.model.mask import FULL_AND_CAUSAL, Mask
from evoattn.model.records import CompiledKernel, Evaluation, Timing, TrialState
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import spelling
from evoattn.ops.runtime import current
from evoattn.portfolio.pick import pick
from evoattn.portfolio.wins import Wins
from evoattn.samplers.base import SamplerSetup
from evoattn.samplers.registry import make_sampler
from evoattn.search.kept import keep_leader
from evoattn.search.request import SearchPlan, SearchWords
from evoattn.search.setup import PreparedSearch
from evoattn.search.study import Search
from evoattn.storage import Storage
from evoattn.timing.protocol import FinalResult
from tests.added_mask import added
from tests.ops.fake_device import FakeDevice as OpDevice
from tests.ops.fake_device import fake_runtime, near, reference
from tests.search.search_fakes import INFO, FakeCompiler, FakeDevice

GPU, FOLDER = GPUS["h100"], Path(__file__).parent / "added"
PROBLEM = parse_shape("B=2 H=4 Hkv=2 Sq=37 Sk=45 D=64 fp32 mask=causal_lower_right")


class AddedGenes(Genes):
    BLOCK_M: int = gene("rows of a block, a thread each", (32, 64))
    BLOCK_N: int = gene("keys that are in flight at once", (1, 2))


class Added(Family):
    name = "added"
    summary = "a thread for each row"
    devices = "any GPU"
    genes = AddedGenes
    templates = search_spaces = FOLDER
    dtypes = ("fp32",)
    masks = (*FULL_AND_CAUSAL, "near")

    def refuse(self, problem, gpu):
        return None

    def why_not(self, problem, config, gpu, redundant=True):
        return None

    def constants(self, problem, config, gpu):
        mask = problem.masking
        past, ahead = (-1 if keys is None else keys for keys in (mask.past, mask.ahead))
        edges = {"PAST": past, "AHEAD": ahead, "LOWER_RIGHT": mask.ends_lower_right}
        return {"HEAD_DIM": problem.head_dim, **edges}

    def launches(self, problem, config, gpu):
        grid = math.ceil(problem.seqlen_q / config["BLOCK_M"]), problem.heads, problem.batch
        return (KernelLaunch(self.name, grid, (config["BLOCK_M"], 1, 1), 0, attention_args(problem)),)

    def work(self, problem, config, registers=0):
        rows, dim = config["BLOCK_M"], problem.head_dim
        mean, most, count = row_steps(problem, rows, 1)
        step = Step(fp32=4.0 * rows * dim, loaded_bytes=8.0 * rows * dim, waits=500)
        blocks, warps = count * problem.heads * problem.batch, rows // 32
        return (LaunchWork(self.name, blocks, rows, warps, 0, registers or 128, step, mean, most, Step()),)


class Device(OpDevice):
    """One whose launches say the batch as this family does."""

    def launch(self, config, function, arguments, extra):
        self._batch = LaunchConfig.from_address(config.value).grid_z
        return super().launch(config, function, arguments, extra)


@pytest.fixture
def family(monkeypatch):
    monkeypatch.setitem(registry.FAMILIES, "added", Added())
    return registry.lookup("added")


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal_lower_right", "near"])
def test_the_interpreter_finds_its_kernels_right(family, mask):
    with added(Mask("near", past=5, ahead=2)):
        problem = PROBLEM.with_(batch=1, heads=2, kv_heads=1, seqlen_q=21, seqlen_k=27, head_dim=16, mask=mask)
        config = load_space("added", GPU).starting_configs()[0]
        source = render(family, problem, config, GPU).source
        for edit, right in ((source, True), (source.replace("+ AHEAD + 1", "+ AHEAD"), False)):
            kernel = BuiltKernel(family, config, GPU, compile_source(edit, GPU.arch))
            found = check(InterpreterBackend(), kernel, make_case("own", problem, 1, "cpu", double=True))
            assert found.passed == right, found


def test_a_search_of_several_problems_asks_it(family):
    group = Group("32 d64 causal", [PROBLEM], registry.contenders(PROBLEM, GPU))
    breeder = Breeder(group, GPU, 0)
    assert "added" in {made[0].family for _ in range(60) if (made := breeder.propose())}


class Compiler(FakeCompiler):
    """In a process that knows the family as well."""

    def __init__(self, gpu, offline):
        registry.FAMILIES["added"] = Added()
        super().__init__(gpu, offline)

    def answer(self, config):
        return Compiled(CompiledKernel(b"", "", INFO), None, 1.0)


class Clock(FakeDevice):
    """Times every kernel as others, and those of this family as nine times faster."""

    def __init__(self, problem, gpu, cache):
        registry.FAMILIES["added"] = Added()

    def __call__(self, task):
        if isinstance(task, HoldFinal):
            run = {"stage": "final", "run": "one", "cache": "warm"}
            return FinalResult({n: Timing((self.us(k.config),), run) for n, k in task.finalists.items()}, {}, True)
        timing = Timing((self.us(task.kernel.config),), {"stage": "screen", "run": "one", "cache": "warm"})
        return Evaluation(TrialState.COMPLETE, "", INFO, None, (timing,))

    def us(self, config):
        return 1.0 + config["BLOCK_M"] / 64 if config.family == "added" else 18.0


@pytest.mark.slow
def test_attention_runs_what_a_search_measured(family, tmp_path):
    today = pick(PROBLEM.canonical(), GPU)
    its = {name: (spelling(value),) for name, value in today.config.params.items()}
    spaces = {"added": load_space("added", GPU), today.family: load_space(today.family, GPU).restricted(its)}
    storage, wins = Storage.open(str(tmp_path / "db.sqlite")), Wins(tmp_path / "wins.jsonl")
    study = storage.create_study("added", PROBLEM, GPU, False, "random", 0, tuple(spaces), {}, {})
    plan = SearchPlan(PROBLEM, GPU, None, spaces)
    sampler = make_sampler("random", SamplerSetup(spaces, 0, lambda *config: None))
    tools = Tools(make_compiler=Compiler, make_device=Clock)
    Search(storage, study, plan, sampler, LocalFleet(1), tools=tools).run(Budget(trials=9))
    (leader,) = storage.leaderboard(study, 1)
    assert (leader.family, leader.config["BLOCK_M"]) == ("added", 32) and leader.timing.median_us == 1.5
    assert "evoattn.attention runs it from now on" in keep_leader(
        PreparedSearch(storage, study, plan, Budget(1.0), SearchWords()), wins
    )
    storage.close()
    device = Device()
    q, k, v = (torch.randn(PROBLEM.shape(name), generator=torch.Generator().manual_seed(1)) for name in "qkv")
    with current.use(fake_runtime(device, tmp_path, wins.find)):
        answer = evoattn.attention(q, k, v, causal="lower_right", enable_gqa=True)
    assert device.launches[-1].kernel == "added"
    hidden = torch.ones(37, 45, dtype=torch.bool).tril(8)
    assert near(answer, reference(q, k, v, attn_mask=hidden))
