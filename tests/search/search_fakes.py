"""Worker processes that compile and time nothing.

They import no torch, so that one starts in a tenth of a second."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

from evoattn.evaluation.process import Handler
from evoattn.evaluation.tasks import Compiled, Gauge, HoldFinal, Rendered
from evoattn.model.records import CompiledKernel, CompileInfo, Evaluation, Timing, TrialState
from evoattn.timing.protocol import FinalResult

INFO = CompileInfo(registers=64)


def cost(params: dict) -> float:
    return 10.0 + abs(params["BLOCK_M"] - 64) + abs(params["BLOCK_N"] - 64) + params["STAGES"]


class FakeCompiler(Handler):
    """Renders, but compiles nothing; some configs hang."""

    def __init__(self, gpu, offline):
        self.gpu, self.offline = gpu, offline

    def __call__(self, task):
        return Rendered.of(task, task.rendered(self.gpu), self.gpu, self.answer(task.config))

    def answer(self, config):
        if config["WARPS"] == 3:
            time.sleep(60)
        if config["WARPS"] == 6:
            return Compiled(None, Evaluation(TrialState.COMPILE_ERROR, "No such instruction."), None)
        if self.offline:
            return Evaluation(TrialState.ESTIMATED, "Never timed.", INFO, relative_cost=cost(config.params))
        return Compiled(CompiledKernel(b"", "", INFO), None, cost(config.params))


class FakeDevice(Handler):
    """Times nothing; some configs kill the process, hang, or lose the context."""

    def __init__(self, problem, gpu, cache):
        pass

    def __call__(self, task):
        if isinstance(task, HoldFinal):
            run = {"stage": "final", "run": "final" if task.finalists else "first"}
            timings = {name: Timing((cost(f.config.params),), run) for name, f in task.finalists.items()}
            return FinalResult(timings | {"flash": Timing((30.0,), run)}, {"cudnn": "It needs another head_dim."}, True)
        config = task.kernel.config
        if config["STAGES"] == 3:
            os._exit(7)
        if config["STAGES"] == 4 and config["BLOCK_N"] < 64:
            time.sleep(60)
        if config["KEY_WARPS"] == 2:
            self.broken = True
            return Evaluation(TrialState.LAUNCH_ERROR, "The kernel broke the CUDA context.", INFO)
        timing = Timing((cost(config.params),), {"stage": "screen", "run": str(config.id)})
        return Evaluation(TrialState.COMPLETE, "", INFO, None, (timing,))


class DiesInFinals(FakeDevice):
    """A worker killed from outside at its first two measurements of the peers, and at its first final with
    candidates."""

    def __call__(self, task):
        if isinstance(task, HoldFinal):
            kind = "final" if task.finalists else "peers"
            deaths = Path(os.environ["DEATHS"], kind)
            times = len(deaths.read_text()) if deaths.exists() else 0
            if times < {"peers": 2, "final": 1}[kind]:
                deaths.write_text("x" * (times + 1))
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(task)


class DiesOfAFinalist(FakeDevice):
    """A worker that the first finalist kills at its turn, each time."""

    def __call__(self, task):
        if isinstance(task, HoldFinal):
            for name in task.finalists:
                self.report(name)
                if name == "1":
                    os._exit(3)
        return super().__call__(task)


class SlowToStart(FakeDevice):
    """A worker that takes longer to come up than a small budget is long."""

    def __init__(self, problem, gpu, cache):
        time.sleep(1.0)


class WaitsForAFile(FakeDevice):
    """A worker that is up once the file exists."""

    def __init__(self, problem, gpu, cache):
        while not Path(os.environ["START"]).exists():
            time.sleep(0.01)


class DoubtsItself(FakeDevice):
    """Gives `verdicts` doubtful verdicts on each candidate before one that stands; each tells which one it is."""

    verdicts = 1

    def __init__(self, problem, gpu, cache):
        self.counts = Counter()

    def __call__(self, task):
        if isinstance(task, HoldFinal):
            return super().__call__(task)
        config = task.kernel.config
        self.counts[config.id] += 1
        if self.counts[config.id] > self.verdicts:
            return super().__call__(task)
        return Evaluation(TrialState.WRONG_RESULT, f"Verdict {self.counts[config.id]}.", INFO, doubtful=True)


class AlwaysDoubtsItself(DoubtsItself):
    verdicts = 99


class CloseFinals(FakeDevice):
    """Trial 1 leaves the final without a time, all others tie but the last."""

    def __call__(self, task):
        if not isinstance(task, HoldFinal) or not task.finalists:
            return super().__call__(task)
        names = sorted(task.finalists, key=int)
        run = {"stage": "final", "run": "close"}
        timings = {name: Timing((20.0,) * 25, run) for name in names}
        timings |= {names[-1]: Timing((40.0,) * 25, run), names[1]: Timing((19.999,) * 25, run)}
        timings[names[0]] = Timing.out("It needs more device memory than is free.", disqualified=False)
        return FinalResult(timings, {"cudnn": "It needs another head_dim."})


class FakeBoard(FakeDevice):
    """A GPU whose name says how much longer than others it takes for all that it times: `slow-1.25`, `fast-1`."""

    seconds = 0.0
    """Each candidate takes this long to evaluate."""

    def __init__(self, problem, gpu, cache):
        self.name = os.environ["CUDA_VISIBLE_DEVICES"]
        self.factor = float(self.name.rpartition("-")[2])

    def __call__(self, task):
        if isinstance(task, HoldFinal):
            return super().__call__(task)
        time.sleep(self.seconds)
        us = cost(task.kernel.config.params) * self.factor
        timing = Timing((us,), {"stage": "screen", "run": self.name})
        return timing if isinstance(task, Gauge) else Evaluation(TrialState.COMPLETE, "", INFO, None, (timing,))


class SlowBoard(FakeBoard):
    """It is up when all are whose names lie in a folder: a search begins with those that are up, and a busy machine may
    take longer to start the last one than the search takes."""

    seconds = 0.1

    def __init__(self, problem, gpu, cache):
        super().__init__(problem, gpu, cache)
        missing = Path(os.environ["MISSING"])
        (missing / self.name).unlink(missing_ok=True)
        given_up = time.monotonic() + 60
        while any(missing.iterdir()) and time.monotonic() < given_up:
            time.sleep(0.01)


class KilledBoard(FakeBoard):
    """A worker that something else kills at its third task, once per board and never twice at one candidate."""

    def __call__(self, task):
        if not isinstance(task, HoldFinal):
            note = Path(os.environ["DEATHS"], self.name)
            seen = note.read_text().split() if note.exists() else []
            note.write_text(" ".join([*seen, task.kernel.config.id]))
            victims = [other.read_text().split()[2:3] for other in note.parent.iterdir()]
            if len(seen) == 2 and victims.count([task.kernel.config.id]) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(task)


class NeverGauges(FakeBoard):
    """No board can time the reference again."""

    def __call__(self, task):
        if isinstance(task, Gauge):
            raise RuntimeError("no memory is left")
        return super().__call__(task)
