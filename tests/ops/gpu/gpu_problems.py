"""Problems, inputs and the judge of the tests that need a GPU."""

from collections.abc import Callable

import pytest
import torch

from evoattn.correctness.judge import judge_one
from evoattn.correctness.reference import make_answer, make_inputs
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape

ON_A_GPU = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
SHAPES = [
    "B=2,H=8,S=1024,D=64,dtype=fp16,mask=full",
    "B=2,H=8,S=1024,D=64,dtype=fp16,mask=causal_upper_left",
    "B=1,H=16,S=1000,D=128,dtype=bf16,mask=causal_upper_left",
    "B=1,H=32,Hkv=8,S=2048,D=128,dtype=bf16,mask=causal_upper_left",
    "B=1,H=32,Hkv=8,Sq=200,Sk=1777,D=128,dtype=bf16,mask=causal_lower_right",
    "B=1,H=8,Sq=300,Sk=200,D=64,dtype=fp16,mask=causal_lower_right",
    "B=1,H=32,Hkv=8,Sq=1,Sk=8192,D=128,dtype=bf16,mask=full",
    "B=16,H=32,Hkv=8,Sq=1,Sk=4000,D=128,dtype=fp16,mask=full",
    "B=2,H=12,S=1023,D=64,dtype=bf16,mask=full,layout=bshd",
    "B=1,H=16,S=777,D=80,dtype=fp16,mask=full,layout=bshd",
    "B=1,H=8,S=1025,D=256,dtype=bf16,mask=causal_upper_left",
    "B=1,H=8,Sq=113,Sk=203,D=96,dtype=fp16,mask=full",
    "B=1,H=4,Sq=64,Sk=16,D=512,dtype=fp32,mask=full",
    "B=1,H=4,S=256,D=64,dtype=fp32,mask=causal_upper_left",
    "B=1,H=4,S=128,D=512,dtype=fp16,mask=full",
]


def flags(problem: AttentionProblem) -> dict:
    causal = problem.mask.removeprefix("causal_") if problem.mask != "full" else None
    return dict(causal=causal, enable_gqa=problem.kv_heads != problem.heads)


def inputs(problem: AttentionProblem, seed: int = 1) -> tuple[torch.Tensor, ...]:
    return tuple(make_inputs(problem, seed, "cuda")[name] for name in "qkv")


def require_right(problem: AttentionProblem, q, k, v, out, scale: float | None = None) -> None:
    """flash-attention's rule, against float64."""
    if scale is not None:  # the reference knows 1/sqrt(head_dim) only
        q = (q.double() * (scale * problem.head_dim**0.5)).to(q.dtype)
    answer = make_answer(problem, dict(q=q, k=k, v=v), double=True)
    reason, _ = judge_one(out, answer["o"])
    assert not reason


def require_answer(problem: AttentionProblem, tensors: dict[str, torch.Tensor], out: torch.Tensor) -> None:
    """As `require_right`, of the inputs of a variant by name."""
    assert judge_one(out, make_answer(problem, tensors, double=True)["o"])[0] == ""


def without_waiting(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `call` returns, which fails if the CPU waits for the GPU in it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


PREFILL = parse_shape(SHAPES[3])
DECODE = parse_shape(SHAPES[6])
