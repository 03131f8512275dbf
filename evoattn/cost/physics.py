"""The physical part of the cost: the time of each launch in µs, term by term: what keeps each unit of the fullest SM
busy, what a chain of waits takes, and what memory takes; put together as units that work beside one another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, mul

from evoattn.cost.fitted import Weights
from evoattn.families.gangs import TilesInOrder
from evoattn.families.work import LAST_PARTS, SHARED_LINE, LaunchWork, Step
from evoattn.model.gpu import GpuSpec

SCHEDULERS = 4
"""Of an SM; each has a warp's instructions, a quarter of every unit, and its own warps."""
LOAD_CLOCKS = 700.0
"""From a load to its data where L2 or memory answers, in a busy card."""
HELD = 0.7, 1.3
"""Of the size of L2: bytes up to which all are found there again, and from which on none."""
CLUSTERS, CLUSTERS_ALONE, CLUSTERS_OF = {4: 30, 6: 20, 8: 14}, {6: 17}, 132
"""Clusters of so many blocks, one on an SM, that so many SMs run at once: a cluster lies within a part of the card, and
what is left of that part is idle. In the campaigns 30 clusters of 4 blocks (60 with two on an SM) take as long as
fewer on the H100 and the H200, and 31 take 1.3 to 1.8 times as long. So do more than 20 of 6, and 16 of 8. Cards differ
in which SMs they lack: by the driver an H200 runs 17 clusters of 6 that are alone on their SMs, and 39 with two on an
SM. There 20 take 1.5 times as long as the same blocks without clusters."""
TF32_SHARE = 0.5
"""Of the 16-bit matrix rate."""


@dataclass
class LaunchTerms:
    """Clocks of the fullest SM, and bytes of memory."""

    tensor: float
    fp32: float
    special: float
    issue: float
    shared: float
    l2: float
    chain: float
    """One warp's instructions and waits, one after another, over all blocks that run in turn at one place of an SM."""
    fetch: float
    """Waits for loads that were not begun early enough."""
    ends: float
    """First loads, last stores and merges of blocks that run in turn at one place of an SM."""
    dram_bytes: float
    """Bytes that come from or go to memory, not L2."""
    least_dram_bytes: float
    """Of these, those that do whatever the order of the blocks."""
    resident: int
    beside: int
    """Blocks on the fullest SM at once."""
    waves: float
    tail: float
    """Share of the card's time in which SMs have nothing to do: short last wave, uneven blocks."""

    @property
    def units(self) -> dict[str, float]:
        """Busy clocks by unit."""
        return {name: getattr(self, name) for name in ("tensor", "fp32", "special", "issue", "shared", "l2")}


@dataclass
class _Turns:
    serial: float
    """Steps of the place (where one block at a time is resident) that has most."""
    busy: float
    """Steps of the SM that has most, of all blocks on it."""
    rounds: float
    """Blocks that run in turn at that place."""
    blocks_of_sm: float


