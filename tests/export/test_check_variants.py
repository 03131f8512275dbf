"""Variants in exports: which are taken; the CPU reference of the check, built without CUDA, is the float64 one."""

import math
import re
import subprocess

import pytest
import torch

from evoattn.correctness.reference import exact_attention, exact_lse
from evoattn.correctness.sequences import each
from evoattn.export.check import BEGIN, END, HEADERS, export_source, problem_constants
from evoattn.export.header import recorded_for_host
from evoattn.families.includes import resolve
from evoattn.model.launch import KernelLaunch
from evoattn.model.paths import TEMPLATES
from evoattn.model.shape_text import parse_shape
from evoattn.storage import StorageError
from tests.export import kernels
from tests.export.test_host_code import cuda_include

pytestmark = pytest.mark.slow
MAIN = """
template <typename T> void put(const T& values) {
  std::fwrite(values.data(), sizeof(values[0]), values.size(), stdout);
}

int main() {
  const Terms terms = random_terms();
  const Sequences sequences = make_sequences();
  const Inputs inputs = make_inputs(terms, sequences);
  std::vector<Row> rows = choose_rows();
  const Allowed allowed =
      reference(rows, inputs[Q].second, inputs[K].second, inputs[V].second, terms, sequences);
  for (const auto& [buffer, bytes] : inputs) put(bytes);
  for (Row& row : rows) {
    row.exact.push_back(row.lse);
    put(row.exact);
  }
  std::fwrite(&allowed, sizeof allowed, 1, stdout);
}
"""
LAUNCH = KernelLaunch("kernel", (1, 1, 1), (32, 1, 1), 0, ())
SHAPES = [
    "mask=causal_lower_right,window=9:0,sink=1",
    "mask=causal_upper_left,bias=bs,softcap=3",
    "mask=causal_upper_left,seqused=5:24,page=16,layout=bshd,Dv=8,shared_kv=1",
    "mask=causal_lower_right,varlen=37+5/9+24,alibi=1",
]
MORE_SHAPES = [
    "mask=full,window=3:5,softcap=2,scale=0.3,bias=hs",
    "mask=causal_upper_left,alibi=1,sink=1",
    "mask=full,window=0:0,alibi=1,Dv=24",
    "mask=full,seqused=0:24,sink=1,bias=bs",
    "mask=causal_lower_right,seqused=7:24,window=9:0,layout=bshd",
    "mask=causal_lower_right,seqused=0:24,page=16,alibi=1",
    "mask=causal_upper_left,varlen=0+30/24+17,layout=bshd,sink=1",
    "mask=full,varlen=20+3/0+24,window=3:5,Dv=24",
]


