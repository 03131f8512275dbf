"""The device side of the engine: memory shared by all problems, quick checks, and quick or careful times. One process
owns the GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from evoattn.backends.base import ContextLost, LaunchError
from evoattn.correctness.cases import Case, make_case
from evoattn.correctness.reference import torch_dtype
from evoattn.correctness.validate import run_case
from evoattn.evaluation.process import Handler
from evoattn.families.base import starts_zeroed
from evoattn.families.built import BuiltKernel
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem

ALIGNMENT = 1024
GRAPH_UNDER_US = 100.0
"""Calls shorter than this are timed in a graph: the CPU cannot launch them one by one as fast as the GPU runs them."""
GRAPH_US, GRAPH_CALLS = 700.0, (10, 60)
DIRECT_US, DIRECT_CALLS = 1200.0, (2, 10)
ROUGH = 1.6
"""A first call that takes this many times the best so far is its time."""

FAR_BEHIND = 2.5
"""In a careful comparison, a first call that takes this many times the least so far is its time."""

Call = Callable[[], None]


@dataclass(frozen=True)
class Job:
    """One compiled kernel: `indexes` are the problems to time it on, `best_us` the best so far of each."""

    group: str
    kernel: BuiltKernel
    check: bool
    indexes: tuple[int, ...]
    best_us: tuple[float, ...]


class Stage(Handler):
    """Tasks: `("register", group, problems)`, `("job", Job)`, `("final", group, index, kernels, rounds, peers)`."""

    def __init__(self, gpu: GpuSpec, seed: int = 0) -> None:
        from evoattn.backends.cuda import CudaBackend

        self._gpu, self._backend, self._seed = gpu, CudaBackend(), seed
        self._problems: dict[str, list[AttentionProblem]] = {}
        self._cases: dict[str, list[Case]] = {}
        self._memory: dict[torch.dtype, torch.Tensor] = {}
        self._out = torch.empty(0, dtype=torch.uint8, device=self._backend.device)
        make_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        self._events = [make_event(enable_timing=True) for _ in range(2)]
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._methods: dict[str, Callable[..., object]] = {
            "register": self._register,
            "job": self._job,
            "prove": self._prove,
            "final": self._final,
        }

    def __call__(self, task: tuple[Any, ...]) -> object:
        name, *arguments = task
        with torch.cuda.stream(self._stream), torch.no_grad():
            return self._methods[name](*arguments)

    # ---- memory

    def _register(self, group: str, problems: list[AttentionProblem]) -> None:
        self._problems[group] = problems
        for problem in problems:
            dtype = torch_dtype(problem)
            elements = sum(_padded(problem, t) for t in "qkv") // problem.element_bytes
            if dtype not in self._memory or self._memory[dtype].numel() < elements:
                self._memory.pop(dtype, None)
                generator = torch.Generator(device=self._backend.device).manual_seed(self._seed)
                made = torch.empty(elements, dtype=dtype, device=self._backend.device)
                for first in range(0, elements, 1 << 27):
                    made[first : first + (1 << 27)].normal_(generator=generator)
                self._memory[dtype] = made
            if self._out.numel() < _padded(problem, "o"):
                self._out = torch.empty(_padded(problem, "o"), dtype=torch.uint8, device=self._backend.device)
        one = problems[0].with_(batch=2, layout="bhsd")
        grouped = any(p.group_size > 1 for p in problems)
        ragged = one.with_(heads=4 if grouped else 2, kv_heads=2, seqlen_q=203, seqlen_k=239)
        cases = [ragged] if one.causal else [ragged, one.with_(heads=8, kv_heads=2, seqlen_q=1, seqlen_k=799)]
        self._cases[group] = [make_case("quick", case, self._seed, self._backend.device) for case in cases]

    def _tensors(self, problem: AttentionProblem) -> dict[str, torch.Tensor]:
        memory, start, tensors = self._memory[torch_dtype(problem)], 0, {}
        for name in "qkv":
            shape, strides = problem.shape(name), problem.strides(name)
            tensors[name] = memory.as_strided(shape, strides, start)
            start += _padded(problem, name) // problem.element_bytes
        out = self._out[: _padded(problem, "o")].view(memory.dtype)
        tensors["o"] = out.as_strided(problem.shape("o"), problem.strides("o"), 0)
        return tensors

    def _prepare(self, kernel: BuiltKernel, problem: AttentionProblem) -> Call:
        tensors = self._tensors(problem)
        buffers = {name: _flat(t) for name, t in tensors.items()}
        for name, size in kernel.workspace(problem).items():
            allocate = torch.zeros if starts_zeroed(name) else torch.empty
            buffers[name] = allocate(max(size, 16), dtype=torch.uint8, device=self._backend.device)
        enqueue = self._backend.prepare(kernel.compiled, kernel.launches(problem), buffers)
        return _keeping(enqueue, buffers)

    # ---- quick times

    def _elapsed(self, work: Call) -> float:
        start, end = self._events
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def _job(self, job: Job) -> dict[int, tuple[float, bool]] | str:
        """{index: (µs, rough)} of a right kernel, or a sentence."""
        self.report(job.kernel.config.describe())
        try:
            if job.check:
                for case in self._cases[job.group]:
                    result, _ = run_case(self._backend, job.kernel, case)
                    if not result.passed:
                        return f"wrong: {result.reason}"
            found = {}
            for index, best in zip(job.indexes, job.best_us, strict=True):
                found[index] = self._quick(job, self._problems[job.group][index], best)
            return found
        except ContextLost as error:
            self.broken = True
            return f"launch: {error}"
        except LaunchError as error:
            return f"launch: {error}"
        except RuntimeError as error:
            self.broken = True
            return f"launch: {' '.join(str(error).split())[:200]}"

    def _quick(self, job: Job, problem: AttentionProblem, best: float) -> tuple[float, bool]:
        enqueue = self._prepare(job.kernel, problem)
        enqueue()
        first = self._elapsed(enqueue)
        if first > ROUGH * best and first > GRAPH_UNDER_US:
            return first, True
        work, calls, _ = self._repeated(enqueue, first)
        return min(self._elapsed(work) for _ in range(2)) / calls, False

    def _repeated(self, enqueue: Call, first_us: float) -> tuple[Call, int, object]:
        """(work, calls in it, what must be kept alive): a graph for short calls, a plain loop for long ones."""
        if first_us >= GRAPH_UNDER_US:
            low, high = DIRECT_CALLS
            calls = max(low, min(high, int(DIRECT_US / first_us)))

            def loop() -> None:
                for _ in range(calls):
                    enqueue()

            return loop, calls, None
        low, high = GRAPH_CALLS
        calls = max(low, min(high, int(GRAPH_US / max(first_us / 2, 3.0))))
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            for _ in range(calls):
                enqueue()
        finally:
            graph.capture_end()
        graph.replay()
        return graph.replay, calls, (graph, enqueue)

    def _prove(self, group: str, index: int, kernel: BuiltKernel) -> str:
        """Why the kernel is wrong on the problem itself, run twice between guard bands; an empty string where it is
        right."""
        problem = self._problems[group][index]
        case = make_case("the problem's own shape", problem, self._seed + 1, self._backend.device)
        try:
            return run_case(self._backend, kernel, case, repeat=True)[0].reason
        except LaunchError as error:
            return str(error)

    # ---- careful times

    def _final(
        self, group: str, index: int, kernels: list[BuiltKernel], rounds: int, peers: tuple[str, ...]
    ) -> tuple[list[float | None], dict[str, float], dict[str, str]]:
        """Median µs of each kernel, of each peer, and why peers are missing: all in turns, in shuffled order."""
        problem = self._problems[group][index]
        works: list[tuple[Call, int, object] | None] = []
        firsts: list[float | None] = []
        for kernel in kernels:
            try:
                enqueue = self._prepare(kernel, problem)
                enqueue()
                first = self._elapsed(enqueue)
                known = [us for us in firsts if us]
                far_behind = bool(known) and first > max(FAR_BEHIND * min(known), GRAPH_UNDER_US)
                works.append(None if far_behind else self._repeated(enqueue, first))
                firsts.append(first)
            except (LaunchError, RuntimeError):
                works.append(None)
                firsts.append(None)
        calls, refusals = self._peers(problem, peers)
        contestants: list[tuple[object, Call, int]] = [(i, work[0], work[1]) for i, work in enumerate(works) if work]
        contestants += [(name, work, count) for name, (work, count, _) in calls.items()]
        samples: dict[object, list[float]] = {name: [] for name, _, _ in contestants}
        shuffle = random.Random(index)
        for _ in range(rounds):
            shuffle.shuffle(contestants)
            for name, work, count in contestants:
                samples[name].append(self._elapsed(work) / count)
        ours = [median(samples[i]) if samples.get(i) else first for i, first in enumerate(firsts)]
        return ours, {name: median(samples[name]) for name in calls}, refusals

    def _peers(
        self, problem: AttentionProblem, names: tuple[str, ...]
    ) -> tuple[dict[str, tuple[Call, int, object]], dict[str, str]]:
        from evoattn.timing.peers.table import PEERS

        tensors = self._tensors(problem)
        calls: dict[str, tuple[Call, int, object]] = {}
        refusals: dict[str, str] = {}
        for name in names:
            try:
                call = _dropping(PEERS[name].make(problem, tensors))
                call()
                calls[name] = self._repeated(call, min(self._elapsed(call) for _ in range(2)))
            except Exception as error:  # other people's code: it may raise anything
                refusals[name] = " ".join(str(error).split())[:160]
        return calls, refusals


def _keeping(enqueue: Call, buffers: dict[str, torch.Tensor]) -> Call:
    """The call, with the memory that it works in."""

    def call(kept: dict[str, torch.Tensor] = buffers) -> None:
        enqueue()

    return call


def _dropping(call: Callable[[], torch.Tensor]) -> Call:
    """A peer's call without its answer."""

    def drop() -> None:
        call()

    return drop


def _padded(problem: AttentionProblem, tensor: str) -> int:
    """Bytes of a tensor, rounded up to ALIGNMENT."""
    count = problem.element_bytes
    for extent in problem.shape(tensor):
        count *= extent
    return -(-count // ALIGNMENT) * ALIGNMENT


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory from its first element, as the launches take it."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset())
