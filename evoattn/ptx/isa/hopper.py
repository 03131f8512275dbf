"""The rest of sm_90's instructions: fences of the asynchronous proxy, register counts, dependent launches."""

from evoattn.ptx.errors import AsyncFault
from evoattn.ptx.isa.dispatch import Action, Fields, instruction
from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.program.threads import ActiveThreads
from evoattn.ptx.state.context import Context
from evoattn.ptx.state.mbarriers import mbarriers_of


@instruction("fence", r"\.proxy\.async(?:\.shared::cta)?", kind="other", pure=False, writes=0)
def fence_proxy(context: Context, ins: Instruction, fields: Fields) -> Action:
    """What these threads have written is visible to tensor copies and wgmma that are issued after a barrier."""
    barriers, races = mbarriers_of(context), context.races

    def run(active: ActiveThreads) -> None:
        barriers.fence(active)
        if races is not None:
            races.proxy.fence(active)

    return run


@instruction("fence", r"\.mbarrier_init\.release\.cluster", kind="other", pure=False, writes=0)
def fence_mbarriers(context: Context, ins: Instruction, fields: Fields) -> Action:
    barriers = mbarriers_of(context)
    return lambda active: barriers.fence(active, for_cluster=True)


@instruction("setmaxnreg", r"\.(?:inc|dec)\.sync\.aligned\.u32", kind="other", pure=False, writes=0)
def set_registers(context: Context, ins: Instruction, fields: Fields) -> Action:
    """Registers cost nothing here; the number and who executes it are checked (PTX ISA, setmaxnreg)."""
    number = int(ins.operands[0], 0)

    def run(active: ActiveThreads) -> None:
        if number % 8 or not 24 <= number <= 256:
            raise AsyncFault(f"A thread has 24 to 256 registers in steps of 8, which {ins} does not ask for.")
        context.require_whole_warpgroups(active, ins)

    return run


@instruction("griddepcontrol", r"\.wait", kind="other", pure=False, writes=0)
def wait_for_earlier_launches(context: Context, ins: Instruction, fields: Fields) -> Action:
    """They have ended here; that a launch which may begin earlier waits in time is for `grid_dependency.py` to see."""
    dependency = None if context.races is None else context.races.grid.dependency
    return (lambda active: None) if dependency is None else dependency.wait


@instruction("griddepcontrol", r"\.launch_dependents", kind="other", pure=False, writes=0)
@instruction("nanosleep", r"\.u32", kind="other", pure=False, writes=0)
def pass_over(context: Context, ins: Instruction, fields: Fields) -> Action:
    """Launches run one after another here, and nobody gains by waiting."""
    return lambda active: None
