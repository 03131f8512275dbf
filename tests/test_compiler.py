"""What the compiler hands over: whole machine code, and what its log says."""

import struct
from pathlib import Path

import pytest

from evoattn.backends import with_cupy
from evoattn.backends.compiler import CompileError, compile_source, first_error, parse_log

SOURCE = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] = 1; }'


def test_a_cubin_is_whole_to_its_last_byte():
    """The program headers are the last part of the file (ELF-64 header: e_phoff at 32, e_phentsize and e_phnum at
    54)."""
    cubin = compile_source(SOURCE, "sm_90a").cubin
    (start,) = struct.unpack_from("<Q", cubin, 32)
    size, count = struct.unpack_from("<HH", cubin, 54)
    assert cubin[:4] == b"\x7fELF" and count > 0 and start + size * count == len(cubin)


def test_a_source_that_does_not_compile_is_one_sentence():
    with pytest.raises(CompileError, match=r"error.*undefined_name"):
        compile_source('extern "C" __global__ void f(float* x) { x[0] = undefined_name; }', "sm_89")


def test_the_log_s_largest_numbers_count():
    log = (
        "Used 40 registers\n12 bytes spill stores, 16 bytes spill loads\n"
        "Used 60 registers, 8 bytes smem\n8 bytes stack frame"
    )
    found = parse_log(log)
    assert (found.registers, found.spill_store_bytes, found.spill_load_bytes) == (60, 12, 16)
    assert (found.static_smem_bytes, found.stack_bytes, found.warnings) == (8, 8, ())
    assert first_error("") == "the compiler failed without a message" and first_error("a\nError: b") == "Error: b"


def test_cupy_gets_a_folder_where_the_home_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    fine, none, given = {"HOME": str(tmp_path)}, {"HOME": str(tmp_path / "file")}, {with_cupy.FOLDER: "mine"}
    for variables in (fine, none, given):
        with_cupy.give_a_folder(variables)
    assert with_cupy.FOLDER not in fine and Path(none[with_cupy.FOLDER]).is_dir() and given[with_cupy.FOLDER] == "mine"
