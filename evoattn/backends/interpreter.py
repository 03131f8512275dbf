"""Runs kernels with no GPU: the PTX of their compile, on the CPU, watched for races, bounds and deadlocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from evoattn import ptx
from evoattn.backends.base import LaunchError, require_order_of_calls
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar
from evoattn.model.records import CompiledKernel

_SCALAR_TYPES: dict[str, Callable[[int | float], np.generic]] = {
    "int32": np.int32,
    "int64": np.int64,
    "float32": np.float32,
}


Far = Mapping[str, NDArray[np.uint16]]


class NotInterpreted(RuntimeError):
    """The kernel has an instruction that the interpreter does not model, so that nothing can be said of it; the message
    is one sentence."""


class InterpreterBackend:
    """A `Backend` on the CPU. Buffers are CPU tensors, changed in place."""

    name = "interpreter"
    device = torch.device("cpu")

    def __init__(
        self, step_limit: int = ptx.DEFAULT_STEP_LIMIT, far: Far | None = None, late_blocks: bool = False
    ) -> None:
        """A kernel that runs for more than `step_limit` instructions is taken never to end. `far` spreads buffers over
        addresses, with `late_blocks` some begin late (`ptx.run_launch`)."""
        self.step_limit, self.far, self.late_blocks = step_limit, far or {}, late_blocks

    def placed(self, far: Far | None = None, late_blocks: bool = False) -> InterpreterBackend:
        """The same with buffers spread, or with late blocks."""
        return type(self)(self.step_limit, far, late_blocks)

    def run(
        self, compiled: CompiledKernel, launches: tuple[KernelLaunch, ...], buffers: dict[str, torch.Tensor]
    ) -> tuple[str, ...]:
        """See `Backend.run`. Faults are races, accesses out of bounds, deadlocks, kernels that do not end.

        Launches after one with a fault are not run. Raises `NotInterpreted`, and `LaunchError` for a launch that no
        device would accept."""
        for execution in self._executions(compiled, launches, buffers, detect_races=True):
            if execution.faults:
                return execution.faults
        return ()

    def profile(
        self, compiled: CompiledKernel, launches: tuple[KernelLaunch, ...], buffers: dict[str, torch.Tensor]
    ) -> ptx.Counters:
        """Run once without looking for races and return what all launches did. Raises as `run` does."""
        executions = self._executions(compiled, launches, buffers, detect_races=False, count=True)
        return sum((execution.counters for execution in executions), ptx.Counters())

    def _executions(
        self,
        compiled: CompiledKernel,
        launches: tuple[KernelLaunch, ...],
        buffers: dict[str, torch.Tensor],
        *,
        detect_races: bool,
        count: bool = False,
    ) -> Iterator[ptx.Execution]:
        """The `Execution` of each launch, one after another."""
        require_order_of_calls(launches)
        arrays = {name: tensor.view(torch.uint8).numpy() for name, tensor in buffers.items()}
        touched = ptx.Touched()
        for launch in launches:
            touched = touched if launch.overlaps else ptx.Touched()  # the others have ended
            try:
                execution = ptx.run_launch(
                    compiled.ptx,
                    launch.kernel,
                    launch.grid,
                    launch.block,
                    [_argument(argument) for argument in launch.args],
                    arrays,
                    smem_bytes=launch.smem_bytes,
                    cluster=launch.cluster,
                    together=launch.together,
                    after=touched if launch.overlaps else None,
                    detect_races=detect_races,
                    count=count,
                    step_limit=self.step_limit,
                    far=self.far,
                    late_blocks=self.late_blocks,
                )
            except ptx.UnsupportedInstruction as error:
                raise NotInterpreted(str(error)) from None
            except ptx.ImpossibleLaunch as error:
                raise LaunchError(str(error)) from None
            yield execution
            touched |= execution.touched


def _argument(argument: KernelArg) -> ptx.Argument:
    if isinstance(argument, Scalar):
        return _SCALAR_TYPES[argument.ctype](argument.value)
    if isinstance(argument, Buffer):
        return argument.name
    shape, strides = argument.shape, argument.strides_bytes
    return ptx.TensorMap(argument.buffer, shape, strides, argument.box, argument.swizzle_bytes, argument.wraps)
