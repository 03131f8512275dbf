"""The proof of the forward pass: a `cases.Proof`."""

from evoattn.correctness.cases import device_cases as device_cases
from evoattn.correctness.inputs import make_inputs as make_inputs
from evoattn.correctness.interpreter_cases import interpreter_cases as interpreter_cases
from evoattn.correctness.reference import make_case_answer as make_answer

__all__ = ["device_cases", "interpreter_cases", "make_answer", "make_inputs"]
