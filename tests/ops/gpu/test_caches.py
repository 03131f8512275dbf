"""Keys in use and pages by the op on a GPU: right, without waiting for the device, and right again in the replay of a
graph after lengths and pages have changed."""

import pytest
import torch

import evoattn
from evoattn.correctness.reference import make_inputs
from evoattn.model.shape_text import parse_shape
from tests.ops.gpu.gpu_problems import ON_A_GPU, require_answer, without_waiting

pytestmark = ON_A_GPU
CACHES = [
    "B=5,H=32,Hkv=8,Sq=1,Sk=4000,D=128,dtype=bf16,layout=bshd,seqused=0:4000,page=16",
    "B=5,H=32,Hkv=8,Sq=1,Sk=4000,D=128,dtype=bf16,layout=bshd,seqused=0:4000,page=64",
    "B=3,H=8,Hkv=2,Sq=5,Sk=1000,D=64,dtype=fp16,layout=bshd,seqused=5:1000,page=256",
    "B=5,H=32,Hkv=8,Sq=1,Sk=4000,D=128,dtype=bf16,seqused=0:4000",
    "B=5,H=32,Hkv=8,Sq=1,Sk=3990,D=128,dtype=bf16,seqused=0:3990,bias=bs",
    "B=3,H=32,Hkv=8,Sq=300,Sk=2000,D=128,dtype=bf16,layout=bshd,seqused=7:2000,page=16",
    "B=3,H=32,Hkv=8,Sq=300,Sk=2000,D=128,dtype=bf16,seqused=0:2000",
    "B=5,H=32,Hkv=8,Sq=1,Sk=4000,D=128,dtype=bf16,layout=bshd,seqused=0:4000,page=16,kv=e4m3,scales=head",
    "B=5,H=32,Hkv=8,Sq=1,Sk=4000,D=128,dtype=bf16,layout=bshd,seqused=0:4000,page=64,kv=int8,scales=token",
    "B=3,H=32,Hkv=8,Sq=300,Sk=2000,D=128,dtype=bf16,layout=bshd,seqused=7:2000,page=16,kv=e4m3",
    "B=3,H=32,Hkv=8,Sq=300,Sk=2000,D=64,dtype=fp16,seqused=7:2000,kv=e5m2,scales=token",
    "B=5,H=16,Hkv=1,Sq=1,Sk=4000,D=576,Dv=512,dtype=bf16,layout=bshd,seqused=0:4000,page=64,rotary_apart=1",
    "B=5,H=16,Hkv=1,Sq=2,Sk=4000,D=576,Dv=512,dtype=bf16,layout=bshd,seqused=2:4000,page=64,rotary_apart=1,kv=e4m3,"
    "scales=columns",
    "B=3,H=128,Hkv=1,Sq=2,Sk=3000,D=576,Dv=512,dtype=bf16,layout=bshd,seqused=2:3000,page=16,rotary_apart=1",
]


def call(problem, tensors):
    """The op's answer, of the problem's logical shape."""
    q, k, v = (tensors[name] for name in "qkv")
    scales = {name: tensors[name] for name in problem.scale_shapes}
    if not problem.page:
        bias = tensors["bias"][..., : problem.seqlen_k] if problem.bias else None
        return evoattn.attention(
            q, k, v, enable_gqa=True, seqused_k=tensors["seqused"], bias=bias, strict=True, **scales
        )
    caches = (t.transpose(1, 2) for t in (q, k, v))
    scales = {name: one.transpose(1, 2) if one.dim() > 2 else one for name, one in scales.items()}
    return evoattn.attention_paged(*caches, tensors["table"], tensors["seqused"], strict=True, **scales).transpose(1, 2)


@pytest.mark.parametrize("shape", CACHES)
def test_right_without_waiting(shape):
    problem = parse_shape(shape)
    tensors = make_inputs(problem, 1, "cuda")
    call(problem, tensors)  # compiles, loads and checks
    require_answer(problem, tensors, without_waiting(lambda: call(problem, tensors)))


@pytest.mark.parametrize("shape", CACHES)
def test_a_graph_replays_with_other_lengths_and_pages(shape):
    problem = parse_shape(shape)
    tensors = make_inputs(problem, 1, "cuda")
    call(problem, tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(problem, tensors)
    lowest, highest = 7, problem.seqlen_k
    for seed, other in ((2, problem), (3, problem.with_(seqused=f"{lowest}:{highest}"))):
        for name, fresh in make_inputs(other, seed, "cuda").items():
            tensors[name].copy_(fresh)
        graph.replay()
        require_answer(other, tensors, out)