def _places(work: LaunchWork, resident: int, gpu: GpuSpec) -> int:
    """Blocks that run at once."""
    if clusters := (CLUSTERS | (CLUSTERS_ALONE if resident == 1 else {})).get(work.cluster):
        return max(1, clusters * gpu.sm_count // CLUSTERS_OF) * work.cluster * resident
    return gpu.sm_count * resident


def _turns(work: LaunchWork, resident: int, gpu: GpuSpec) -> _Turns:
    """How the blocks are dealt to the SMs: in waves, by turns, or evenly."""
    slots, per_sm = _places(work, resident, gpu), work.blocks / gpu.sm_count
    total = work.blocks * work.steps
    if work.schedule == "balanced":
        gang = work.order.gang(slots, gpu.l2_bytes) if work.order else 1
        slots = min(slots, max(1, work.blocks - 1))
        slots -= slots % gang  # places that whole gangs leave are idle
        return _Turns(total / slots, total / min(slots, gpu.sm_count), work.blocks / slots, per_sm)
    if dealt := work.dealt.to(slots, gpu.sm_count) if work.dealt else None:
        return _Turns(dealt.steps, dealt.steps_of_sm, dealt.tiles, per_sm)
    uneven = work.most_steps > work.steps
    if work.blocks <= slots:
        most = math.ceil(per_sm)
        busy = work.most_steps if most == 1 else max(work.most_steps, most * (work.steps + work.most_steps) / 2)
        return _Turns(work.most_steps, busy, 1.0, most)
    if work.schedule == "claimed" or uneven:
        late = 0.5 if work.longest_first or work.schedule == "claimed" else 1.0
        serial = max(work.most_steps, total / slots + late * (work.most_steps if uneven else work.steps / 2))
        return _Turns(serial, max(work.most_steps, total / gpu.sm_count * (1 + late / 2 * slots / work.blocks)),
                      max(1.0, work.blocks / slots), per_sm)  # fmt: skip
    full, rest = divmod(work.blocks, slots)
    parts = int(work.genes.get(LAST_PARTS, 1))
    rounds, last = math.ceil(rest * parts / slots), math.ceil(rest * parts / gpu.sm_count)
    return _Turns((full + rounds / parts) * work.steps, (full * resident + last / parts) * work.steps, full + rounds,
                  full * resident + last)  # fmt: skip


def _unit_clocks(step: Step, work: LaunchWork, beside: int, gpu: GpuSpec) -> dict[str, float]:
    """Clocks of an SM's units for one step of a block; warps that do not divide over the schedulers leave some idle."""
    warps = beside * work.warps
    idle = math.ceil(warps / SCHEDULERS) * SCHEDULERS / warps
    shares = {"wgmma": 1.0, "mma": gpu.mma_sync_share, "tf32": gpu.mma_sync_share * TF32_SHARE}
    rate = gpu.tensor_flops_per_clock * shares[work.tensor]
    return {
        "tensor": step.tensor_flops / rate * (1.0 if work.tensor == "wgmma" else idle),
        "fp32": step.fp32 / gpu.fp32_lanes * idle,
        "special": step.special / gpu.exp2_per_clock * idle,
        "issue": step.instructions / SCHEDULERS * idle,
        "shared": step.shared_bytes / SHARED_LINE,
        "l2": step.loaded_bytes / gpu.l2_bytes_per_clock,
    }


def _chain_clocks(step: Step, work: LaunchWork, gpu: GpuSpec) -> float:
    """Clocks of one warp that has a scheduler to itself."""
    rate = gpu.tensor_flops_per_clock
    if work.tensor == "wgmma":
        products = step.tensor_flops / max(1, work.warps // SCHEDULERS) / rate
    else:
        share = gpu.mma_sync_share * (TF32_SHARE if work.tensor == "tf32" else 1.0)
        products = step.tensor_flops / work.warps / (rate * share / SCHEDULERS)
    special = step.special / work.warps / (gpu.exp2_per_clock / SCHEDULERS)
    fp32 = step.fp32 / work.warps / (gpu.fp32_lanes / SCHEDULERS)
    return products + special + max(fp32, step.instructions / work.warps) + step.waits


def launch_terms(work: LaunchWork, gpu: GpuSpec) -> LaunchTerms | None:
    """The terms of one launch; None if no block fits on an SM."""
    resident = gpu.blocks_resident(work.registers, work.threads, work.smem_bytes)
    if not resident:
        return None
    turns = _turns(work, resident, gpu)
    beside = max(1, min(resident, math.ceil(work.blocks / gpu.sm_count)))
    step, ends = (_unit_clocks(s, work, beside, gpu) for s in (work.step, work.ends))
    busy = {name: step[name] * turns.busy + ends[name] * turns.blocks_of_sm for name in step}
    loads = work.step.loaded_bytes / work.in_flight_bytes if work.in_flight_bytes else 0.0
    total = work.blocks * work.steps * beside / max(1, gpu.sm_count)
    once, again = _dram_bytes(work, gpu, gpu.sm_count * resident)
    return LaunchTerms(
        **busy,
        chain=_chain_clocks(work.step, work, gpu) * turns.serial,
        fetch=loads * LOAD_CLOCKS * turns.serial,
        ends=_chain_clocks(work.ends, work, gpu) * turns.rounds + work.once_waits,
        dram_bytes=once + again,
        least_dram_bytes=once,
        resident=resident,
        beside=beside,
        waves=work.blocks / _places(work, resident, gpu),
        tail=1.0 - min(1.0, total / (turns.busy * beside)) if turns.busy else 0.0,
    )


def _dram_bytes(work: LaunchWork, gpu: GpuSpec, slots: int) -> tuple[float, float]:
    """Bytes beyond what L2 holds: the different ones once, as a call finds what the call before left there, and K and
    V again for each row of blocks that comes back to them too late."""
    once = work.read_bytes + work.write_bytes
    heads = max(1.0, work.blocks / work.sweepers)
    at_once = min(1.0, max(work.heads_in_turn, slots / work.sweepers) / heads)
    visits = min(work.visits, work.heads_in_turn * work.sweepers / slots)
    between = work.sweep_bytes * work.visit_share * at_once
    again = work.sweep_bytes * max(0.0, visits * work.visit_share - 1) * _missed(between, gpu)
    if work.order:
        again += _apart_bytes(work.order, work.sweepers, gpu, slots)
    held, fresh = _missed(once, gpu), once - work.scratch_bytes
    return once * held + fresh * (_missed(once + work.others_bytes, gpu) - held), again


def _apart_bytes(order: TilesInOrder, sweepers: float, gpu: GpuSpec, slots: int) -> float:
    """Bytes of K and V that are read again for the tiles of rows that are cut (`TilesInOrder.cut`): tiles of the same
    keys are read at other times, but for those of one gang. `slots`: blocks that run at once."""
    blocks, again = min(slots, max(1, order.count - 1)), sweepers / order.gang(slots, gpu.l2_bytes) - 1
    cut = order.key_bytes * order.cut(blocks) / order.count
    between = order.bytes_between(blocks) if order.sharing >= sweepers else cut  # or the tiles lie far apart
    return cut * max(0.0, again) * _missed(between, gpu)


def _missed(wanted: float, gpu: GpuSpec) -> float:
    """Share of `wanted` bytes that are not in L2 when they are read again and again."""
    return min(1.0, max(0.0, wanted / gpu.l2_bytes - HELD[0]) / (HELD[1] - HELD[0]))


UNITS = ("tensor", "fp32", "special", "issue", "shared", "l2")
PARTS = (*UNITS, "dram", "chain", "fetch", "ends", "launches")
BESIDE = 3.0
"""Exponent of the norm by which busy units, waits and memory make one time: 1 would add them up, and a large one would
leave the longest."""
FLOOR = 16.0
"""Exponent of the norm by which memory's bandwidth bounds a corrected time."""
OVERLAPPED_SHARE = 0.5
"""Of a launch's fixed time that is left where it may begin before the launch before it has ended."""


@dataclass
class Physics:
    """All launches of a call, and what they take."""

    works: tuple[LaunchWork, ...]
    terms: tuple[LaunchTerms, ...]
    us: float
    parts: dict[str, float]
    """µs of each term by itself, over all launches, by the names of `PARTS`. They run beside one another, so that they
    add up to more than `us`."""
    memory_us: float
    """What the bytes that L2 does not hold take at the memory's whole bandwidth: no kernel is faster."""

    def corrected(self, factor: float) -> float:
        """`us` times a fitted factor, but never below `memory_us`: a smooth maximum, which keeps the order."""
        least = max(self.memory_us, 1e-9)
        return math.pow(math.pow(self.us * factor / least, FLOOR) + 1.0, 1 / FLOOR) * least


def physics(works: Sequence[LaunchWork], gpu: GpuSpec, weights: Weights) -> Physics | None:
    """The launches' times in µs, added up; None if no block of one fits on an SM."""
    found = [launch_terms(work, gpu) for work in works]
    terms = [t for t in found if t is not None]
    if len(terms) < len(works):
        return None
    us_per_clock, total, summed = 1e-3 / gpu.boost_clock_ghz, 0.0, [0.0] * len(PARTS)
    units = [us_per_clock * weights.units[name] for name in UNITS]
    dram = weights.units["dram"] / gpu.dram_gb_per_s / 1e3
    for work, t in zip(works, terms, strict=True):
        chain, fetch = t.chain * us_per_clock * weights.chain, t.fetch * us_per_clock * weights.fetch
        busy = [t.tensor, t.fp32, t.special, t.issue, t.shared, t.l2]
        busy = [*map(mul, busy, units), t.dram_bytes * dram]
        ends = t.ends * us_per_clock * weights.ends
        launch = weights.launch_us * (OVERLAPPED_SHARE if work.overlaps else 1.0)
        beside = sum([x**BESIDE for x in busy]) + (chain + fetch) ** BESIDE
        total += beside ** (1 / BESIDE) + ends + launch
        summed = [*map(add, summed, (*busy, chain, fetch, ends, launch))]
    parts = dict(zip(PARTS, summed))
    memory = sum(t.least_dram_bytes for t in terms) / gpu.dram_gb_per_s / 1e3
    return Physics(tuple(works), tuple(terms), total, parts, memory)
