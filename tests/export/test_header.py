"""The exported header: free of the problem it was found for, and compiled into two files of one program."""

import ast
import json
import subprocess
import sysconfig
from pathlib import Path

import pytest

from evoattn.export.header import export_header, export_torch, header, namespace_of, write_folder
from evoattn.export.recorded import Recorded
from evoattn.families.registry import FAMILIES
from evoattn.model.errors import WrongUse
from tests.export.host_driver import GXX
from tests.export.kernels import HOPPER_GENES, record, recorded

PLAIN_FAMILIES = [name for name, family in FAMILIES.items() if family.plain and "forward" in family.operations]
"""Kernels of variants are not exported."""
TARGETS = [
    *((family, "h100", "sm_90a", HOPPER_GENES.get(family, {})) for family in PLAIN_FAMILIES),
    ("flash_mma", "a100", "sm_80", {}),
    *((family, "l4", "sm_89", {}) for family in ("flash_mma", "large_head")),
    ("split_kv", "h100", "sm_90a", {"MERGE": "cluster"}),
    ("flash_wgmma", "h100", "sm_90a", {"KEY_SPLIT": 2}),
    ("flash_wgmma", "h100", "sm_90a", {"SCHEDULE": "claimed"}),
]
"""(family, GPU of the search, target of nvcc, genes)"""
CALLER = """
#include "attention.cuh"
#include "attention.cuh"
cudaError_t {function}({name}::Problem p, {name}::Tensors t, void* workspace, cudaStream_t stream) {{
  size_t bytes;
  if (cudaError_t error = {name}::workspace_size(p, &bytes)) return error;
  if (cudaError_t error = {name}::clear_workspace(p, workspace, stream)) return error;
  return {name}::launch(p, t, workspace, stream);
}}
"""
PLAIN = """
#include "attention.cuh"
#include <cstdio>
using namespace {name};
const char* said(Problem p, const void* q = (const void*)64) {{
  const char* reason = why_not(p, {{q, (void*)64, (void*)64, (void*)64, nullptr}});
  return reason ? reason : "";
}}
int main() {{
  const Problem good = {{2, 8, 2, 300, 500, {{153600, 19200, 64}}, {{64000, 32000, 64}}, {{64000, 32000, 64}},
                        {{153600, 19200, 64}}, 0.125}};
  Problem p = good;
  std::printf("[\\"%s\\"", said(p));
  p = good, p.seqlen_k = 0, std::printf(", \\"%s\\"", said(p));
  p = good, p.kv_heads = 3, std::printf(", \\"%s\\"", said(p));
  p = good, p.softmax_scale = NAN, std::printf(", \\"%s\\"", said(p));
  p = good, p.k.head = 32004, std::printf(", \\"%s\\"", said(p));
  p = good, p.batch = 70000, std::printf(", \\"%s\\"", said(p));
  p = good, std::printf(", \\"%s\\"", said(p, (void*)72));
  p = good, std::printf(", \\"%s\\"", said(p, nullptr));
  p = good, p.batch = 1, p.q.batch = 0, p.o.batch = 3, std::printf(", \\"%s\\"", said(p));
  std::printf(", %zu, %d]\\n", workspace_bytes(good, 132), HEAD_DIM);
}}
"""


def code(text: str) -> str:
    """The header without the comment that says where the kernel comes from."""
    return text[text.index("#pragma once") :]


def test_nothing_of_the_problem_is_in_the_code(database):
    text = export_header(database, record(database, "flash_mma", "a100"))
    other = record(database, "flash_mma", "a100", batch=3, heads=5, kv_heads=5, seqlen_q=77, seqlen_k=4001)
    assert code(text) == code(export_header(database, other))
    assert "main(" not in text and "300" not in code(text)


@pytest.mark.parametrize("family", ("flash_mma", "three_kernel", "flash_wgmma"))
def test_the_kernel_is_the_recorded_one(database, family):
    kernel = recorded(database, family, "h100")
    text = header(kernel, ["about"])
    assert kernel.source.replace('extern "C" ', "").rstrip() in text
    launched = {launch.kernel for launch in kernel.launches}
    assert launched and all(f'{{"{name}", (const void*)kernels::{name}}}' in text for name in launched)


def test_a_word_of_the_skeleton_in_a_database_is_left_alone(database):
    kernel = recorded(database, "flash_mma", "a100")
    assert "// EVOATTN_SOURCE EVOATTN_NONE" in header(kernel, ["EVOATTN_SOURCE EVOATTN_NONE"])


@pytest.mark.slow
@pytest.mark.skipif(GXX is None, reason="there is no g++")
def test_what_a_caller_is_told_before_a_launch(database, tmp_path):
    kernel = recorded(database, "flash_mma", "a100")
    (tmp_path / "attention.cuh").write_text(header(kernel, []))
    (tmp_path / "plain.cpp").write_text(PLAIN.format(name=namespace_of(kernel)))
    build = [GXX, "-std=c++17", "-Wall", "-Werror", tmp_path / "plain.cpp", "-o", tmp_path / "plain"]
    subprocess.run(build, check=True)
    said = json.loads(subprocess.run([tmp_path / "plain"], capture_output=True, check=True).stdout)
    for sentence, part in zip(
        said[:9],
        ("", "at least 1", "divide", "scale", "multiple of 16", "at most 65535", "begin at", "no address", ""),
        strict=True,
    ):
        assert part in sentence and bool(part) == bool(sentence) and (not sentence or sentence.endswith("."))
    assert said[9:] == [0, 64]


