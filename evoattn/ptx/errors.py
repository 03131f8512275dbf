"""What can go wrong in a PTX program; every message is one sentence."""


class PtxError(Exception):
    """A program that cannot be run, or that went wrong while it ran."""


class UnsupportedInstruction(PtxError):
    """An instruction, type, modifier or operand outside the interpreter's whitelist; raised before anything runs."""


class ImpossibleLaunch(PtxError):
    """Grid, block, shared memory or arguments that no device would accept."""


class MemoryFault(PtxError):
    """An access outside every buffer, outside shared memory, or misaligned."""


class Deadlock(PtxError):
    """All threads that are left wait for a barrier that cannot complete."""


class BarrierFault(PtxError):
    """A barrier of the block that other threads may reach than those it counts."""


class DivergentCollective(PtxError):
    """A warp-wide instruction that a part of its threads never reaches."""


class Trapped(PtxError):
    """The program executed `trap`."""


class StepLimitExceeded(PtxError):
    """The program ran longer than its step limit: it most likely never ends."""


class AsyncFault(PtxError):
    """Wrong use of an mbarrier, a tensor copy or a wgmma, where the result on a device is not defined."""


def unsupported(ins: object, why: str) -> UnsupportedInstruction:
    """The error for an instruction that the whitelist lacks; `why` ends its sentence."""
    return UnsupportedInstruction(f"The instruction {ins} is outside the interpreter's whitelist: {why}.")
