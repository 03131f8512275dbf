"""Inputs and answers that an exported program keeps, read back from its C++: the same numbers in the same memory."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evoattn.correctness.cases import make_case
from evoattn.correctness.interpreter_cases import SmallCase, interpreter_cases
from evoattn.export.kept import SEED, kept_case, kept_constants
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem

BUFFERS = ["sinks", "o", "lse", "q", "k", "v"]


def words(text, name):
    found = re.search(rf"constexpr unsigned {name}\[\] = \{{([^}}]*)\}};", text)
    return np.array([int(word, 16) for word in found[1].split(", ")], "<u4")


def listed(text, name):
    return re.search(rf" {name}\[\w+\] = \{{([^}}]*)\}};", text)[1].split(", ")


def test_a_kept_case_reads_back_as_it_was():
    problem = AttentionProblem(1, 3, 1, 5, 9, 24, "fp16", layout="bshd", lse=True, sink=True)
    case = make_case("", problem, 1, "cpu")
    text = kept_constants(case, BUFFERS)
    for name, tensor in case.tensors.items():
        memory = words(text, f"INPUT_{name.upper()}").tobytes()
        flat = torch.frombuffer(bytearray(memory), dtype=tensor.dtype)
        assert len(memory) - 4 < tensor.numel() * tensor.element_size() <= len(memory)
        assert torch.equal(flat[: tensor.numel()].as_strided(tensor.shape, tensor.stride()), tensor)
    o = torch.from_numpy(words(text, "ANSWER_O").view(np.float32).copy())
    laid_out = o.as_strided(problem.shape("o"), problem.strides("o"))
    torch.testing.assert_close(laid_out.double(), case.answer["o"].values.double(), atol=1e-6, rtol=1e-6)
    lse = torch.from_numpy(words(text, "ANSWER_LSE").view(np.float32).copy())
    torch.testing.assert_close(lse, case.answer["lse"].values.float().flatten())
    names = list(case.tensors)
    assert f"KEPT_INPUTS = {len(names)}, ANSWERS = 2;" in text
    assert listed(text, "INPUT_BUFFERS") == [str(BUFFERS.index(name)) for name in names]
    assert listed(text, "INPUT_WORDS") == [f"INPUT_{name.upper()}" for name in names]
    assert listed(text, "ANSWER_BUFFERS") == ["1", "2"] and listed(text, "ANSWER_NAMES") == ['"o"', '"lse"']
    assert listed(text, "ANSWER_WORDS") == ["ANSWER_O", "ANSWER_LSE"]
    assert listed(text, "ANSWER_DTYPES") == ["Dtype::fp16", "Dtype::fp32"]
    assert listed(text, "ANSWER_ELEMENTS") == [str(5 * 3 * 24), "15"]
    answers = case.answer.values()
    assert listed(text, "ALLOWED_LARGEST") == [repr(exact.allowed_error) for exact in answers]
    assert listed(text, "ALLOWED_RMS") == [repr(case.answer["o"].allowed_rms), "INFINITY"]
    assert listed(text, "LOGARITHMS") == ["false", "true"]


@pytest.mark.parametrize("family", ["flash_mma", "three_kernel"])
def test_the_kept_case_is_plain_and_small_but_not_the_least(family):
    problem = AttentionProblem(1, 2, 2, 100, 100, 64, "fp16")
    config, gpu = load_space(family, GPUS["l4"]).starting_configs()[0], GPUS["l4"]
    recorded = SimpleNamespace(family=FAMILIES[family], config=config, problem=problem, study=SimpleNamespace(spec=gpu))
    case, launches, scratch = kept_case(recorded)
    usual = interpreter_cases(problem, config)
    plain = [c for c in usual if c.kind == "plain" and not (c.far or c.sms or c.cold or c.late_blocks)]
    larger = sorted(plain, key=lambda c: c.problem.flops)[len(plain) // 2 :]
    least = min(larger, key=lambda c: sum(tensor.bytes for tensor in c.problem.inputs))
    assert (case.name, case.problem) == (least.name, least.problem)
    again = SmallCase(least.name, least.problem).make(SEED)
    assert all(torch.equal(case.tensors[name], tensor) for name, tensor in again.tensors.items())
    assert launches == FAMILIES[family].launches(case.problem, config, gpu)
    assert scratch == FAMILIES[family].workspace(case.problem, config, gpu)
