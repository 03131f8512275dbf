"""What a run did, in numbers: the raw material of the cost model."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from evoattn.ptx.isa.control import Flow
from evoattn.ptx.memory.traffic import Traffic
from evoattn.ptx.program.kernel import Numbers


@dataclass(frozen=True)
class Counters:
    """Dynamic counts over all warps that ran. An instruction counts once per warp; a `mov` does not, since ptxas folds
    most of them away."""

    issue_slots: float = 0.0
    """Instructions of every class but moves."""
    tensor_flops: float = 0.0
    """Floating-point operations of mma, wmma and wgmma, two per multiply-add."""
    fp32: float = 0.0
    """Floating-point additions, products, extremes (of one number or a pair)."""
    int_ops: float = 0.0
    """Integer arithmetic, logic, comparisons, selects."""
    special: float = 0.0
    """Special functions: exponentials, logarithms, roots, reciprocals, divisions."""
    conversions: float = 0.0
    shuffles: float = 0.0
    """Shuffles, votes, reductions over a warp."""
    barriers: float = 0.0
    """Barrier arrivals, one per warp."""
    branches: float = 0.0
    memory_ops: float = 0.0
    """Loads, stores, atomics, matrix loads, asynchronous copies."""
    shared_wavefronts: float = 0.0
    """Passes through shared memory, 128 bytes each at best; bank conflicts add passes."""
    shared_wavefronts_ideal: float = 0.0
    """Passes that the same accesses would take without bank conflicts."""
    global_sectors: float = 0.0
    """32-byte sectors touched, each once per instruction and warp."""
    global_bytes: float = 0.0
    """Bytes that threads asked for, loads and stores."""
    async_copy_bytes: float = 0.0
    """Bytes written to shared memory by cp.async and by tensor copies."""

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Counters) -> Counters:
        return self + other * -1.0

    def __mul__(self, factor: float) -> Counters:
        return Counters(*(getattr(self, f.name) * factor for f in fields(self)))


CLASS_FIELDS = {
    "fp32": "fp32",
    "int": "int_ops",
    "sfu": "special",
    "cvt": "conversions",
    "shuffle": "shuffles",
    "barrier": "barriers",
    "branch": "branches",
    "memory": "memory_ops",
}
"""The counter that each `kind` of instruction adds to beside `issue_slots`; `move` adds to none, `tensor` its FLOPs."""


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
