"""Counters out of how often each instruction was executed."""

import re

from evoattn.ptx.isa.flow import Flow
from evoattn.ptx.machine.counters import CLASS_FIELDS, Counters
from evoattn.ptx.memory.traffic import Traffic
from evoattn.ptx.program.arrays import Numbers

_TENSOR_FLOPS = {"m16n8k16": 4096, "m16n8k8": 2048, "m16n8k4": 1024, "m16n16k16": 8192}
"""Two a multiply-add, for a whole warp."""


def _tensor_flops(opcode: str) -> int:
    """Of one warp: a quarter of a warpgroup's for wgmma."""
    if shape := re.search(r"\.m64n(\d+)k(\d+)\.", opcode):
        return 2 * 16 * int(shape[2]) * int(shape[1])
    return next((n for shape, n in _TENSOR_FLOPS.items() if f".{shape}." in opcode), 0)


def count_instructions(flow: Flow, executions: Numbers, traffic: Traffic) -> Counters:
    """Counters of a run that executed each instruction so many times, once per warp."""
    totals = dict.fromkeys(Counters.__dataclass_fields__, 0.0)
    for ins, (entry, _), executed in zip(flow.kernel.instructions, flow.entries, executions.tolist()):
        if not executed or entry.kind == "move":
            continue
        totals["issue_slots"] += executed
        if entry.kind == "tensor":
            totals["tensor_flops"] += executed * _tensor_flops(ins.opcode)
        elif entry.kind in CLASS_FIELDS:
            totals[CLASS_FIELDS[entry.kind]] += executed
    totals |= {
        "shared_wavefronts": traffic.wavefronts,
        "shared_wavefronts_ideal": traffic.wavefronts_ideal,
        "global_sectors": traffic.sectors,
        "global_bytes": traffic.global_bytes,
        "async_copy_bytes": traffic.copied_bytes,
    }
    return Counters(**{name: float(value) for name, value in totals.items()})