@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.slow) for shape in MORE_SHAPES)])
@pytest.mark.sampled(4)
def test_it_is_the_float64_one(tmp_path, shape):
    problem = parse_shape(f"B=2,H=4,Hkv=2,Sq=37,Sk=24,D=16,dtype=bf16,lse=1,{shape}")
    includes = "".join(f"#include <{header}>\n" for header in HEADERS if not header.startswith("cuda"))
    reference = resolve((TEMPLATES / "export/check/reference.cuh").read_text(), TEMPLATES)
    (tmp_path / "reference.cpp").write_text(includes + problem_constants(problem, 80, (LAUNCH,), {}) + reference + MAIN)
    command = ["c++", "-std=c++17", "-Wall", "-Werror", "reference.cpp", "-o", "reference"]
    subprocess.run(command, cwd=tmp_path, check=True)
    memory = subprocess.run([tmp_path / "reference"], capture_output=True, check=True).stdout

    def taken(count, dtype):
        nonlocal memory
        size = count * torch.empty(0, dtype=dtype).element_size()
        values, memory = torch.frombuffer(bytearray(memory[:size]), dtype=dtype), memory[size:]
        return values

    given = {}
    for name in problem.tensors:
        shape = problem.shape(name)
        given[name] = taken(math.prod(shape), torch.bfloat16).as_strided(shape, problem.strides(name))
    kinds = {"sinks": torch.bfloat16, "bias": torch.bfloat16, "slopes": torch.float32}
    for name, shape in problem.term_shapes.items():
        given[name] = taken(math.prod(shape), kinds.get(name, torch.int32)).reshape(shape)
    value = given["k"][..., : problem.head_dim_v] if problem.shared_kv else given["v"]
    expected = exact_attention(problem, given["q"], given["k"], value, torch.float64, others=given)
    lse = exact_lse(problem, given["q"], given["k"], others=given)
    wanted = torch.cat([expected, lse[..., None]], -1)
    rows = taken(wanted.numel(), torch.float64)
    largest, rms = taken(2, torch.float64).tolist()
    torch.testing.assert_close(rows, in_turn(problem, wanted), atol=1e-9, rtol=1e-9)
    assert not memory and 0 < rms < largest < 0.2
    if problem.seqused:
        spare = sum(problem.key_lengths) * problem.kv_heads * problem.head_dim
        assert given["k"].isnan().sum() == given["k"].numel() - spare
    if problem.page:
        pages = given["table"][given["table"] < given["k"].shape[0]]
        assert len(set(pages.tolist())) == len(pages) == sum(-(-n // problem.page) for n in problem.key_lengths)


def in_turn(problem, rows):
    """`[batch, heads, seqlen, …]` as the check has it: sequence by sequence, each by heads."""
    if not problem.varlen:
        return rows.flatten()
    return torch.cat([rows[:, :, one.queries].flatten() for one in each(problem)])


SINKS = dict(window="9:0", mask="causal_upper_left", sink=True, softcap=3.0)


def test_terms_of_scores_are_buffers_of_the_check(database):
    text = export_source(database, kernels.record(database, "flash_mma", "a100", **SINKS)).split(END)[1]
    assert "constexpr long PAST = 9, AHEAD = 0;" in text and "SOFTCAP = 3.0;" in text
    assert "constexpr int SINKS = 4, SLOPES = -1, BIAS = -1, SEQUSED = -1," in text and "&buffer[4]" in text


LATENT = dict(kv_heads=1, seqlen_q=1, head_dim=576, value_dim=512, shared_kv=True, mask="full")
EXPORTED = [
    ("flash_wgmma", "h100", dict(seqused="100:500", page=64)),
    ("flash_wgmma", "h100", dict(varlen="100:300/200:500", mask="causal_lower_right")),
    ("flash_mma", "a100", dict(varlen="100:300", seqlen_k=300, value_dim=32)),
    ("split_kv", "h100", dict(seqused="0:4000", page=16)),
    ("latent_wgmma", "h100", LATENT | dict(seqused="0:500", page=64)),
]


@pytest.mark.parametrize("family, gpu, fields", EXPORTED, ids=lambda value: value if isinstance(value, str) else None)
def test_lengths_and_pages_are_buffers_of_the_check(database, family, gpu, fields):
    text = export_source(database, kernels.record(database, family, gpu, **fields)).split(END)[1]
    names = re.search(r"BUFFER_BYTES\[BUFFERS\] = .*// (.*)", text)[1].split(", ")
    for name in ("seqused", "table", "cu_seqlens_q", "cu_seqlens_k"):
        there = name in names
        assert f"{name.upper()} = {names.index(name) if there else -1}" in text
        assert not there or f"&buffer[{names.index(name)}]" in text


@pytest.mark.slow
@pytest.mark.parametrize("family, gpu, fields", EXPORTED, ids=lambda value: value if isinstance(value, str) else None)
def test_the_host_code_compiles(database, tmp_path, family, gpu, fields):
    text = export_source(database, kernels.record(database, family, gpu, **fields))
    host_code_compiles(text, tmp_path)


def host_code_compiles(text, tmp_path):
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    names = dict.fromkeys(re.findall(r"\(const void\*\)::(\w+)", tail))
    (tmp_path / "host.cpp").write_text(head + "".join(f"void {name}();\n" for name in names) + tail)
    command = ["c++", "-std=c++17", "-Wall", "-Werror", f"-isystem{cuda_include()}", "-fsyntax-only", "host.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)


def test_a_header_takes_any_scale_and_no_variant(database):
    scaled = kernels.record(database, "flash_mma", "a100", scale=0.3)
    assert recorded_for_host(database, scaled).problem.scale == 0.3
    for fields, unknown in ((SINKS, "window, softcap, sink"), ({"blocks": "128x128:300+700"}, "blocks")):
        with pytest.raises(StorageError, match=f"does not know {unknown}; take --format check"):
            recorded_for_host(database, kernels.record(database, "flash_mma", "a100", **fields))
    with pytest.raises(StorageError, match="does not know e4m3; take --format check"):
        recorded_for_host(database, kernels.record(database, "fp8_wgmma", "h100", dtype="e4m3"))


@pytest.mark.parametrize(
    "family, gpu, fields",
    [
        ("flash_mma", "a100", {"blocks": "128x128:300+700"}),
        ("flash_mma", "a100", {"score": "s*t[h]", "tables": "t:fp32:8"}),
        ("backward_mma", "a100", {"op": "backward"}),
        ("fp8_wgmma", "h100", {"dtype": "e4m3"}),
        ("split_kv", "h100", {"kv": "e4m3", "varlen": "", "page": 64, "seqused": "0:4000"}),
    ],
)
def test_what_has_no_reference_in_cpp_keeps_a_small_problem(database, tmp_path, family, gpu, fields):
    text = export_source(database, kernels.record(database, family, gpu, **fields))
    assert "struct Terms" not in text and "checks and times a small problem of this kernel" in text
    host_code_compiles(text, tmp_path)
