"""A card that the cost model knows badly: what a calibration has to find out."""

import math

from evoattn.cost.correction import NONE
from evoattn.cost.cost import scores
from evoattn.engine.tools import Tools
from evoattn.evaluation.process import Handler
from evoattn.evaluation.tasks import Compiled, OnProblem, Rendered, Surveyed
from evoattn.model.gpu import GPUS
from evoattn.model.records import CompiledKernel, CompileInfo, Timing
from evoattn.portfolio.calibrate import Wanted, calibrate
from evoattn.timing.protocol import FinalResult

CARD = GPUS["l4"]
SLOW = 1.6
"""What kernels of wide tiles of keys take beyond their score, which the model does not know."""


def card_us(problem, config) -> float:
    """The time that the card takes."""
    slow = SLOW if config.params.get("BLOCK_N", 0) in (64, 128) else 1.0
    (score,) = scores(problem, [config], CARD, correction=NONE)
    return (score if math.isfinite(score) else 1e4) * slow


class FakeCompiler(Handler):
    """Renders, but compiles nothing."""

    def __init__(self, gpu, offline):
        self.gpu = gpu

    def __call__(self, task):
        answer = Compiled(CompiledKernel(b"code", "", CompileInfo()), None)
        return Rendered.of(task, task.rendered(self.gpu), self.gpu, answer)


class FakeDevice(Handler):
    """Answers as the GPU process does; SDPA takes what it takes, whatever the problem."""

    def __init__(self, problem, gpu, cache):
        pass

    def __call__(self, task):
        if isinstance(task, OnProblem):
            times = {
                name: Timing((card_us(task.problem, kernel.config),), {})
                for name, kernel in task.task.finalists.items()
            }
            theirs = {name: Timing((1e6,), {}) for name in ("flash", "efficient") if name not in task.task.refused}
            return FinalResult(times | theirs, {})
        return Surveyed(tuple((card_us(problem, task.kernel.config), False) for problem in task.problems))


TOOLS = Tools(make_compiler=FakeCompiler, make_device=FakeDevice)


def run(seconds: float) -> None:
    """Calibrate the card, for a process that may be killed."""
    calibrate(Wanted(seconds, ("plain",), jobs=1), CARD, lambda text: print(text, flush=True), TOOLS)
