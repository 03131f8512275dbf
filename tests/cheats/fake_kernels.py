"""A device made of Python: kernels are functions over the launch's buffers, so that the timed path and its defences run
without a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch

from evoattn.backends.base import QueuedBackend
from evoattn.correctness.reference import exact_attention, exact_lse
from evoattn.evaluation.device import DeviceEvaluator
from evoattn.evaluation.tasks import Evaluate
from evoattn.families import registry
from evoattn.families.base import Family
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import load_space
from evoattn.model import gpu
from evoattn.model.launch import KernelLaunch, Scalar
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, CompileInfo, Evaluation
from evoattn.peers.table import Peer
from evoattn.timing.timer import Timer

PROBLEM = AttentionProblem(1, 2, 2, 96, 96, 16)
H100 = gpu.GPUS["h100"]
FAMILY = registry.lookup("flash_scalar")
CONFIG = load_space("flash_scalar", H100).starting_configs()[0]


@dataclass
class Launch:
    """What a fake kernel sees of one launch: flat `buffers`, logical `views`, how many launches there were of it
    before, and the true answer."""

    buffers: dict[str, torch.Tensor]
    views: dict[str, torch.Tensor]
    problem: AttentionProblem
    count: int

    def answer(self) -> torch.Tensor:
        q, k, v = (self.views[t] for t in "qkv")
        exact = exact_attention(self.problem, q, k, v, torch.float32)
        return exact.to(self.views["o"].dtype)

    def write(self) -> None:
        self.views["o"].copy_(self.answer())
        if self.problem.lse:
            self.views["lse"].copy_(exact_lse(self.problem, self.views["q"], self.views["k"]))


@dataclass
class FakeKernel:
    """Stands where a `CompiledKernel` stands."""

    play: Callable[[Launch], None]
    us: float = 50.0
    info: CompileInfo = field(default_factory=CompileInfo)
    launches: int = field(default=0)


class FakeBackend:
    name = "cuda"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.elapsed_us = 0.0

    def prepare(
        self, compiled: FakeKernel, launches: tuple[KernelLaunch, ...], buffers: dict[str, torch.Tensor]
    ) -> Callable[[], None]:
        heads, kv_heads, seqlen_q, seqlen_k, *strides = (
            int(a.value) for a in launches[0].args[4:20] if isinstance(a, Scalar)
        )
        dim, lse = PROBLEM.head_dim, "lse" in buffers
        batch = buffers["q"].numel() // (heads * seqlen_q * dim)
        layout = "bshd" if strides[2] == heads * dim else "bhsd"
        problem = AttentionProblem(
            batch, heads, kv_heads, seqlen_q, seqlen_k, dim, PROBLEM.dtype, PROBLEM.mask, layout, lse=lse
        )
        views = {
            t: buffers[t].as_strided(problem.shape(t), problem.strides(t), buffers[t].storage_offset()) for t in "qkvo"
        }
        if lse:
            views["lse"] = buffers["lse"].view(problem.lse_shape)

        def enqueue() -> None:
            compiled.play(Launch(buffers, views, problem, compiled.launches))
            compiled.launches += 1
            self.elapsed_us += compiled.us

        return enqueue

    def run(
        self, compiled: FakeKernel, launches: tuple[KernelLaunch, ...], buffers: dict[str, torch.Tensor]
    ) -> tuple[str, ...]:
        self.prepare(compiled, launches, buffers)()
        return ()

    def synchronize(self) -> None:
        pass


class FakeTimer(Timer):
    """Takes what the fake kernels say for a time."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend

    launch_us = 0.0

    def queue(self, work: Callable[[], object]) -> Callable[[], float]:
        before = self._backend.elapsed_us
        work()
        elapsed = self._backend.elapsed_us - before
        return lambda: elapsed

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        yield

    def capture(self, calls: list[Callable[[], object]]) -> Callable[[], None]:
        def replay() -> None:
            for call in calls:
                call()

        return replay

    def synchronize(self) -> None:
        pass


def built(fake: FakeKernel, family: Family = FAMILY) -> BuiltKernel:
    """The fake as a kernel of flash_scalar."""
    return BuiltKernel(family, CONFIG, H100, cast(CompiledKernel, fake))


def make_evaluator(problem: AttentionProblem = PROBLEM, **peers: Peer) -> DeviceEvaluator:
    """On fake kernels; against `peers` alone in a final."""
    backend = FakeBackend()
    evaluator = DeviceEvaluator(
        problem, H100, backend=cast(QueuedBackend, backend), timer=FakeTimer(backend), peers=peers
    )
    evaluator.prepare()
    return evaluator


def evaluate(
    evaluator: DeviceEvaluator,
    play: Callable[[Launch], None],
    us: float = 50.0,
    family: Family = FAMILY,
    best_us: float | None = None,
) -> Evaluation:
    return evaluator.evaluate(Evaluate(built(FakeKernel(play, us), family), best_us))
