"""A bench whose compiler and device are fakes: they compile and time nothing."""

import os
from contextlib import contextmanager
from dataclasses import replace

from evoattn.bench.run import Bench
from evoattn.engine.tools import Tools
from evoattn.evaluation.process import Handler
from evoattn.evaluation.tasks import Compiled, Evaluate, Rendered
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model import gpu
from evoattn.model.gpu import DetectedDevice
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, CompileInfo, Evaluation, Timing, TrialState
from evoattn.peers.labels import PEER_NAMES
from evoattn.search.starting import starting_configs
from evoattn.timing.protocol import FinalResult

PROBLEM = AttentionProblem(1, 4, 4, 256, 256, 64, name="here")
GPU = gpu.GPUS["h100"]
CONFIGS = [
    c
    for c in starting_configs(load_space("flash_mma", GPU), PROBLEM, GPU)
    if not FAMILIES["flash_mma"].why_invalid(PROBLEM, c, GPU)
]


def timing(us: float, stage: str, run: str) -> Timing:
    return Timing((us * 0.9, us, us * 1.1), {"stage": stage, "run": run})


class FakeCompiler(Handler):
    """Takes all but flash_wmma."""

    def __init__(self, gpu, offline):
        self.gpu = gpu

    def __call__(self, task):
        made = Compiled(CompiledKernel(b"", "", CompileInfo(registers=64)), None)
        if task.family.name == "flash_wmma":
            made = Compiled(None, Evaluation(TrialState.COMPILE_ERROR, "no header:\n" + 200 * "x"))
        return Rendered.of(task, task.candidate, self.gpu, made)


class FakeDevice(Handler):
    """Slower by BLOCK_M; kernels of flash_scalar prove wrong in the final, those of three_kernel fail in it."""

    def __init__(self, problem, gpu, cache):
        pass

    def __call__(self, task):
        return self.evaluate(task.task) if isinstance(task.task, Evaluate) else self.final(task.task)

    def evaluate(self, task):
        alone = timing(task.kernel.config["BLOCK_M"], "screen", "alone")
        return Evaluation(TrialState.COMPLETE, "", CompileInfo(registers=64), timings=(alone,))

    def final(self, task):
        times = {name: timing(f.config["BLOCK_M"], "final", "F") for name, f in task.finalists.items()}
        for name, finalist in task.finalists.items():
            if finalist.family.name == "flash_scalar":
                times[name].protocol["disqualified"] = "In the final: two outputs differ."
            if finalist.family.name == "three_kernel":
                times[name] = Timing.out("The launch failed.", disqualified=True)
        return FinalResult(
            times | {"fa4": timing(100.0, "final", "F")}, {"fa3": "flash-attn-3 is not installed (no vllm)."}
        )


class DiesInFinals(FakeDevice):
    """Each time."""

    def final(self, task):
        os._exit(3)


class KnowsAllPeers(FakeDevice):
    """Every peer that is asked has a time."""

    def final(self, task):
        answer = super().final(task)
        theirs = {name: timing(100.0, "final", "F") for name in PEER_NAMES if name not in task.refused}
        return answer._replace(timings=answer.timings | theirs, refusals={})


class DoubtsItself(FakeDevice):
    """Says of its first verdict that it may be the process's fault; a second one stands."""

    verdicts = 0

    def evaluate(self, task):
        self.verdicts += 1
        state = TrialState.WRONG_RESULT if self.verdicts == 1 else TrialState.COMPLETE
        return replace(super().evaluate(task), state=state, doubtful=self.verdicts == 1)


class AlwaysDoubtsItself(FakeDevice):
    """Says so of every verdict."""

    def evaluate(self, task):
        return Evaluation(TrialState.WRONG_RESULT, "It differs.", doubtful=True)


def record(storage, config, us, problem=PROBLEM, name="s"):
    study = storage.find_study(name) or storage.create_study(
        name, problem, GPU, False, "genetic", 7, ("flash_mma",), {}, {}
    )
    candidate = render(FAMILIES[config.family], problem, config, GPU)
    return storage.record(
        study, config, candidate, Evaluation(TrialState.COMPLETE, timings=(timing(us, "screen", "alone"),))
    )


@contextmanager
def bench_on(device, **options):
    here = DetectedDevice(0, "NVIDIA H100", (9, 0), "13.0")
    made = Bench([], GPU, here, 1, 2, Tools(make_compiler=FakeCompiler, make_device=device), **options)
    try:
        yield made
    finally:
        made.close()


def run(bench, storage, configs=()):
    bench.storages = [storage]
    return next(bench.run([PROBLEM], lambda problem: list(configs)))
