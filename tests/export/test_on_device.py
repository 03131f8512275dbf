"""Exported headers and extensions on a GPU: built by nvcc there, right on problems that they were not found for."""

import ctypes
import importlib
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from evoattn.correctness.judge import judge_one
from evoattn.correctness.reference import make_answer, make_inputs
from evoattn.export.check import export_source
from evoattn.export.header import export_torch, header, namespace_of, write_folder
from evoattn.export.recorded import Recorded
from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import detect_devices
from evoattn.model.problem import AttentionProblem
from tests.export.kernels import HOPPER_GENES, record

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

WRAPPER = """
#include "attention.cuh"
namespace attention = {name};
extern "C" int run(const int* n, const long long* s, double scale, void** tensors, void* workspace, size_t* bytes,
                   int clear, void* stream) {{
  const attention::Problem p = {{n[0], n[1], n[2], n[3], n[4], {{s[0], s[1], s[2]}}, {{s[3], s[4], s[5]}},
                                {{s[6], s[7], s[8]}}, {{s[9], s[10], s[11]}}, scale}};
  if (bytes) return attention::workspace_size(p, bytes);
  if (clear)
    if (cudaError_t error = attention::clear_workspace(p, workspace, (cudaStream_t)stream)) return error;
  return attention::launch(p, {{tensors[0], tensors[1], tensors[2], tensors[3], (float*)tensors[4]}}, workspace,
                           (cudaStream_t)stream);
}}
"""
SHAPES = [  # batch, heads, kv_heads, seqlen_q, seqlen_k, layout
    (1, 1, 1, 1, 1, "bhsd"),
    (3, 6, 2, 77, 1025, "bshd"),
    (1, 16, 16, 1000, 1000, "bhsd"),
    (16, 8, 1, 1, 4001, "bshd"),
    (1, 4, 4, 2048, 130, "bhsd"),
]
CASES = [
    *((name, {}) for name, family in FAMILIES.items() if family.plain and "forward" in family.operations),
    *HOPPER_GENES.items(),
    ("split_kv", {"MERGE": "cluster"}),
    ("split_kv", {"MERGE": "last_block", "SPLITS": 8}),
    ("flash_wgmma", {"KEY_SPLIT": 2}),
    ("flash_wgmma", {"SCHEDULE": "claimed"}),
]


LATENT = dict(kv_heads=1, seqlen_q=1, head_dim=576, value_dim=512, shared_kv=True, mask="full")
CHECKED = {
    "pages": ("flash_wgmma", dict(seqused="0:500", page=16, sink=True)),
    "packed": ("flash_wgmma", dict(varlen="0:300/100:500", mask="causal_lower_right", window="99:0")),
    "deepseek": ("flash_wgmma", dict(head_dim=192, value_dim=128)),
    "packed_mma": ("flash_mma", dict(varlen="100:300", seqlen_k=300, value_dim=32)),
    "bias_mma": ("flash_mma", dict(seqused="0:500", bias="hs")),
    "decoding": ("split_kv", dict(seqused="0:4000", page=64)),
    "latent": ("latent_wgmma", LATENT | dict(seqused="0:500", page=64)),
}


@pytest.fixture
def kernel(request, database, nvcc):
    """A family's kernel for this GPU."""
    family, genes = request.param
    spec = detect_devices()[0].spec
    if spec is None or (spec.capability < (9, 0) and (genes or family == "flash_wgmma")):
        pytest.skip("the kernel is of Hopper")
    return Recorded.read(database, record(database, family, spec.name, genes))


def problems(kernel: Recorded) -> list[AttentionProblem]:
    """Those of `SHAPES` that the kernel can serve, with its head_dim, dtype and mask."""
    p = kernel.problem
    made = (AttentionProblem(*s[:5], p.head_dim, p.dtype, p.mask, s[5], lse=p.lse) for s in SHAPES)
    spec = detect_devices()[0].spec
    return [problem for problem in made if kernel.family.why_impossible(problem, kernel.config, spec) is None]


def build(kernel: Recorded, folder, nvcc) -> ctypes.CDLL:
    (folder / "attention.cuh").write_text(header(kernel, []))
    (folder / "run.cu").write_text(WRAPPER.format(name=namespace_of(kernel)))
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}" + "a" * (major == 9)
    command = [nvcc, "-std=c++17", "-O3", f"-arch={arch}", "-shared", "-Xcompiler", "-fPIC", folder / "run.cu"]
    subprocess.run([*command, "-o", folder / "run.so"], check=True)
    return ctypes.CDLL(str(folder / "run.so"))


