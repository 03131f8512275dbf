"""Packed sequences by the op on a GPU: right by a kernel and by torch, without waiting for the device, and right again
in the replay of a graph after the lengths have changed."""

import pytest
import torch

import evoattn
from evoattn.backends.platform import CudaPlatform
from evoattn.correctness.cases import sequenced
from evoattn.correctness.reference import make_inputs
from evoattn.model.shape_text import parse_shape
from evoattn.ops.runtime import Runtime, current
from tests.ops.gpu.gpu_problems import ON_A_GPU, require_answer, without_waiting

pytestmark = ON_A_GPU
PACKED = [
    "B=40,H=8,Hkv=2,S=1500,D=128,dtype=bf16,layout=bshd,mask=causal_lower_right,varlen=log:16:1500",
    "B=100,H=12,S=512,D=64,layout=bshd,varlen=0:512",
    "B=9,H=4,S=700,D=256,dtype=bf16,varlen=1:700,window=100:0,mask=causal_lower_right",
]


def call(problem, tensors, strict=True):
    """The op's answer, of the problem's logical shape."""
    window = tuple(map(int, problem.window.split(":"))) if problem.window else (-1, -1)
    return evoattn.attention_varlen(
        *(tensors[name][0].transpose(0, 1) for name in "qkv"),
        tensors["cu_seqlens_q"],
        tensors["cu_seqlens_k"],
        problem.seqlen_q,
        problem.seqlen_k,
        causal=problem.mask != "full",
        window=window,
        softcap=problem.softcap,
        strict=strict,
    ).transpose(0, 1)[None]


@pytest.mark.parametrize("shape", PACKED)
def test_right_without_waiting(shape):
    problem = parse_shape(shape)
    tensors = make_inputs(problem, 1, "cuda")
    call(problem, tensors)  # compiles, loads and checks
    require_answer(problem, tensors, without_waiting(lambda: call(problem, tensors)))


@pytest.mark.parametrize("shape", [*PACKED, f"{PACKED[2]},softcap=20"])
def test_torch_is_right_without_waiting(shape, tmp_path):
    problem = parse_shape(shape)
    tensors = make_inputs(problem, 1, "cuda")
    with current.use(Runtime(CudaPlatform(), lambda problem, gpu: None, tmp_path)):
        call(problem, tensors, strict=False)
        out = without_waiting(lambda: call(problem, tensors, strict=False))
    require_answer(problem, tensors, out)


def test_sequences_without_queries_or_keys():
    problem = sequenced(parse_shape("B=1,H=4,Sq=300,Sk=500,D=64,layout=bshd,mask=causal_lower_right"))
    tensors = make_inputs(problem, 1, "cuda")
    require_answer(problem, tensors, call(problem, tensors))


@pytest.mark.parametrize("shape", PACKED)
def test_a_graph_replays_with_other_lengths(shape):
    problem = parse_shape(shape)
    tensors = make_inputs(problem, 1, "cuda")
    call(problem, tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(problem, tensors)
    lengths = [queries for queries, _ in problem.sequences]
    other = problem.with_(varlen="+".join(map(str, reversed(lengths))))
    for name, fresh in make_inputs(other, 2, "cuda").items():
        tensors[name].copy_(fresh)
    graph.replay()
    require_answer(other, tensors, out)


def test_compiled_code_has_the_gradients_of_eager_code():
    """Both by the same kernels."""
    problem = parse_shape(PACKED[1])
    tensors = make_inputs(problem, 1, "cuda")
    found = []
    with torch.enable_grad():
        for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
            tensors["q"] = tensors["q"].detach().requires_grad_()
            run(problem, tensors, strict=False).float().square().sum().backward()
            found.append(tensors["q"].grad.float())
    assert torch.allclose(*found, atol=2e-2 * float(found[0].abs().max()), rtol=2e-2)
