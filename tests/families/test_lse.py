"""The log-sum-exp output: an optional part of a problem."""

import math
from dataclasses import replace

import pytest
import torch

from evoattn.correctness import reference
from evoattn.families.registry import FAMILIES
from evoattn.model import gpu
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.shape_text import parse_shape

H100 = gpu.GPUS["h100"]


def test_a_problem_without_it_is_recorded_as_before():
    plain = parse_shape("B=1,H=4,S=100,D=64")
    assert parse_shape("B=1,H=4,S=100,D=64,lse=0") == plain and "lse" not in plain.to_dict()
    asked = parse_shape("B=1,H=4,S=100,D=64,lse=1")
    assert (
        asked != plain
        and AttentionProblem(**asked.to_dict()) == asked
        and asked.describe() == plain.describe() + " lse"
    )
    assert asked.bytes == plain.bytes + 4 * 400
    for text in ("lse=2", "lse=maybe", "lse=", "lse=1,lse=1"):
        with pytest.raises(ProblemError, match="lse"):
            parse_shape(f"B=1,H=4,S=100,D=64,{text}")


def test_only_families_that_write_it_take_it():
    plain = [AttentionProblem(1, 1, 1, 64, 64, head_dim) for head_dim in (64, 512)]
    latent = AttentionProblem(1, 16, 1, 1, 64, 576, value_dim=512, shared_kv=True)
    for name, family in FAMILIES.items():
        if "forward" not in family.operations:
            continue
        without = (p.with_(dtype=family.dtypes[0]) for p in (*plain, latent))
        problem = next(p for p in without if not family.why_unsupported(p, H100))
        reason = family.why_unsupported(replace(problem, lse=True), H100)
        assert (
            reason is None
            if name in ("flash_wgmma", "flash_mma", "fp8_wgmma", "latent_columns", "latent_wgmma", "split_kv")
            else "log-sum-exp" in reason
        ), name


def test_the_exact_one_is_that_of_the_scores():
    problem = AttentionProblem(2, 4, 2, 7, 5, 16, "fp16", "causal_lower_right", lse=True)
    tensors = reference.make_inputs(problem, 0, "cpu")
    q, k = tensors["q"].double(), tensors["k"].double().repeat_interleave(2, dim=1)
    visible = torch.ones(7, 5, dtype=torch.bool).tril(-2)
    scores = (q @ k.mT / 4).masked_fill(~visible, -math.inf)
    exact = reference.make_answer(problem, tensors)["lse"].values
    assert torch.equal(exact[:, :, :2], torch.full((2, 4, 2), -math.inf, dtype=torch.float64))
    assert torch.allclose(exact[:, :, 2:], scores.exp().sum(-1).log()[:, :, 2:], atol=1e-12)
