"""The exported PyTorch extension: whole files, and what the compilers say of them."""

import ast
import subprocess
import sysconfig

import pytest

from evoattn.export.header import export_torch, write_folder
from evoattn.model.errors import WrongUse
from tests.export.kernels import record

TARGETS = [("flash_wgmma", "h100", "sm_90a"), ("split_kv", "l4", "sm_89"), ("flash_mma", "a100", "sm_80")]


@pytest.mark.parametrize("family, gpu, arch", TARGETS)
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
@pytest.mark.parametrize("family, gpu, arch", TARGETS)
def test_nvcc_compiles_the_kernel(database, tmp_path, nvcc, family, gpu, arch):
    write_folder(export_torch(database, record(database, family, gpu), "op"), tmp_path / "op")
    command = [nvcc, "-std=c++17", "-Werror", "all-warnings", f"-arch={arch}", "-Xcompiler", "-fPIC", "-c"]
    subprocess.run([*command, tmp_path / "op" / "kernel.cu", "-o", tmp_path / "kernel.o"], check=True)


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
