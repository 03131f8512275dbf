"""Runs kernels with no GPU: the PTX of their compile, on the CPU, watched for races, bounds and deadlocks."""

from __future__ import annotations

import numpy as np
import torch

from evoattn.backends.base import LaunchError, require_order_of_calls
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar
from evoattn.model.records import CompiledKernel
from evoattn.ptx.errors import ImpossibleLaunch, UnsupportedInstruction
from evoattn.ptx.machine.counters import Counters
from evoattn.ptx.machine.launch import Execution, Machine
from evoattn.ptx.machine.program import Kernel, parse_program
from evoattn.ptx.memory.global_memory import GlobalMemory
from evoattn.ptx.memory.tensor_map import TiledMap
from evoattn.ptx.races.grid_dependency import Touched

SMEM_LIMIT_BYTES = 232448
"""Most shared memory that a block may have on any GPU (sm_90); the limit of one GPU is the family's to check."""
_SCALAR_TYPES = {"int32": np.int32, "int64": np.int64, "float32": np.float32}


class NotInterpreted(RuntimeError):
    """The kernel has an instruction outside the interpreter's whitelist, so that nothing can be said of it; the message is one sentence."""


class InterpreterBackend:
    """A `Backend` on the CPU. Buffers are CPU tensors, changed in place."""

    name = "interpreter"
    device = torch.device("cpu")

    def run(
        self, compiled: CompiledKernel, launches: tuple[KernelLaunch, ...], buffers: dict[str, torch.Tensor]
    ) -> tuple[str, ...]:
        """See `Backend.run`. Faults are races, accesses out of bounds, deadlocks, kernels that do not end; launches after one are not run.

        Raises `NotInterpreted`, and `LaunchError` for a launch that no device would accept.
        """
        for execution in _launch(compiled, launches, buffers, detect_races=True, count=False):
            if execution.faults:
                return execution.faults
        return ()

    def profile(
        self, compiled: CompiledKernel, launches: tuple[KernelLaunch, ...], buffers: dict[str, torch.Tensor]
    ) -> Counters:
        """Run once without looking for races and return what all launches did. Raises as `run` does."""
        executions = _launch(compiled, launches, buffers, detect_races=False, count=True)
        return sum((execution.counters for execution in executions), Counters())


def _launch(
    compiled: CompiledKernel,
    launches: tuple[KernelLaunch, ...],
    buffers: dict[str, torch.Tensor],
    *,
    detect_races: bool,
    count: bool,
):
    """Yield the `Execution` of each launch, over one memory."""
    require_order_of_calls(launches)
    memory, touched = GlobalMemory(), Touched()
    addresses = {name: memory.map(name, tensor.view(torch.uint8).numpy()) for name, tensor in buffers.items()}
    for launch in launches:
        try:
            touched = touched if launch.overlaps else Touched()  # the others have ended
            machine = _machine(
                compiled, launch, memory, addresses, touched if launch.overlaps else None, detect_races, count
            )
            execution: Execution = machine.run()
        except UnsupportedInstruction as error:
            raise NotInterpreted(str(error)) from None
        except ImpossibleLaunch as error:
            raise LaunchError(str(error)) from None
        yield execution
        touched |= execution.touched


def _machine(
    compiled: CompiledKernel,
    launch: KernelLaunch,
    memory: GlobalMemory,
    addresses: dict[str, int],
    before: Touched | None,
    detect_races: bool,
    count: bool,
) -> Machine:
    kernel = _kernel(compiled, launch.kernel)
    smem = kernel.static_smem_bytes + launch.smem_bytes
    if smem > SMEM_LIMIT_BYTES:
        raise ImpossibleLaunch(
            f"{launch.kernel} asks for {smem} bytes of shared memory; no GPU gives a block over {SMEM_LIMIT_BYTES}."
        )
    params = [_value(argument, addresses) for argument in launch.args]
    return Machine(
        kernel,
        memory,
        params,
        launch.grid,
        launch.block,
        launch.smem_bytes,
        cluster=launch.cluster,
        before=before,
        detect_races=detect_races,
        count=count,
    )


def _kernel(compiled: CompiledKernel, name: str) -> Kernel:
    kernels = parse_program(compiled.ptx).kernels
    if name not in kernels:
        raise ImpossibleLaunch(f"The compiled source has no kernel {name}; it has {', '.join(kernels) or 'none'}.")
    return kernels[name]


def _value(argument: KernelArg, addresses: dict[str, int]) -> np.generic | bytes:
    if isinstance(argument, Scalar):
        return _SCALAR_TYPES[argument.ctype](argument.value)
    name = argument.name if isinstance(argument, Buffer) else argument.buffer
    if name not in addresses:
        raise ImpossibleLaunch(f"The launch names a buffer {name} that was not given.")
    if isinstance(argument, Buffer):
        return np.uint64(addresses[name])
    return TiledMap(
        addresses[name], argument.shape, argument.strides_bytes, argument.box, argument.swizzle_bytes
    ).encode()
