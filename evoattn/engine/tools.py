"""What a search works with: renderer, compiler and the handlers of its worker processes."""

from collections.abc import Callable
from dataclasses import dataclass

from evoattn.backends.compiler import compile_candidate
from evoattn.evaluation.handlers import COMPILE_SECONDS, DEVICE_SECONDS, CompileHandler, DeviceHandler
from evoattn.evaluation.process import Handler
from evoattn.families.render import Renderer, render
from evoattn.model.errors import FailedRun
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, CompiledKernel
from evoattn.timing.protocol import CacheMode


@dataclass(frozen=True)
class Tools:
    """The defaults are those of `evoattn search`; tests and scripts put others in their place."""

    render: Renderer = render
    """For each candidate, in a compile worker, where it is known by its name; for the finalists in the search's own
    process."""
    compile: Callable[[Candidate], CompiledKernel] = compile_candidate
    """For the finalists, in the search's own process. Raises `CompileError`."""
    make_compiler: Callable[[GpuSpec, bool], Handler] = CompileHandler
    """Called in each compile worker with (GPU, offline); answers a `Compile`."""
    make_device: Callable[[AttentionProblem | None, GpuSpec, CacheMode], Handler] = DeviceHandler
    """Called in the GPU worker; answers a `DeviceTask`."""
    compile_seconds: float = COMPILE_SECONDS
    """A compile that takes longer is ended."""
    device_seconds: float = DEVICE_SECONDS
    """An evaluation on the device that takes longer is ended."""


class SearchError(FailedRun):
    """The search cannot go on: its message is one sentence."""