def call(library, problem, q, k, v, out, lse, workspace, ask=None, clear=True) -> None:
    sizes = (problem.batch, problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k)
    strides = [stride for t in (q, k, v, out) for stride in t.stride()[:3]]
    tensors = [t.data_ptr() if t is not None else None for t in (q, k, v, out, lse)]
    status = library.run(
        (ctypes.c_int * 5)(*sizes),
        (ctypes.c_longlong * 12)(*strides),
        ctypes.c_double(problem.softmax_scale),
        (ctypes.c_void_p * 5)(*tensors),
        ctypes.c_void_p(workspace.data_ptr() if workspace is not None else None),
        ctypes.byref(ask) if ask is not None else None,
        int(clear),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )
    assert status == 0, f"CUDA error {status}"


def require_right(problem, inputs, out) -> None:
    reason, _ = judge_one(out, make_answer(problem, inputs, double=True)["o"])
    assert not reason, f"{problem.describe()}: {reason}"


@pytest.mark.parametrize("kernel", CASES, indirect=True, ids=str)
def test_the_header_serves_any_problem(kernel, tmp_path, nvcc):
    library = build(kernel, tmp_path, nvcc)
    for problem in problems(kernel):
        inputs = make_inputs(problem, 1, "cuda")
        q, k, v = (inputs[name] for name in "qkv")
        out, lse = torch.full_like(q, math.nan), torch.full(problem.lse_shape, math.nan, device="cuda")
        bytes_ = ctypes.c_size_t()
        call(library, problem, q, k, v, out, lse, None, bytes_)
        workspace = torch.full((bytes_.value,), 255, dtype=torch.uint8, device="cuda") if bytes_.value else None
        call(library, problem, q, k, v, out, lse, workspace)
        require_right(problem, inputs, out)
        first = out.clone()
        out.fill_(math.nan)
        call(library, problem, q, k, v, out, lse, workspace, clear=False)  # the zeroed part was left zeroed
        require_right(problem, inputs, out)
        assert torch.allclose(first.float(), out.float(), atol=1e-2)
        if problem.lse and problem.mask == "full":
            keys = k.repeat_interleave(problem.group_size, 1).double()
            scores = q.double() @ keys.transpose(-1, -2) * problem.softmax_scale
            assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-3)


@pytest.mark.parametrize("kernel", [("flash_wgmma", {}), ("split_kv", {}), ("flash_mma", {})], indirect=True, ids=str)
def test_the_extension_is_an_op_of_torch(kernel, database, tmp_path, monkeypatch):
    write_folder(export_torch(database, kernel.trial, "exported_op"), tmp_path / "exported_op")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    sys.modules.pop("exported_op", None)
    op = importlib.import_module("exported_op")
    for problem in problems(kernel):
        inputs = make_inputs(problem, 2, "cuda")
        out = op.attention(*(inputs[name] for name in "qkv"))
        require_right(problem, inputs, out)
        assert out.stride() == torch.empty_like(inputs["q"]).stride()

    problem = problems(kernel)[1]
    q, k, v = (make_inputs(problem, 3, "cuda")[name] for name in "qkv")
    if problem.mask == "full":
        expected = F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
        assert torch.allclose(op.attention(q, k, v, 0.3), expected, atol=2e-2)
    with pytest.raises(RuntimeError, match="head_dim"):
        op.attention(q[..., :8], k, v)
    with pytest.raises(RuntimeError, match="divide over"):
        op.attention(q[:, :5], k, v)
    with pytest.raises(RuntimeError, match="positive and finite"):
        op.attention(q, k, v, -1.0)

    eager = op.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op.attention(q, k, v)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert torch.allclose(captured.float(), eager.float(), atol=1e-2)
    compiled = torch.compile(lambda q, k, v: op.attention(q, k, v) * 2, fullgraph=True)
    assert torch.allclose(compiled(q, k, v).float(), eager.float() * 2, atol=2e-2)


@pytest.mark.parametrize("variant", CHECKED)
def test_the_check_of_a_variant_says_right(database, tmp_path, nvcc, variant):
    (family, fields), spec = CHECKED[variant], detect_devices()[0].spec
    if spec is None or spec.capability < (9, 0):
        pytest.skip("kernels of Hopper are among them")
    text = export_source(database, record(database, family, spec.name, **fields))
    (tmp_path / "kernel.cu").write_text(text)
    command = [nvcc, f"-arch={spec.arch}", tmp_path / "kernel.cu", "-o", tmp_path / "kernel"]
    subprocess.run(command, check=True, capture_output=True)
    result = subprocess.run([tmp_path / "kernel"], capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.endswith("RIGHT\n"), result.stdout + result.stderr
