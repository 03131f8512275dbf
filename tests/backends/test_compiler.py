"""The compiler's answers: whole ELF files, what its log says, errors in one line, a cache that is never half written;
CuPy's folder, CUDA's context and what is loaded ahead."""

import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from evoattn.backends import with_cupy
from evoattn.backends.compiler import (
    CompileError,
    KernelFiles,
    compile_candidate,
    compile_source,
    first_error,
    loaded,
    parse_log,
    version,
)
from evoattn.backends.warm_up import load_products, make_context
from evoattn.model.records import Candidate

SOURCE = 'extern "C" __global__ void k(float* o) { __shared__ float t[64]; t[threadIdx.x] = o[0]; o[1] = t[5]; }'
LOG = """ptxas info    : Function properties for k
    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 256 bytes smem
ptxas info    : Used 24 registers, 8 bytes smem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
"""


def elf_bytes(cubin):
    """Bytes up to the end of the section headers, by the ELF header (System V ABI, ELF64: e_shoff, e_shentsize,
    e_shnum)."""
    assert cubin[:4] == b"\x7fELF" and cubin[4] == 2
    [offset] = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<HH", cubin, 58)
    return offset + size * count


@pytest.fixture(scope="module", params=["sm_80", "sm_90a"])
def compiled(request):
    return compile_source(SOURCE, request.param)


def test_a_cubin_is_a_whole_elf_file(compiled):
    """CuPy's getCUBIN drops the last byte, which loaders overlook and cuobjdump and nvdisasm do not."""
    end_of_program_headers = (
        struct.unpack_from("<Q", compiled.cubin, 32)[0] + 56 * struct.unpack_from("<H", compiled.cubin, 56)[0]
    )
    assert len(compiled.cubin) == max(elf_bytes(compiled.cubin), end_of_program_headers)


def test_the_ptx_is_of_the_same_compile(compiled):
    assert ".entry k(" in compiled.ptx and not compiled.ptx.endswith("\0")
    assert compiled.info.static_smem_bytes == 256 and compiled.info.registers > 0


def test_what_the_log_says():
    info = parse_log(LOG)
    assert (info.registers, info.stack_bytes, info.static_smem_bytes) == (40, 16, 256)
    assert (info.spill_store_bytes, info.spill_load_bytes, info.warnings) == (24, 32, ("C7510",))
    assert parse_log("").registers == 0
    assert parse_log("Used 40 registers\nUsed 60 registers, 8 bytes smem").registers == 60


def test_a_missing_library_of_the_compiler_is_a_sentence():
    class Missing:
        def getVersion(self):
            raise RuntimeError("Failure finding libnvrtc.so.13")

    with pytest.raises(OSError, match=r"NVRTC, the CUDA compiler .* is not found: `pip install"):
        loaded(Missing())


def test_an_error_is_its_first_line():
    with pytest.raises(CompileError, match=r'^kernel\.cu\(2\): error: .*"nothing".*undefined') as caught:
        compile_source("int a;\nint b = nothing;", "sm_80")
    assert "detected" in caught.value.log
    assert first_error("") == "the compiler failed without a message" and first_error("a\nError: b") == "Error: b"


@pytest.mark.slow
def test_a_second_compile_comes_from_the_cache(tmp_path):
    candidate = Candidate("family", {}, "id", SOURCE, "sm_80")
    first = compile_candidate(candidate, tmp_path)
    assert compile_candidate(candidate, tmp_path) == first
    [file] = tmp_path.rglob("*.kernel")
    file.write_bytes(file.read_bytes().replace(b"// Generated", b"// Otherwise"))
    assert "// Otherwise" in compile_candidate(candidate, tmp_path).ptx
    for broken in (
        b"",
        b"no JSON\n",
        file.read_bytes().replace(b"ptx_bytes", b"ptx_bites"),
        b"5\n",
        file.read_bytes()[:-1],
    ):
        file.write_bytes(broken)
        again = compile_candidate(candidate, tmp_path)
        assert (again.ptx, again.cubin) == (first.ptx, first.cubin)
        assert KernelFiles(tmp_path, version()).get(candidate) == again


