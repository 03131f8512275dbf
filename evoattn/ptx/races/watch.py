"""All race detectors of one machine."""

from dataclasses import dataclass

from evoattn.ptx.races.async_proxy import AsyncRaces
from evoattn.ptx.races.global_accesses import GlobalRaces
from evoattn.ptx.races.happens_before import HappensBefore
from evoattn.ptx.races.shared_accesses import SharedRaces


@dataclass(frozen=True)
class Races:
    """They share the clocks of `shared`. `grid` goes on from one batch of blocks to the next, the others do not."""

    shared: SharedRaces
    proxy: AsyncRaces
    grid: GlobalRaces

    @property
    def order(self) -> HappensBefore:
        return self.shared.order

    def synchronize(self) -> HappensBefore:
        """The clocks, for a synchronization that happens now."""
        return self.shared.synchronize()

    def faults(self) -> list[str]:
        """A sentence for each racing instruction: those of shared memory first, in the order of the program."""
        self.shared.check()
        return [text for found in (self.shared.found, self.grid.found) for _, text in sorted(found.items())]
