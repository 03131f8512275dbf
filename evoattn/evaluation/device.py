"""On the device: validate and time candidates. Every failure becomes a state with a sentence."""

import os
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial

import torch

from evoattn.backends.base import ContextLost, LaunchError, QueuedBackend
from evoattn.correctness.arena import Arena, Vault
from evoattn.correctness.cases import Case, make_case, packed, proof_of, tensors_of, unanswered
from evoattn.correctness.judge import first_wrong
from evoattn.correctness.ladder import Ladder
from evoattn.correctness.validate import OUTSIDE, check, make_arena, run_case
from evoattn.evaluation.memory import Memory
from evoattn.evaluation.tasks import DeviceAnswer, Evaluate, Gauge, HoldFinal, Inspect, Survey, Surveyed
from evoattn.families.built import BuiltKernel
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CheckResult, Evaluation, Timing, TrialState, ValidationReport
from evoattn.model.timeline import mark
from evoattn.peers.table import Peer, peers_of
from evoattn.timing import benchmark
from evoattn.timing.clocks import Clocks
from evoattn.timing.contest import Contest
from evoattn.timing.contestant import Contestant, calls_to_screen
from evoattn.timing.protocol import (
    HOPELESS,
    HOPELESS_US,
    PRUNE_BEYOND,
    RACE,
    REPEAT,
    REPEAT_WITHIN,
    SCREEN,
    CacheMode,
    FinalResult,
    Protocol,
)
from evoattn.timing.timed_run import TimedRun, TimingSetup, why_implausible
from evoattn.timing.timer import GRAPH_UNDER_US, Clock, Timer, repeat


