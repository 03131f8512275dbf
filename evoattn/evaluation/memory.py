"""One memory for the tensors of all problems: each takes its views of it, so that none is allocated for a timing."""

import math

import torch

from evoattn.backends.base import QueuedBackend
from evoattn.correctness.terms import make_terms
from evoattn.families.base import starts_zeroed
from evoattn.families.built import BuiltKernel
from evoattn.model.operation import TensorSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import SCALES
from evoattn.timing.timer import Call

ALIGNMENT = 1024


class Memory:
    """The inputs of every reserved problem in one buffer per dtype, filled with normal numbers; the outputs in another.
    Sinks, slopes and biases are each problem's own, and log-sum-exps, which are those of normal scores."""

    def __init__(self, backend: QueuedBackend, seed: int) -> None:
        self._backend, self._seed = backend, seed
        self._inputs: dict[str, torch.Tensor] = {}
        self._out = torch.empty(0, dtype=torch.uint8, device=backend.device)
        self._terms: dict[AttentionProblem, dict[str, torch.Tensor]] = {}

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._backend.device

    def reserve(self, problem: AttentionProblem) -> None:
        """Make room for the problem. Tensors that were given out before stay as they are."""
        if problem not in self._terms:
            self._terms[problem] = self._make_terms(problem)
        wanted: dict[str, int] = {}
        for spec in self._shared(problem):
            wanted[spec.dtype] = wanted.get(spec.dtype, 0) + _padded(spec)
        for name, size in wanted.items():
            dtype: torch.dtype = getattr(torch, name)
            elements = size // dtype.itemsize
            if name in self._inputs and self._inputs[name].numel() >= elements:
                continue
            if self._inputs.pop(name, None) is not None and self._backend.device.type == "cuda":
                torch.cuda.empty_cache()  # the larger one finds no place in what the smaller one had
            generator = torch.Generator(device=self._backend.device).manual_seed(self._seed)
            made = torch.empty(elements, dtype=dtype, device=self._backend.device)
            for first in range(0, elements, 1 << 27):
                part = made[first : first + (1 << 27)]
                if dtype.itemsize > 1:
                    part.normal_(generator=generator)
                    continue
                normal = torch.randn(len(part), generator=generator, device=part.device)
                part.copy_((normal / scale_of(dtype)).clamp(-127, 127))
            self._inputs[name] = made
        if self._out.numel() < (size := sum(map(_padded, problem.outputs))):
            self._out = torch.empty(size, dtype=torch.uint8, device=self._backend.device)

    def _make_terms(self, problem: AttentionProblem) -> dict[str, torch.Tensor]:
        """The inputs that are the problem's own."""
        device = self._backend.device
        made = {}
        if problem.term_shapes:
            generator = torch.Generator(device=device).manual_seed(self._seed)
            made = make_terms(problem, generator, device, extreme=False)
        for spec in problem.inputs:
            if spec.name == "lse":  # the exponential of a normal number is exp(1/2) on average
                mean = math.log(problem.seqlen_k) + 0.5
                made[spec.name] = torch.full(spec.shape, mean, dtype=getattr(torch, spec.dtype), device=device)
            elif spec.name in SCALES:
                scaled: torch.dtype = getattr(torch, problem.element_of(spec.name[0]).torch)
                made[spec.name] = torch.full((math.prod(spec.shape),), scale_of(scaled), device=device).as_strided(
                    spec.shape, spec.strides
                )
        return made

    def _shared(self, problem: AttentionProblem) -> list[TensorSpec]:
        """The inputs that lie in the memory of all."""
        return [spec for spec in problem.inputs if spec.name not in self._terms[problem]]

    def tensors(self, problem: AttentionProblem) -> dict[str, torch.Tensor]:
        """The inputs and outputs of a reserved problem, by name, in its layout."""
        tensors, starts = {}, dict.fromkeys(self._inputs, 0)
        for spec in self._shared(problem):
            memory = self._inputs[spec.dtype]
            tensors[spec.name] = memory.as_strided(spec.shape, spec.strides, starts[spec.dtype])
            starts[spec.dtype] += _padded(spec) // memory.itemsize
        first = 0
        for spec in problem.outputs:
            part = self._out[first : first + _padded(spec)].view(getattr(torch, spec.dtype))
            tensors[spec.name] = part.as_strided(spec.shape, spec.strides, part.storage_offset())
            first += _padded(spec)
        return tensors | self._terms[problem]

    def prepare(self, kernel: BuiltKernel, problem: AttentionProblem) -> Call:
        """A call of the kernel on the problem's tensors, with scratch buffers of its own."""
        buffers = {name: _flat(tensor) for name, tensor in self.tensors(problem).items()}
        for name, size in kernel.workspace(problem).items():
            allocate = torch.zeros if starts_zeroed(name) else torch.empty
            buffers[name] = allocate(max(size, 16), dtype=torch.uint8, device=self._backend.device)
        return self._backend.prepare(kernel.compiled, kernel.launches(problem), buffers)


def scale_of(dtype: torch.dtype) -> float:
    """By which the numbers of 8 bits are multiplied to be normal ones."""
    return 1.0 if dtype.is_floating_point else 1 / 32


def _padded(spec: TensorSpec) -> int:
    """Bytes of a tensor, rounded up to ALIGNMENT."""
    return -(-spec.bytes // ALIGNMENT) * ALIGNMENT


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory from its first element, as the launches take it."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset())
