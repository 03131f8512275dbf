"""The proof of the forward pass of numbers of 8 bits that a kernel makes of 16: a `cases.Proof`."""

import torch
from torch import Tensor

from evoattn.correctness import eight_bits, inputs, quantize, reference
from evoattn.correctness import interpreter_cases as forward_cases
from evoattn.correctness.cases import device_cases as device_cases
from evoattn.correctness.interpreter_cases import SmallCase
from evoattn.correctness.terms import torch_dtype
from evoattn.model.forward import WIDE, of_numbers
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig


def make_inputs(
    problem: AttentionProblem, seed: int, device: torch.device | str, kind: str = "plain", tile: int = 64
) -> dict[str, Tensor]:
    """Those of the forward pass of 16 bits; sinks have O's dtype."""
    wide = problem.with_(op="forward", dtype=WIDE[problem.op], scales="")
    made = inputs.make_inputs(wide, seed, device, kind, tile)
    return made | {"sinks": made["sinks"].to(torch_dtype(problem))} if problem.sink else made


def make_answer(
    problem: AttentionProblem, tensors: dict[str, Tensor], kind: str = "plain", double: bool = False
) -> reference.Answer:
    """That of the numbers, which are what `quantize` makes."""
    made = dict(tensors)
    for name in problem.tensors:
        _, heads, rows, _ = problem.shape(name)
        of = problem.with_(
            op="quantize", dtype=WIDE[problem.op], kv="e4m3", heads=heads, seqlen_q=rows, window="", softcap=0.0,
            sink=False, lse=False, mask="full", head_dim=problem.shape(name)[3], value_dim=0, turned=False, scale=None,
        )  # fmt: skip
        answer = quantize.make_answer(of, {"x": tensors[name]})
        numbers = answer["numbers"].values.to(torch.float8_e4m3fn)
        made[name] = eight_bits.turn(numbers) if name == "v" else numbers
        made[f"{name}_scale"] = answer["scale"].values.float()
    return reference.make_case_answer(of_numbers(problem), made, kind, double)


def interpreter_cases(problem: AttentionProblem, config: KernelConfig) -> list[SmallCase]:
    """Those of the forward pass."""
    return forward_cases.interpreter_cases(problem, config)


__all__ = ["device_cases", "interpreter_cases", "make_answer", "make_inputs"]
