"""A PTX interpreter: runs kernels on the CPU and finds races, accesses out of bounds and deadlocks.

`run_launch` runs one launch over NumPy arrays. README.md says what is modelled and what is not. Imports nothing of
evoattn."""

from evoattn.ptx.errors import (
    AsyncFault,
    BarrierFault,
    Deadlock,
    DivergentCollective,
    ImpossibleLaunch,
    MemoryFault,
    PtxError,
    StepLimitExceeded,
    Trapped,
    UnsupportedInstruction,
)
from evoattn.ptx.limits import NOT_MODELLED
from evoattn.ptx.machine.counters import Counters
from evoattn.ptx.machine.launch import Execution
from evoattn.ptx.program.kernel import Instruction, Kernel, Program
from evoattn.ptx.program.parser import parse_program
from evoattn.ptx.races.grid_dependency import Touched
from evoattn.ptx.run import Argument, TensorMap, run_launch
from evoattn.ptx.state.context import DEFAULT_STEP_LIMIT

__all__ = [
    "DEFAULT_STEP_LIMIT",
    "NOT_MODELLED",
    "Argument",
    "AsyncFault",
    "BarrierFault",
    "Counters",
    "Deadlock",
    "DivergentCollective",
    "Execution",
    "ImpossibleLaunch",
    "Instruction",
    "Kernel",
    "MemoryFault",
    "Program",
    "PtxError",
    "StepLimitExceeded",
    "TensorMap",
    "Touched",
    "Trapped",
    "UnsupportedInstruction",
    "parse_program",
    "run_launch",
]
