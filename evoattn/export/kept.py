"""A small problem of a kernel whose inputs and answer an exported program keeps: the check of operations and variants
for which there is no reference in C++."""

import math
from collections.abc import Iterable

import numpy as np
import torch

from evoattn.correctness.cases import Case, proof_of
from evoattn.correctness.interpreter_cases import SmallCase
from evoattn.export.recorded import Recorded
from evoattn.model.dtype import DTYPES
from evoattn.model.launch import KernelLaunch

SEED = 1


def kept_case(recorded: Recorded) -> tuple[Case, tuple[KernelLaunch, ...], dict[str, int]]:
    """Of the interpreter's plain cases, and the half of them with more FLOP, the one with the fewest bytes; its
    launches and its scratch buffers."""
    family, config, gpu = recorded.family, recorded.config, recorded.study.spec
    cases = proof_of(recorded.problem).interpreter_cases(recorded.problem, config)
    plain = [case for case in cases if case == SmallCase(case.name, case.problem, tile=case.tile, kept=case.kept)]
    half = sorted(plain, key=lambda case: case.problem.flops)[len(plain) // 2 :]
    small = min(half, key=lambda case: sum(tensor.bytes for tensor in case.problem.inputs))
    problem = small.problem
    return small.make(SEED), family.launches(problem, config, gpu), family.workspace(problem, config, gpu)


_NAMES = {dtype.torch: name for name, dtype in DTYPES.items()}
"""Of dtypes, by their names in torch."""


def kept_constants(case: Case, buffers: list[str]) -> str:
    """Inputs and answers in C++. `buffers` are the names of all buffers, in their order."""
    specs = {tensor.name: tensor for tensor in case.problem.outputs}
    lines = [_words(f"INPUT_{name.upper()}", _memory(tensor)) for name, tensor in case.tensors.items()]
    for name, exact in case.answer.items():
        spec = specs[name]
        laid_out = torch.empty(math.prod(spec.shape)).as_strided(spec.shape, spec.strides).copy_(exact.values)
        lines.append(_words(f"ANSWER_{name.upper()}", _memory(laid_out)))
    answers = case.answer.values()

    def table(kind: str, name: str, count: str, values: Iterable[object]) -> None:
        lines.append(f"constexpr {kind} {name}[{count}] = {{{', '.join(map(str, values))}}};")

    lines += [f"constexpr int KEPT_INPUTS = {len(case.tensors)}, ANSWERS = {len(case.answer)};"]
    table("int", "INPUT_BUFFERS", "KEPT_INPUTS", map(buffers.index, case.tensors))
    table("const unsigned*", "INPUT_WORDS", "KEPT_INPUTS", (f"INPUT_{name.upper()}" for name in case.tensors))
    table("int", "ANSWER_BUFFERS", "ANSWERS", map(buffers.index, case.answer))
    table("const unsigned*", "ANSWER_WORDS", "ANSWERS", (f"ANSWER_{name.upper()}" for name in case.answer))
    table("const char*", "ANSWER_NAMES", "ANSWERS", (f'"{name}"' for name in case.answer))
    table("Dtype", "ANSWER_DTYPES", "ANSWERS", (f"Dtype::{_NAMES[specs[name].dtype]}" for name in case.answer))
    table("size_t", "ANSWER_ELEMENTS", "ANSWERS", (exact.values.numel() for exact in answers))
    table("double", "ALLOWED_LARGEST", "ANSWERS", (_double(exact.allowed_error) for exact in answers))
    table("double", "ALLOWED_RMS", "ANSWERS", (_double(exact.allowed_rms) for exact in answers))
    table("bool", "LOGARITHMS", "ANSWERS", (str(exact.logarithms).lower() for exact in answers))
    return "\n".join([*lines, ""])


def _double(value: float) -> str:
    return repr(value) if math.isfinite(value) else "INFINITY"


def _memory(tensor: torch.Tensor) -> bytes:
    """The tensor's elements as they lie in memory, which they fill."""
    whole = tensor.as_strided((tensor.numel(),), (1,))
    return whole.view(torch.uint8).numpy().tobytes()


def _words(name: str, memory: bytes) -> str:
    """An array of words of 32 bits, the last one filled up with zeros."""
    words = np.frombuffer(memory + bytes(-len(memory) % 4), "<u4")
    return f"constexpr unsigned {name}[] = {{{', '.join(map(hex, words))}}};"
