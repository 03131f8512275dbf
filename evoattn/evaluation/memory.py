"""One memory for the tensors of all problems: each takes its views of it, so that none is allocated for a timing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from evoattn.backends.base import QueuedBackend
from evoattn.correctness.terms import make_terms, torch_dtype
from evoattn.families.base import starts_zeroed
from evoattn.families.built import BuiltKernel
from evoattn.model.problem import AttentionProblem
from evoattn.timing.clock import Call

ALIGNMENT = 1024


class Memory:
    """Q, K and V of every reserved problem in one buffer per dtype, filled with normal numbers; O in another. Sinks,
    slopes and biases are each problem's own."""

    def __init__(self, backend: QueuedBackend, seed: int) -> None:
        self._backend, self._seed = backend, seed
        self._inputs: dict[torch.dtype, torch.Tensor] = {}
        self._out = torch.empty(0, dtype=torch.uint8, device=backend.device)
        self._terms: dict[AttentionProblem, dict[str, torch.Tensor]] = {}

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._backend.device

    def reserve(self, problem: AttentionProblem) -> None:
        """Make room for the problem. Tensors that were given out before stay as they are."""
        dtype = torch_dtype(problem)
        elements = sum(_padded(problem, t) for t in problem.tensors) // problem.element_bytes
        if dtype not in self._inputs or self._inputs[dtype].numel() < elements:
            if self._inputs.pop(dtype, None) is not None and self._backend.device.type == "cuda":
                torch.cuda.empty_cache()  # the larger one finds no place in what the smaller one had
            generator = torch.Generator(device=self._backend.device).manual_seed(self._seed)
            made = torch.empty(elements, dtype=dtype, device=self._backend.device)
            for first in range(0, elements, 1 << 27):
                made[first : first + (1 << 27)].normal_(generator=generator)
            self._inputs[dtype] = made
        if problem.term_shapes and problem not in self._terms:
            generator = torch.Generator(device=self._backend.device).manual_seed(self._seed)
            self._terms[problem] = make_terms(problem, generator, self._backend.device, extreme=False)
        if self._out.numel() < _padded(problem, "o"):
            self._out = torch.empty(_padded(problem, "o"), dtype=torch.uint8, device=self._backend.device)

    def tensors(self, problem: AttentionProblem) -> dict[str, torch.Tensor]:
        """`q`, `k`, `v` (unless it lies within k), `o` of a reserved problem, in its layout, and its other inputs."""
        memory, start, tensors = self._inputs[torch_dtype(problem)], 0, {}
        for name in problem.tensors:
            shape, strides = problem.shape(name), problem.strides(name)
            tensors[name] = memory.as_strided(shape, strides, start)
            start += _padded(problem, name) // problem.element_bytes
        out = self._out[: _padded(problem, "o")].view(memory.dtype)
        tensors["o"] = out.as_strided(problem.shape("o"), problem.strides("o"), 0)
        return tensors | self._terms.get(problem, {})

    def prepare(self, kernel: BuiltKernel, problem: AttentionProblem) -> Call:
        """A call of the kernel on the problem's tensors, with scratch buffers of its own."""
        buffers = {name: _flat(tensor) for name, tensor in self.tensors(problem).items()}
        for name, size in kernel.workspace(problem).items():
            allocate = torch.zeros if starts_zeroed(name) else torch.empty
            buffers[name] = allocate(max(size, 16), dtype=torch.uint8, device=self._backend.device)
        enqueue = self._backend.prepare(kernel.compiled, kernel.launches(problem), buffers)
        return _keeping(enqueue, buffers)


def _keeping(enqueue: Callable[[], object], buffers: dict[str, torch.Tensor]) -> Call:
    """The call, with the memory that it works in."""

    def call(kept: dict[str, torch.Tensor] = buffers) -> None:
        enqueue()

    return call


def _padded(problem: AttentionProblem, tensor: str) -> int:
    """Bytes of a tensor, rounded up to ALIGNMENT."""
    count = problem.element_bytes
    for extent in problem.shape(tensor):
        count *= extent
    return -(-count // ALIGNMENT) * ALIGNMENT


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory from its first element, as the launches take it."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset())