class DeviceEvaluator:
    """Validates and times candidates for one problem on one device. Lives in the worker process.

    `broken` once its CUDA context is lost, or may have been harmed. The inputs' seed is drawn for each process, so that
    no kernel can have been made for them."""

    def __init__(
        self,
        problem: AttentionProblem,
        gpu: GpuSpec,
        cache: CacheMode = "warm",
        backend: QueuedBackend | None = None,
        timer: Timer | None = None,
        report: Callable[[str], None] = lambda name: None,
        peers: Mapping[str, Peer] | None = None,
    ) -> None:
        """`backend` and `timer` are CUDA device 0's unless given. `report` is told whose turn it is in a final;
        `peers` are those of the problem's operation unless given."""
        self.problem, self.gpu, self.cache, self.broken = problem, gpu, cache, False
        self.backend = backend or _cuda_backend()
        dev = self.backend.device
        mark("GPU worker: has a context")
        self.clocks = Clocks(str(torch.cuda.get_device_properties(dev).uuid) if dev.type == "cuda" else "")
        self.seed = int.from_bytes(os.urandom(4))
        self._timer, self._flush = timer or Timer(), benchmark.l2_flush(dev) if cache == "cold" else None
        self._report, self._peers = report, peers_of(problem) if peers is None else peers
        self._known_right: BuiltKernel | None = None

    @cached_property
    def ladder(self) -> Ladder:
        """The small cases, all in one piece of memory, not forty, for the vault to compare."""
        dev = self.backend.device
        wanted = proof_of(self.problem).device_cases(self.problem)
        small = [make_case(name, case, self.seed, dev, kind) for name, case, kind in wanted]
        cases, self._memory = packed(small)
        return Ladder(cases, dev)

    @cached_property
    def own(self) -> Case:
        return make_case("the problem's own shape", self.problem, self.seed, self.backend.device)

    @cached_property
    def fresh(self) -> Case:
        """Other inputs of the same shape."""
        return make_case("fresh inputs after timing", self.problem, self.seed + 1, self.backend.device)

    @cached_property
    def vault(self) -> Vault:
        """All that no kernel is handed and the verdicts on candidates rest on."""
        ladder = self.ladder.tensors
        return Vault([self._memory, *ladder, *tensors_of(self.own), *tensors_of(self.fresh)])

    @cached_property
    def setup(self) -> TimingSetup:
        return self._setup(self.own, self.fresh)

    def _setup(self, own: Case, fresh: Case) -> TimingSetup:
        return TimingSetup(self.backend, self._timer, self.cache, own, fresh, self._flush)

    def prepare(self) -> None:
        """Make all cases now. Else each is made when it is first needed: a final needs no small ones."""
        assert self.vault and self.setup

    def do(self, task: Evaluate | Gauge | HoldFinal | Inspect) -> DeviceAnswer:
        """The answer to a task of the GPU worker."""
        if isinstance(task, Inspect):
            return self.inspect(task.kernel)
        if isinstance(task, Gauge):
            return self.gauge(task.kernel)
        return self.evaluate(task) if isinstance(task, Evaluate) else self.final(task)

    def inspect(self, kernel: BuiltKernel) -> str:
        """The first wrong element in the first case that the kernel fails, in one sentence; empty if there is none."""
        self.broken = True  # a wrong kernel may have written anywhere
        for case in (*self.ladder.cases, self.own):
            result, outputs = run_case(self.backend, kernel, case, repeat=True)
            if not result.passed:
                sentence = first_wrong(outputs, case.answer) if outputs else ""
                return f"In the case {case.name!r} ({case.problem.describe()}): {sentence}" if sentence else ""
        return ""

    def gauge(self, kernel: BuiltKernel) -> Timing:
        """A time of a kernel that was found right. The process is `broken` if that raises."""
        self.broken = True
        contestant = TimedRun(self.setup, kernel, None, self.timed_arena()).contestant("reference")
        self._capture(contestant, None)
        timing = self._time(contestant, REPEAT)
        self.broken = False
        return timing

    def evaluate(self, task: Evaluate) -> Evaluation:
        """The small cases, a race against `task.best_us`, and for a candidate near it the problem's own shape twice,
        the timing, the check of the work that was timed, plausibility."""
        vault = self.vault  # made before the candidate runs
        started = time.perf_counter()
        checks: list[CheckResult] = []
        timings: list[Timing] = []
        doubtful = False
        try:
            state, reason = self._climb(task, checks, timings)
            if not vault.intact():
                self.broken = True
                state = TrialState.WRONG_RESULT
                reason = "The kernel overwrote memory that it was never given: the original inputs, or answers."
            elif state is TrialState.WRONG_RESULT:
                doubtful = not self._is_still_right()
                self.broken = doubtful or OUTSIDE in reason
            elif state is TrialState.COMPLETE and self._known_right is None:
                self._known_right = task.kernel
        except LaunchError as error:
            state, reason, self.broken = TrialState.LAUNCH_ERROR, str(error), not _lives(vault)
        except ContextLost as error:
            self.broken, state, reason = True, TrialState.LAUNCH_ERROR, str(error)
        except RuntimeError as error:  # torch's own complaint about a failed capture or a lost context
            self.broken, state = True, TrialState.LAUNCH_ERROR
            reason = f"Timing failed: {' '.join(str(error).split())[:200]}"
        report = ValidationReport("cuda", tuple(checks), self.seed) if checks else None
        seconds = time.perf_counter() - started
        return Evaluation(
            state, reason, task.kernel.compiled.info, report, tuple(timings), seconds=seconds, doubtful=doubtful
        )

    def _is_still_right(self) -> bool:
        """Whether the first right candidate of this process still is: if not, the process may be at fault, not the
        candidate."""
        known = self._known_right
        return known is None or check(self.backend, known, self.own).passed

    def _climb(self, task: Evaluate, checks: list[CheckResult], timings: list[Timing]) -> tuple[TrialState, str]:
        """The small cases, a race, and for a candidate near the best the problem's own shape and the timing; what they
        find is added to `checks` and `timings`."""
        checks += self.ladder.climb(self.backend, task.kernel)
        if not checks[-1].passed:
            return TrialState.WRONG_RESULT, checks[-1].reason
        run = TimedRun(self.setup, task.kernel, None, self.timed_arena())
        contestant, best_us = run.contestant("candidate"), task.best_us
        raced = None if best_us is None else self._race(contestant, best_us)
        if raced and best_us and raced.median_us > PRUNE_BEYOND * best_us:
            timings.append(raced)
            times = f"{raced.median_us / best_us:.2f} times the best so far"
            return TrialState.PRUNED, f"It takes {times}, and was not checked any further."
        result, outputs = run_case(self.backend, task.kernel, self.own, repeat=True)
        checks.append(result)
        if not result.passed or outputs is None:
            return TrialState.WRONG_RESULT, result.reason
        run.validated(outputs)
        if not contestant.calls:
            self._capture(contestant, None)
        timings.append(self._time(contestant, SCREEN))
        if best_us is None or timings[0].median_us <= best_us * REPEAT_WITHIN:
            timings.append(self._time(contestant, REPEAT))
        checks.append(run.check_work(contestant))
        if not checks[-1].passed:
            return TrialState.WRONG_RESULT, checks[-1].reason
        reason = why_implausible(timings[-1], self.problem, self.gpu)
        return (TrialState.IMPLAUSIBLE, reason) if reason else (TrialState.COMPLETE, "")

    def _race(self, contestant: Contestant, best_us: float) -> Timing:
        """A time of few samples; of a hopeless candidate that of one call."""
        if contestant.us > max(HOPELESS_US, HOPELESS * best_us):
            contestant.capture(1)
            return benchmark.screen(contestant, SCREEN, self.cache, self.clocks, 1)
        self._capture(contestant, best_us)
        return benchmark.screen(contestant, SCREEN, self.cache, self.clocks, RACE)

    def _capture(self, contestant: Contestant, best_us: float | None) -> None:
        contestant.capture(calls_to_screen(contestant.us, best_us, self.setup.timer.launch_us, self.cache))

    def _time(self, contestant: Contestant, protocol: Protocol) -> Timing:
        """One candidate's time, alone."""
        return benchmark.screen(contestant, protocol, self.cache, self.clocks)

    def timed_arena(self) -> Arena:
        """Buffers with the problem's own inputs, ready for a `TimedRun`."""
        return self._arena_of(self.own)

    def _arena_of(self, case: Case) -> Arena:
        arena = make_arena(case, {}, self.backend.device)
        arena.arm()
        return arena

    def final(self, task: HoldFinal) -> FinalResult:
        """The finalists, and every peer that is not refused and answers right, over the same inputs in the same memory.

        The process is `broken` after a result that is not complete. Raises only for a bug of ours."""
        self.broken = True
        peers = {name: peer for name, peer in self._peers.items() if name not in task.refused}
        if task.protocol.proves:
            setup = self.setup
            kept = self.__dict__.get("vault") or Vault([*tensors_of(self.own), *tensors_of(self.fresh)])
        else:
            own = self.own if peers else unanswered(self.problem, self.seed, self.backend.device)
            setup, kept = self._setup(own, own), Vault(tensors_of(own))
        contest = Contest(
            setup, self.gpu, self.clocks, self._arena_of(setup.own), task.protocol, partial(_lives, kept), self._report
        )
        result = contest.hold(task.finalists, peers)
        self.broken = not result.complete
        return result


