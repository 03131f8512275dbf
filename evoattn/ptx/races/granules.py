"""The smallest access of a kernel: race detectors keep one entry for each piece of memory of that size."""

import re
from functools import lru_cache

from evoattn.ptx.program.kernel import Kernel


@lru_cache(maxsize=16)
def shared_granule(kernel: Kernel) -> int:
    """The smallest access in bytes that the kernel can make to shared memory: 1, 2, 4, 8 or 16."""
    smallest = 16
    for ins in kernel.instructions:
        parts = ins.opcode.split(".")
        if parts[0] in ("ld", "st", "atom", "red") and not {"global", "param", "local", "const"} & set(parts):
            vector = next((int(p[1:]) for p in parts if p in ("v2", "v4", "v8")), 1)
            digits = "".join(c for c in parts[-1] if c.isdigit()) if "x2" not in parts[-1] else "32"
            smallest = min(smallest, vector * int(digits) // 8)
        elif parts[:2] == ["cp", "async"] and len(ins.operands) > 2 and ins.operands[2].isdigit():
            smallest = min(smallest, int(ins.operands[2]))
    return smallest


@lru_cache(maxsize=16)
def global_granule(kernel: Kernel) -> int:
    """The smallest access in bytes that the kernel can make to global memory: 1, 2, 4, 8 or 16."""
    smallest, elsewhere = 16, {"shared", "shared::cluster", "shared::cta", "param", "local", "const"}
    for ins in kernel.instructions:
        parts = ins.opcode.split(".")
        if parts[0] in ("ld", "st", "atom", "red") and not elsewhere & set(parts):
            vector = next((int(p[1:]) for p in parts if re.fullmatch("v[248]", p)), 1)
            bits = 32 if "x2" in parts[-1] else int("".join(c for c in parts[-1] if c.isdigit()))
            smallest = min(smallest, vector * bits // 8)
        elif parts[:2] == ["cp", "async"]:
            smallest = min(smallest, 2 if "tensor" in parts or len(ins.operands) > 3 else 4)
        elif parts[:2] == ["cp", "reduce"]:
            smallest = min(smallest, 4)
    return smallest
