"""How many PTX instructions of each class a kernel has: a loop's body counts once, however often it runs."""

import json
import re
import subprocess
import sys
from collections import Counter

LIMIT_S = 10.0
"""A page waits no longer for the compiler; a kernel whose machine code is in the cache takes a second."""

OTHER = "integers and logic"
CLASSES = (
    ("tensor cores", r"mma\.|wgmma\.mma_async|wmma\.mma"),
    ("special functions", r"(ex2|lg2|rcp|r?sqrt|sin|cos|tanh)\.|div\..*\.f\d"),
    (
        "barriers and fences",
        r"bar\.|barrier\.|mbarrier\.|fence\.|membar\.|griddepcontrol|wgmma\.|cp\.async.*(commit|wait)",
    ),
    ("asynchronous copies", r"cp\.(async|reduce)"),
    ("shared memory", r"(ld|st|atom|red)\.[\w.:]*shared|ldmatrix|stmatrix|wmma\.(load|store)\.[\w.]*shared"),
    ("moves and parameters", r"mov\.|cvta|ld\.param|mapa"),
    ("global memory", r"(ld|ldu|st|atom|red|prefetch\w*|wmma\.load|wmma\.store)\."),
    ("shuffles and votes", r"shfl|vote|match|redux|activemask|elect"),
    ("conversions", r"cvt\."),
    ("branches", r"bra|brx|ret|exit|call"),
    ("floating point", r"\w+\..*\.?(f16|f16x2|bf16|bf16x2|f32|f32x2|f64)\b"),
    (OTHER, r""),
)
"""What a reader looks for, and the opcodes (PTX ISA 9.0, chapter 9) that begin so; the first that fits counts."""

Counts = dict[str, dict[str, int]]
"""Kernel → class → instructions; the classes in the order of `CLASSES`, those without any left out."""


def class_of(opcode: str) -> str:
    """The class of one PTX opcode, e.g. `ld.shared.v4.u32`."""
    return next(name for name, pattern in CLASSES if re.match(pattern, opcode))


def counts_of(ptx: str) -> Counts:
    """Instructions by kernel and class. Raises `UnsupportedInstruction` on PTX that cannot be parsed."""
    from evoattn.ptx import parse_program

    found = {}
    for kernel in parse_program(ptx).kernels.values():
        classes = Counter(class_of(instruction.opcode) for instruction in kernel.instructions)
        found[kernel.name] = {name: classes[name] for name, _ in CLASSES if classes[name]}
    return found


def count_instructions(source: str, arch: str) -> Counts | str:
    """The counts of a recorded source, or the sentence that says why there are none.

    A process of its own compiles it or reads the cache of compiled kernels: it can be stopped after `LIMIT_S` seconds,
    and the report need not import the compiler."""
    if not source:
        return "No source is recorded."
    order = json.dumps({"source": source, "arch": arch})
    command = [sys.executable, "-m", "evoattn.report.instructions"]
    try:
        done = subprocess.run(command, input=order, capture_output=True, text=True, timeout=LIMIT_S)
        counts: Counts = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return f"Not counted: compiling the kernel for this page took over {LIMIT_S:.0f} s."
    except (OSError, ValueError):
        return "Not counted: the kernel could not be compiled here."
    return counts


def main() -> None:
    """Read `{source, arch}` as JSON, write the counts as JSON; exit code 1 if it does not compile."""
    from evoattn.backends.compiler import CompileError, compile_candidate
    from evoattn.model.records import Candidate
    from evoattn.ptx import UnsupportedInstruction

    order = json.load(sys.stdin)
    try:
        compiled = compile_candidate(Candidate("", {}, "", order["source"], order["arch"]))
        json.dump(counts_of(compiled.ptx), sys.stdout)
    except (CompileError, ImportError, UnsupportedInstruction) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
