"""wgmma products under way, by groups, and who may touch their registers."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evoattn.ptx.errors import AsyncFault
from evoattn.ptx.isa.wgmma_accumulators import Accumulators
from evoattn.ptx.isa.wgmma_fence import UnfencedWrites
from evoattn.ptx.isa.wgmma_registers import RegistersInFlight
from evoattn.ptx.isa.wgmma_sums import Floats, add_products
from evoattn.ptx.program.arrays import Mask, Numbers
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.races.async_proxy import WARPGROUP_WARPS
from evoattn.ptx.state.context import Context


@dataclass
class _Groups:
    """Groups of one warpgroup that have not been waited for. The newest, `committed + len(times)`, is open."""

    retired: int = 0
    times: list[int] = field(default_factory=list)
    """Of the committed ones, oldest first: when they were."""

    @property
    def open(self) -> int:
        return self.retired + len(self.times)


class MatrixProducts:
    """Products under way of one machine."""

    def __init__(self, context: Context) -> None:
        self.context, self.threads = context, context.threads
        self._accumulators: dict[tuple[str, ...], Accumulators] = {}
        self._groups: dict[int, _Groups] = {}
        self.registers, self.unfenced = RegistersInFlight(context.kernel), UnfencedWrites(context.kernel)
        if context.races is not None:
            context.before_run.append(self._check_registers)

    def accumulators(self, names: tuple[str, ...], halves: bool) -> Accumulators:
        if names not in self._accumulators:
            self._accumulators[names] = Accumulators(self.context, names, halves)
        return self._accumulators[names]

    def groups(self, lead: int) -> _Groups:
        """Of the warpgroup whose first warp is `lead`."""
        return self._groups.setdefault(lead, _Groups())

    def accumulate(self, accumulators: Accumulators, leads: Numbers, product: NDArray[np.float32], keep: Mask) -> None:
        """D = product + (D where `keep`, by warpgroup); `product` is `[warpgroup, 64, columns]`."""
        warps = self._begin(accumulators, leads, keep)
        product = product.reshape(len(warps), 16, -1)
        if keep.all():
            product += accumulators.matrix[warps]
        elif keep.any():
            kept = np.repeat(keep, WARPGROUP_WARPS)
            product[kept] += accumulators.matrix[warps[kept]]
        accumulators.matrix[warps] = product

    def accumulate_cut(
        self, accumulators: Accumulators, leads: Numbers, a: tuple[Floats, str], b: tuple[Floats, str], keep: Mask
    ) -> None:
        """The same of numbers of 8 bits beside their types, A `[warpgroup, 64, 32]` and B `[warpgroup, columns, 32]`:
        see `wgmma_sums`."""
        warps = self._begin(accumulators, leads, keep)
        before = accumulators.matrix[warps].reshape(len(leads), 4 * 16, -1)
        after = add_products(np.where(np.broadcast_to(keep, leads.shape)[:, None, None], before, np.float32(0)), a, b)
        if accumulators.halves:
            after = after.astype(np.float16).astype(np.float32)
        accumulators.matrix[warps] = after.reshape(len(warps), 16, -1)

    def _begin(self, accumulators: Accumulators, leads: Numbers, keep: Mask) -> Numbers:
        """The warps of these warpgroups, whose accumulators, if they are kept, have been read and are under way."""
        fresh = np.array([lead not in accumulators.groups for lead in leads.tolist()])
        if (fresh & keep).any():
            accumulators.read(warps_of(leads[fresh & keep]))
        for lead in leads.tolist():
            accumulators.groups[lead] = self.groups(lead).open
        return warps_of(leads)

    def commit(self, active: ActiveThreads) -> None:
        order = None if self.context.races is None else self.context.races.synchronize()
        for lead in active.warpgroups.tolist():
            self.groups(lead).times.append(0 if order is None else order.now)
            self.registers.commit(lead)
        if order is not None:
            order.now += 1

    def wait(self, active: ActiveThreads, pending: int) -> None:
        for lead in active.warpgroups.tolist():
            groups = self.groups(lead)
            done = len(groups.times) - pending
            if done <= 0:
                continue
            if self.context.races is not None:
                agent = self.context.races.proxy.products(lead)
                self.context.races.synchronize().learn(
                    np.arange(lead, lead + WARPGROUP_WARPS), agent, groups.times[done - 1]
                )
            del groups.times[:done]
            groups.retired += done
            self.registers.retire(lead, pending)
        retired = {lead: self.groups(lead).retired for lead in active.warpgroups.tolist()}
        for accumulators in self._accumulators.values():
            landed = [lead for lead, number in retired.items() if accumulators.groups.get(lead, number) < number]
            if landed:
                accumulators.write(warps_of(np.array(landed)))
                for lead in landed:
                    del accumulators.groups[lead]

    def _check_registers(self, start: int, end: int, active: ActiveThreads) -> None:
        for lead in active.warpgroups.tolist():
            pc = self.registers.touched_in_flight(lead, start, end)
            if pc is not None:
                raise AsyncFault(
                    f"The warpgroup of {self.threads.describe(lead * WARP)} touches registers of a wgmma that it has "
                    "not waited for in "
                    f"{self.context.kernel.instructions[pc]}."
                )
            pc = self.unfenced.run(lead, start, end)
            if pc is not None:
                raise AsyncFault(
                    f"The warpgroup of {self.threads.describe(lead * WARP)} issues its first product, or one whose "
                    f"registers it has written, with no wgmma.fence before {self.context.kernel.instructions[pc]}."
                )


def warps_of(leads: Numbers) -> Numbers:
    """All warps of the warpgroups that have these first warps."""
    return (leads[:, None] + np.arange(WARPGROUP_WARPS)).ravel()


def matrix_products(context: Context) -> MatrixProducts:
    return context.cached("matrix products", lambda: MatrixProducts(context))