@pytest.mark.slow
@pytest.mark.parametrize("family, gpu, arch, genes", TARGETS)
@pytest.mark.sampled(6)
def test_nvcc_compiles_it(database, tmp_path, nvcc, family, gpu, arch, genes):
    kernel = recorded(database, family, gpu, genes)
    assert all(kernel.config[gene] == value for gene, value in genes.items())
    compile_caller(nvcc, kernel, arch, tmp_path, "call")


@pytest.mark.slow
def test_two_files_of_one_program_may_include_it(database, tmp_path, nvcc):
    first = compile_caller(nvcc, recorded(database, "split_kv", "l4"), "sm_89", tmp_path, "first")
    second = tmp_path / "second.o"
    subprocess.run(["objcopy", "--wildcard", "--localize-symbol=*first*", first, second], check=True)
    subprocess.run(["ld", "-r", first, second, "-o", tmp_path / "both.o"], check=True)  # refuses what both define


def to_ptx(nvcc: str, arch: str) -> list[str]:
    """Machine code is made elsewhere: NVRTC's tests do."""
    ptx = arch.replace("sm", "compute")
    return [nvcc, "-std=c++17", "-Werror", "all-warnings", "-gencode", f"arch={ptx},code={ptx}"]


def compile_caller(nvcc: str, kernel: Recorded, arch: str, folder: Path, function: str) -> Path:
    """The object file of a function that includes the header twice and launches the kernel."""
    (folder / "attention.cuh").write_text(header(kernel, []))
    source = folder / f"{function}.cu"
    source.write_text(CALLER.format(function=function, name=namespace_of(kernel)))
    made = source.with_suffix(".o")
    result = subprocess.run([*to_ptx(nvcc, arch), "-c", source, "-o", made], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return made


TENSORS = [("flash_wgmma", "h100", "sm_90a"), ("split_kv", "l4", "sm_89"), ("flash_mma", "a100", "sm_80")]


@pytest.mark.parametrize("family, gpu, arch", TENSORS)
def test_every_word_is_filled_in(database, family, gpu, arch):
    files = export_torch(database, record(database, family, gpu), "fast_attention")
    assert set(files) == {"attention.cuh", "kernel.cu", "binding.cpp", "__init__.py", "README.md"}
    assert not any("EVOATTN_" in text for text in files.values())
    loaded = next(node for node in ast.walk(ast.parse(files["__init__.py"])) if isinstance(node, ast.keyword))
    assert loaded.arg == "name" and ast.literal_eval(loaded.value).startswith(f"evoattn_{family}_")
    assert ("compute_90a" in files["__init__.py"]) == (arch == "sm_90a")
    assert "from fast_attention import attention" in files["README.md"]


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    write_folder({"a": "1"}, tmp_path / "new" / "folder")
    write_folder({"a": "2"}, tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder" / "a").read_text() == "2"
    (tmp_path / "new" / "folder" / "mine").write_text("")
    with pytest.raises(WrongUse, match="something else"):
        write_folder({"a": "3"}, tmp_path / "new" / "folder")
    with pytest.raises(WrongUse, match="something else"):
        write_folder({"a": "3"}, tmp_path / "new" / "folder" / "a")


@pytest.mark.slow
@pytest.mark.parametrize("family, gpu, arch", TENSORS)
@pytest.mark.sampled(3)
def test_nvcc_compiles_the_kernel(database, tmp_path, nvcc, family, gpu, arch):
    write_folder(export_torch(database, record(database, family, gpu), "op"), tmp_path / "op")
    command = [*to_ptx(nvcc, arch), "-Xcompiler", "-fPIC", "-c", tmp_path / "op" / "kernel.cu"]
    subprocess.run([*command, "-o", tmp_path / "kernel.o"], check=True)


@pytest.mark.slow
def test_the_host_compiler_compiles_the_binding(database, tmp_path, nvcc):
    from torch.utils.cpp_extension import include_paths

    write_folder(export_torch(database, record(database, "flash_wgmma", "h100"), "op"), tmp_path / "op")
    # A torch without CUDA lacks one generated header, which says how its libraries are linked.
    flags = [
        "-std=c++20",
        "-Xcompiler",
        "-fPIC,-Wall,-fsyntax-only",
        "-DC10_USING_CUSTOM_GENERATED_MACROS",
        "-DTORCH_EXTENSION_NAME=op",
    ]
    flags += [f"-isystem={folder}" for folder in (*include_paths(), sysconfig.get_path("include"))]
    command = [nvcc, *flags, "-c", tmp_path / "op" / "binding.cpp"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and "warning" not in result.stderr, result.stderr