def test_another_kernels_file_under_this_name_is_passed_over(tmp_path):
    first, second = (Candidate("family", {}, "id", f"{SOURCE}// {n}\n", "sm_80") for n in range(2))
    compile_candidate(first, tmp_path)
    [file] = tmp_path.rglob("*.kernel")
    files = KernelFiles(tmp_path, version())
    place = files._path(second)
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(file.read_bytes())
    assert files.get(first) and files.get(second) is None


def test_a_kernel_that_cannot_be_put_in_its_place_leaves_no_file(tmp_path):
    candidate = Candidate("family", {}, "id", SOURCE, "sm_80")
    files = KernelFiles(tmp_path, version())
    files._path(candidate).mkdir(parents=True)
    files.put(candidate, compile_source(SOURCE, "sm_80"))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_kernel_may_be_kept_after_it_is_handed_over(tmp_path):
    candidate = Candidate("family", {}, "id", SOURCE, "sm_80")
    with ThreadPoolExecutor(1) as writing:
        first = compile_candidate(candidate, tmp_path, writing)
    assert KernelFiles(tmp_path, version()).get(candidate) == first


def test_cupy_makes_no_folder_in_the_home_directory(tmp_path):
    home, cache = tmp_path / "home", tmp_path / "cache"
    home.mkdir()
    variables = {"HOME": str(home)}
    with_cupy.give_a_folder(variables, cache)
    assert Path(variables[with_cupy.FOLDER]).parent == cache and not [*home.iterdir()]
    (tmp_path / "file").touch()
    none, given = {"HOME": str(tmp_path / "file")}, {with_cupy.FOLDER: "mine", "HOME": str(home)}
    with_cupy.give_a_folder(none, tmp_path / "file")
    assert Path(none[with_cupy.FOLDER]).is_dir()
    (home / ".cupy/kernel_cache").mkdir(parents=True)
    usual = {"HOME": str(home)}
    for variables in (given, usual):
        with_cupy.give_a_folder(variables, cache)
    assert given[with_cupy.FOLDER] == "mine" and with_cupy.FOLDER not in usual


def test_products_of_each_dtype_are_made_where_it_is_said():
    made = []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.softmax:
                made.append((args[0].device.type, args[0].dtype))
            return function(*args, **(kwargs or {}))

    with Watched():
        load_products("cpu", "float32", "float64")
    assert made == [("cpu", torch.float32), ("cpu", torch.float64)]


def test_a_device_that_is_not_there_is_not_said_here():
    load_products("cuda:99", "float32")


class Driver:
    """Answers each call with success, or with the error of the one that `fails`."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.calls = fails, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            return 999 if name == self.fails else 0

        return call


CALLS = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


def test_the_primary_context_of_the_first_device_is_made():
    driver = Driver()
    assert make_context(lambda name: driver) and driver.calls == CALLS


@pytest.mark.parametrize("fails", CALLS)
def test_what_fails_is_no_error_here(fails):
    driver = Driver(fails)
    assert not make_context(lambda name: driver) and driver.calls[-1] == fails


def test_a_machine_without_a_driver_has_none():
    def load(name):
        raise OSError(name)

    assert not make_context(load)


AT_ONCE = """
import threading
from concurrent.futures import ThreadPoolExecutor
from evoattn.backends.compiler import compile_source

begin = threading.Barrier(4)

def compiled(number):
    begin.wait()
    return compile_source(f'extern "C" __global__ void k{number}(float* o) {{ o[0] = {number}; }}', "sm_90a")

with ThreadPoolExecutor(4) as threads:
    assert len({one.cubin for one in threads.map(compiled, range(4))}) == 4
"""


@pytest.mark.slow
def test_the_first_compiles_of_a_process_may_be_at_once():
    """As those of a pick and its rivals. NVRTC is found once for each process: so it takes a new one."""
    subprocess.run([sys.executable, "-c", AT_ONCE], check=True)
