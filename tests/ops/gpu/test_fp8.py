"""Attention of 8 bits on a GPU by the kernels that calls take: right beside float64 of the same numbers, and twice with
the same bits; numbers that are made of 16 bits as well."""

import pytest
import torch

import evoattn
from evoattn.backends.platform import CudaPlatform
from evoattn.correctness.judge import judge_one
from evoattn.correctness.reference import make_answer, make_inputs
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.ops.runtime import Runtime, current
from evoattn.portfolio.pick import pick
from tests.ops.gpu.gpu_problems import ON_A_GPU

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == int(GPUS["h200"].arch[3])
pytestmark = [*ON_A_GPU, pytest.mark.skipif(not HOPPER, reason="kernels of 8 bits are Hopper's")]
GIVEN = [
    "B=2,H=8,S=1000,D=64,dtype=e4m3,scales=head,turned=1,mask=causal_upper_left",
    "B=1,H=16,Hkv=4,S=2048,D=128,dtype=e4m3,scales=head,turned=1,layout=bshd",
    "B=1,H=16,Hkv=4,Sq=777,Sk=1777,D=128,dtype=e4m3,scales=head,turned=1,mask=causal_lower_right,layout=bshd",
    "B=1,H=4,S=1111,D=256,dtype=e4m3,scales=head,turned=1,mask=causal_upper_left",
    "B=1,H=4,S=1024,D=256,dtype=e4m3,turned=1,layout=bshd",
    "B=2,H=6,S=640,D=96,dtype=e4m3,scales=head,turned=1",
    "B=1,H=8,S=900,D=192,Dv=128,dtype=e4m3,scales=head,turned=1,mask=causal_upper_left",
    "B=2,H=8,S=1000,D=128,dtype=e4m3,scales=block,turned=1,mask=causal_upper_left",
    "B=2,H=8,Hkv=2,S=1000,D=128,dtype=e4m3,scales=head,turned=1,mask=causal_upper_left,window=200:0",
    "B=2,H=8,Hkv=2,S=1000,D=64,dtype=e4m3,scales=head,window=100:50",
    "B=2,H=8,S=700,D=128,dtype=e4m3,scales=head,softcap=20,mask=causal_upper_left",
    "B=2,H=8,S=700,D=128,dtype=e4m3,scales=head,sink=1,mask=causal_upper_left",
    "B=2,H=8,Hkv=2,S=1000,D=128,dtype=e4m3,kv=e5m2,scales=head,mask=causal_upper_left",
    "B=2,H=8,S=513,D=64,dtype=e4m3,scales=head,lse=1,mask=causal_upper_left",
    "B=9,H=8,Hkv=2,S=700,D=128,dtype=e4m3,scales=head,varlen=1:700,layout=bshd,mask=causal_lower_right",
    "B=5,H=8,Hkv=2,Sq=64,Sk=999,D=64,dtype=e4m3,scales=head,page=64,seqused=64:999,layout=bshd,mask=causal_lower_right",
    "B=5,H=8,Hkv=2,Sq=64,Sk=1000,D=128,dtype=e4m3,scales=head,page=128,seqused=0:1000,layout=bshd",
]
ROUNDED = [
    "B=1,H=16,Hkv=4,S=3000,D=128,dtype=bf16,mask=causal_lower_right,layout=bshd",
    "B=2,H=8,S=2000,D=64,dtype=fp16",
    "B=1,H=4,S=1500,D=256,dtype=bf16,mask=causal_lower_right",
    "B=1,H=4,Sq=300,Sk=9000,D=128,dtype=bf16,mask=causal_lower_right",
    "B=2,H=4,S=1000,D=96,dtype=bf16",
]
MOST = 0.06
"""Of answers of 16 bits that are made in 8, root mean square over theirs: 0.046 to 0.055 of normal numbers."""


@pytest.fixture(autouse=True)
def runtime(folder):
    with current.use(Runtime(CudaPlatform(), pick, folder)) as ours, torch.no_grad():
        yield ours


def call(problem, tensors):
    """Answers by a kernel, by name, of the problem's logical shape."""
    q, k, v = (tensors[name] for name in "qkv")
    scales = {name: tensors.get(name) for name in ("q_scale", "k_scale", "v_scale")}
    causal = problem.mask.removeprefix("causal_") if problem.mask != "full" else None
    window = tuple(map(int, problem.window.split(":"))) if problem.window else None
    words = dict(causal=causal, window=window, softcap=problem.softcap, strict=True)
    if problem.varlen:
        packed = (one[0].transpose(0, 1) for one in (q, k, v))
        starts = tensors["cu_seqlens_q"], tensors["cu_seqlens_k"]
        lengths = problem.seqlen_q, problem.seqlen_k
        return {"o": evoattn.attention_varlen(*packed, *starts, *lengths, **words, **scales).transpose(0, 1)[None]}
    if problem.page:
        caches = (one.transpose(1, 2) for one in (q, k, v))
        out = evoattn.attention_paged(*caches, tensors["table"], tensors["seqused"], **words, **scales)
        return {"o": out.transpose(1, 2)}
    descales = {name.replace("scale", "descale"): one for name, one in scales.items()}
    asked = dict(turned=problem.turned, sinks=tensors.get("sinks"), return_lse=problem.lse)
    out = evoattn.attention_fp8(q, k, v, **words, **descales, **asked)
    return dict(zip(("o", "lse"), out if problem.lse else (out,), strict=False))


@pytest.mark.parametrize("shape", GIVEN)
def test_numbers_that_are_given(shape):
    problem = parse_shape(shape)
    tensors = make_inputs(problem, 1, "cuda")
    first, again = call(problem, tensors), call(problem, tensors)
    right = make_answer(problem, tensors, double=True)
    for name, one in first.items():
        assert judge_one(one, right[name])[0] == ""
        assert torch.equal(one, again[name])


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("shape", ROUNDED)
def test_numbers_that_are_made(shape, smooth):
    problem = parse_shape(shape)
    tensors = make_inputs(problem, 1, "cuda")
    causal = problem.mask.removeprefix("causal_") if problem.mask != "full" else None
    q, k, v = (tensors[name] for name in "qkv")
    first, again = (evoattn.attention_fp8(q, k, v, causal=causal, smooth_k=smooth, strict=True) for _ in range(2))
    right = make_answer(problem, tensors, double=True)["o"].values
    assert (first.double() - right).square().mean().sqrt() < MOST * right.double().square().mean().sqrt()
    assert torch.equal(first, again) and first.dtype == q.dtype
