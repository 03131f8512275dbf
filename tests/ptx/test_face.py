"""The interpreter as a library: its face, its README, and what imports what. The backend: tensors changed in place,
launches in order, every way to fail."""

import ast
import contextlib
import io
import re
import sys

import numpy as np
import pytest
import torch

from evoattn import ptx
from evoattn.backends.base import LaunchError
from evoattn.backends.interpreter import InterpreterBackend, NotInterpreted
from evoattn.model.launch import Buffer, KernelLaunch, Scalar
from evoattn.model.paths import ROOT
from tests.support.compiles import ptx_kept

HOME = ROOT / "evoattn" / "ptx"
README = (HOME / "README.md").read_text()
ORDER = ["program", "memory", "races", "state", "isa", "machine"]
"""Each folder imports those before it alone."""
COPY = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry copy(.param .u64 a, .param .u64 b, .param .u32 n)
{
  .reg .b32 %r<4>; .reg .b64 %q<4>; .reg .pred %p;
  ld.param.u64 %q0, [a]; ld.param.u64 %q1, [b]; ld.param.u32 %r0, [n];
  mov.u32 %r1, %tid.x; setp.ge.u32 %p, %r1, %r0; @%p ret;
  mad.wide.u32 %q2, %r1, 4, %q0; mad.wide.u32 %q3, %r1, 4, %q1;
  ld.global.u32 %r2, [%q2]; st.global.u32 [%q3], %r2;
  ret;
}
"""


def imported(path):
    """Dotted names of the modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.slow
def test_it_imports_nothing_of_evoattn_and_numpy_alone_besides():
    names = {name for path in HOME.rglob("*.py") for name in imported(path)}
    ours = {name for name in names if name.split(".")[0] == "evoattn"}
    assert ours and all(name.startswith("evoattn.ptx") for name in ours)
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names <= {"evoattn", "numpy"}


@pytest.mark.slow
def test_its_folders_form_layers():
    assert {path.parent.name for path in HOME.glob("*/*.py")} == set(ORDER)
    for path in HOME.glob("*/*.py"):
        for name in imported(path):
            if name.startswith("evoattn.ptx.") and (room := name.split(".")[2]) in ORDER:
                assert ORDER.index(room) <= ORDER.index(path.parent.name), f"{path} imports {name}"


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["evoattn", "scripts"])
def test_others_use_the_face_alone(folder):
    for path in (ROOT / folder).rglob("*.py"):
        if HOME not in path.parents:
            assert not [name for name in imported(path) if name.startswith("evoattn.ptx.")], path


def test_the_example_of_the_readme_prints_what_it_says():
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    shown = re.search(r"```text\n(.*?)```", README, re.S)[1]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == shown


def test_the_readme_lists_what_is_not_modelled():
    section = README.split("The interpreter does not model\n")[1].split("The same list")[0]
    assert tuple(line.removeprefix("- ") for line in section.strip().splitlines()) == ptx.NOT_MODELLED


def test_every_name_of_the_face_is_there():
    assert all(hasattr(ptx, name) for name in ptx.__all__)


def test_buffers_of_any_dtype_and_shape_change_in_place():
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros(6, np.int32)
    execution = ptx.run_launch(COPY, "copy", 1, (32, 1), ["a", "b", np.uint32(6)], {"a": a, "b": b})
    assert execution.faults == () and (b.view(np.float32) == a.ravel()).all() and execution.counters.global_bytes == 48


def test_a_parsed_program_serves_several_launches():
    program = ptx.parse_program(COPY)
    for n in (1, 5):
        a, b = np.arange(5, dtype=np.int32), np.full(5, -1, np.int32)
        assert not ptx.run_launch(program, "copy", 1, 32, ["a", "b", np.uint32(n)], {"a": a, "b": b}).faults
        assert (b[:n] == a[:n]).all() and (b[n:] == -1).all()


def test_faults_name_the_buffer():
    a, b = np.zeros(32, np.int32), np.zeros(8, np.int32)
    [fault] = ptx.run_launch(COPY, "copy", 1, 32, ["a", "b", np.uint32(32)], {"a": a, "b": b}).faults
    assert 'byte 32 of buffer "b", which has 32 bytes' in fault


def test_wrong_launches_are_refused():
    a, whole = np.zeros(32, np.int32), np.zeros(64, np.int32)
    numbers = np.uint32(1)
    with pytest.raises(ptx.ImpossibleLaunch, match="no kernel move; it has copy"):
        ptx.run_launch(COPY, "move", 1, 32)
    with pytest.raises(ptx.ImpossibleLaunch, match="a buffer c that was not given"):
        ptx.run_launch(COPY, "copy", 1, 32, ["a", "c", numbers], {"a": a})
    with pytest.raises(ptx.ImpossibleLaunch, match="one to three numbers"):
        ptx.run_launch(COPY, "copy", (1, 1, 1, 1), 32, ["a", "a", numbers], {"a": a})
    with pytest.raises(ptx.ImpossibleLaunch, match="takes 3 arguments, not 1"):
        ptx.run_launch(COPY, "copy", 1, 32, ["a"], {"a": a})
    with pytest.raises(ptx.ImpossibleLaunch, match="no GPU gives a block over 232448"):
        ptx.run_launch(COPY, "copy", 1, 32, ["a", "a", numbers], {"a": a}, smem_bytes=232449)
    with pytest.raises(ValueError, match="a and b overlap"):
        ptx.run_launch(COPY, "copy", 1, 32, ["a", "b", numbers], {"a": whole[:40], "b": whole[39:]})
    with pytest.raises(ValueError, match="not C-contiguous"):
        ptx.run_launch(COPY, "copy", 1, 32, ["a", "a", numbers], {"a": whole[::2]})