def _lives(vault: Vault) -> bool:
    """Whether the device still answers, and no input changed: a refused launch harms nothing, a faulty one may look
    refused."""
    try:
        return vault.intact()
    except RuntimeError:
        return False


def _cuda_backend() -> QueuedBackend:
    from evoattn.backends.cuda import CudaBackend  # makes a CUDA context: only where one is wanted

    return CudaBackend()


ROUGH = 1.6
"""A first call that takes this many times the best so far is its time."""
LADDERS = 48
"""Sets of small cases that are kept, some 50 MB each: a campaign has 24 to 50 groups, and is sent to and fro among
them."""


class Surveyor:
    """Checks a kernel by the small cases that a study's candidates pass, and times it. Lives in the worker process.

    `broken` once the CUDA context is lost, or may have been harmed."""

    def __init__(self) -> None:
        self.broken, self._seed = False, int.from_bytes(os.urandom(4))
        self._backend, self._timer = _cuda_backend(), Timer()
        self._memory, self._clock = Memory(self._backend, self._seed), Clock()
        self._ladders: dict[tuple[object, ...], Ladder] = {}
        self._stream: torch.cuda.Stream = torch.cuda.Stream()

    def times(self, task: Survey) -> Surveyed:
        """Of a right kernel on each problem, or why there are none."""
        try:
            with torch.cuda.stream(self._stream), torch.no_grad():
                if task.check and (reason := self._why_wrong(task)):
                    return Surveyed(failure=f"wrong: {reason}")
                pairs = zip(task.problems, task.best_us, strict=True)
                return Surveyed(tuple(self._quick(task.kernel, problem, best) for problem, best in pairs))
        except ContextLost as error:
            self.broken = True
            return Surveyed(failure=f"launch: {error}")
        except LaunchError as error:
            return Surveyed(failure=f"launch: {error}")
        except RuntimeError as error:  # of the context, perhaps: what comes next needs a fresh process
            self.broken = True
            return Surveyed(failure=f"launch: {' '.join(str(error).split())[:200]}")

    def _why_wrong(self, task: Survey) -> str:
        """By the small cases of the first problem's kind; an empty string where the kernel is right."""
        *_, last = self._ladder(task.problems[0]).climb(self._backend, task.kernel)
        return "" if last.passed else last.reason

    def _ladder(self, problem: AttentionProblem) -> Ladder:
        made = proof_of(problem).device_cases(problem.with_(name="", scale=None))
        kind = tuple(made)
        if kind not in self._ladders:
            if len(self._ladders) >= LADDERS:
                self._ladders.pop(next(iter(self._ladders)))
            device = self._backend.device
            cases, _ = packed([make_case(name, case, self._seed, device, inputs) for name, case, inputs in made])
            self._ladders[kind] = Ladder(cases, device)
        return self._ladders[kind]

    def _quick(self, kernel: BuiltKernel, problem: AttentionProblem, best: float) -> tuple[float, bool]:
        """(µs, whether it is one call's)."""
        self._memory.reserve(problem)
        enqueue = self._memory.prepare(kernel, problem)
        first = self._clock.first(enqueue)
        if first > ROUGH * best and first > GRAPH_UNDER_US:
            return first, True
        repeated = repeat(enqueue, first, self._timer)
        return min(self._clock.a_call(repeated) for _ in range(2)), False
