"""Cases in one piece of memory are the cases that they were."""

import torch

from evoattn.correctness.arena import Vault
from evoattn.correctness.cases import device_cases, make_case, packed, tensors_of
from evoattn.model.problem import AttentionProblem


def test_packed_cases_hold_the_same_and_any_change_is_seen():
    problem = AttentionProblem(1, 4, 2, 96, 96, 16, lse=True)
    cases = [make_case(name, case, 1, "cpu", kind) for name, case, kind in device_cases(problem)[:3]]
    moved, memory = packed(cases)
    for before, after in zip(cases, moved, strict=True):
        assert (before.name, before.problem, before.answer.allowed_error) == (
            after.name,
            after.problem,
            after.answer.allowed_error,
        )
        for one, other in zip(tensors_of(before), tensors_of(after), strict=True):
            assert torch.equal(one, other) and one.stride() == other.stride() and one.dtype == other.dtype
    vault = Vault([memory])
    for case in moved:
        for tensor in tensors_of(case):
            kept = tensor[0, 0, 0].clone()
            tensor[0, 0, 0] += 1
            assert not vault.intact()
            tensor[0, 0, 0] = kept
            assert vault.intact()