SOURCE = """
extern "C" __global__ void scale(float* o, const float* q, int n, long stride, float factor) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) o[i * stride] = q[i] * factor;
}
extern "C" __global__ void accumulate(float* o, float* partial, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) { partial[i] = o[i] + 1; o[i] = partial[i] * 2; }
}
extern "C" __global__ void exchange(float* o) {
  extern __shared__ float tile[];
  tile[threadIdx.x] = o[threadIdx.x];
  o[threadIdx.x] = tile[threadIdx.x ^ 1];
}
extern "C" __global__ void clock_of(float* o) { o[0] = clock(); }
extern "C" __global__ void __launch_bounds__(64) bounded(float* o) { o[threadIdx.x] = 1; }
"""


@pytest.fixture(scope="module")
def compiled():
    return ptx_kept(SOURCE, "sm_80")


def launch(kernel, *args, block=64, smem=0, cluster=(1, 1, 1), grid=(2, 1, 1)):
    return KernelLaunch(kernel, grid, (block, 1, 1), smem, args, cluster)


def scale(n=100, stride=1):
    return launch(
        "scale", Buffer("o"), Buffer("q"), Scalar("int32", n), Scalar("int64", stride), Scalar("float32", 0.1)
    )


def test_launches_run_in_order_over_the_tensors_themselves(compiled):
    buffers = {
        "q": torch.randn(100),
        "o": torch.full((100,), float("nan")),
        "partial": torch.zeros(400, dtype=torch.uint8),
    }
    accumulate = launch("accumulate", Buffer("o"), Buffer("partial"), Scalar("int32", 100))
    q = buffers["q"].clone()
    assert InterpreterBackend().run(compiled, (scale(), accumulate), buffers) == ()
    factor = torch.tensor(0.1, dtype=torch.float32)
    assert torch.equal(buffers["o"], (q * factor + 1) * 2) and torch.equal(buffers["q"], q)
    assert torch.equal(buffers["partial"].view(torch.float32), q * factor + 1)


def test_half_tensors_are_bytes_like_any_other(compiled):
    buffers = {"q": torch.ones(200, dtype=torch.float16), "o": torch.zeros(200, dtype=torch.bfloat16)}
    assert InterpreterBackend().run(compiled, (scale(),), buffers) == ()
    assert torch.equal(buffers["o"].view(torch.float32), buffers["q"].view(torch.float32) * torch.tensor(0.1))


def test_faults_are_sentences(compiled):
    buffers = {"q": torch.zeros(100), "o": torch.zeros(100)}
    [fault] = InterpreterBackend().run(compiled, (scale(stride=2), scale()), buffers)
    assert 'buffer "o"' in fault and fault.endswith(".") and "\n" not in fault
    [fault] = InterpreterBackend().run(
        compiled, (launch("exchange", Buffer("o"), smem=256, grid=(1, 1, 1)),), {"o": torch.zeros(64)}
    )
    assert fault.startswith("Race in shared memory")


def test_what_is_not_whitelisted_is_not_interpreted(compiled):
    with pytest.raises(NotInterpreted, match="clock"):
        InterpreterBackend().run(compiled, (launch("clock_of", Buffer("o")),), {"o": torch.zeros(1)})
    with pytest.raises(NotInterpreted, match="along x alone"):
        InterpreterBackend().run(
            compiled, (launch("exchange", Buffer("o"), cluster=(1, 2, 1), grid=(2, 2, 1)),), {"o": torch.zeros(64)}
        )


@pytest.mark.parametrize(
    "wrong, message",
    [
        (launch("scale", Buffer("o")), "takes 5 arguments"),
        (launch("nothing"), "no kernel nothing"),
        (launch("exchange", Buffer("o"), block=1025), "cannot be launched"),
        (launch("exchange", Buffer("o"), smem=1 << 20), "shared memory"),
        (launch("exchange", Buffer("elsewhere")), "elsewhere"),
        (launch("exchange", Buffer("o"), cluster=(4, 1, 1)), "in clusters of"),
        (launch("bounded", Buffer("o"), block=96), "96, 1, 1. threads is over the 64 of the launch bounds"),
    ],
)
def test_impossible_launches(compiled, wrong, message):
    with pytest.raises(LaunchError, match=message):
        InterpreterBackend().run(compiled, (wrong,), {"o": torch.zeros(64)})


def test_profile_counts_all_launches(compiled):
    buffers = {"q": torch.zeros(128), "o": torch.zeros(128)}
    one = InterpreterBackend().profile(compiled, (scale(128),), buffers)
    assert InterpreterBackend().profile(compiled, (scale(128), scale(128)), buffers) == one * 2
    assert one.global_bytes == 2 * 128 * 4 and one.fp32 == 4 and one.global_sectors == 2 * 16
