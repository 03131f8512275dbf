"""A device that does nothing: what the op costs beside CUDA can be timed with it on a machine without a GPU."""

import contextlib
import ctypes
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from evoattn.backends.cubins import Cubin
from evoattn.families.base import Family
from evoattn.model.gpu import GpuSpec, lookup
from evoattn.model.launch import TensorMap
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.ops.check import record_check


class NoDevice:
    """A `Platform` that says it is a GPU of this kind. Launches succeed and compute nothing."""

    device_type = "cpu"

    def __init__(self, gpu: str) -> None:
        """Raises `WrongUse` for a GPU that evoattn does not know."""
        self._spec = lookup(gpu)

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def spec(self, index: int) -> GpuSpec:
        return self._spec

    def identity(self, index: int) -> str:
        return f"no {self._spec.name}"

    def stream(self, index: int) -> int:
        return 0

    def capturing(self) -> bool:
        return False

    def lost_in_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return -1

    def guard(self, index: int) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def make_context_current(self, index: int) -> None:
        pass

    def load(self, cubin: bytes) -> int:
        return 1

    def function(self, module: int, name: str) -> int:
        return 1

    def allow_shared_memory(self, function: int, smem_bytes: int) -> None:
        pass

    def encode_map(self, tensor: TensorMap, address: int, destination: int) -> None:
        pass

    def move_map(self, destination: int, address: int) -> None:
        pass

    def outside_pools(self, make: Callable[[], torch.Tensor], index: int, stream: int) -> torch.Tensor:
        return make()

    def describe(self, status: int) -> str:
        return ""

    def synchronize(self, index: int) -> None:
        pass

    def launch(self, config: ctypes.c_void_p, function: ctypes.c_void_p, arguments: ctypes.c_void_p, _: None) -> int:
        return 0


def no_code(family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, folder: Path) -> Cubin:
    """In place of machine code, where its making is not what is timed. Its check is recorded as passed."""
    words = family.name, config.id, problem.head_dim, problem.head_dim_v, problem.dtype, problem.mask, problem.variants
    code = repr(words).encode()
    cubin = Cubin(code, hashlib.sha256(code).hexdigest(), "", "")
    record_check(cubin, NoDevice(gpu.name).identity(0), folder, config, "")
    return cubin
