"""Launches that may begin before those before them have ended: what they may touch before they wait."""

import pytest
import torch

from evoattn.backends.base import LaunchError
from evoattn.backends.interpreter import InterpreterBackend
from evoattn.families.includes import resolve
from evoattn.model.launch import Buffer, KernelLaunch
from evoattn.model.paths import TEMPLATES
from tests.support.compiles import ptx_kept

SOURCE = (
    resolve('#include "device/ptx/grid_dependency.cuh"\n', TEMPLATES)
    + """
extern "C" __global__ void first(float* s, float* rows, const float* q) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  grid_dependency_launch();
  s[i] = q[i] + rows[i];
}
extern "C" __global__ void second(float* o, float* s, float* rows, const float* v) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  BEFORE
  const float kept = v[i];                          // nobody writes it
  WAIT
  o[i] = kept * s[i];
  rows[i] = 7.f;
}
extern "C" __global__ void third(float* o, const float* s) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  THIRD
  o[i] += s[i];
}
"""
)
RIGHT = {"BEFORE": "", "WAIT": "grid_dependency_wait();", "THIRD": "grid_dependency_wait();"}
WAIT = RIGHT["WAIT"]


def run(overlaps=(False, True, True), arch="sm_90a", **edits):
    source = SOURCE
    for name, text in (RIGHT | edits).items():
        source = source.replace(name, text)
    arguments = (("s", "rows", "q"), ("o", "s", "rows", "v"), ("o", "s"))
    launches = tuple(
        KernelLaunch(kernel, (3, 1, 1), (64, 1, 1), 0, tuple(map(Buffer, names)), overlaps=overlap)
        for kernel, names, overlap in zip(("first", "second", "third"), arguments, overlaps)
    )
    buffers = {name: torch.arange(192.0) + at for at, name in enumerate(("q", "v", "s", "o", "rows"))}
    q, v, rows = (buffers[name].clone() for name in ("q", "v", "rows"))
    faults = InterpreterBackend().run(ptx_kept(source, arch), launches, buffers)
    if not faults:
        assert torch.equal(buffers["o"], v * (q + rows) + (q + rows))
    return faults


def test_a_launch_that_waits_is_right():
    assert run() == ()


@pytest.mark.parametrize(
    "edits, words",
    [
        ({"BEFORE": "const float early = s[i]; if (early < 0) return;"}, ("reads", '"s"', "writes this buffer")),
        ({"BEFORE": "s[i] = 1.f;"}, ("writes", '"s"', "writes this buffer")),
        ({"BEFORE": "rows[i] = 1.f;"}, ("writes", '"rows"', "reads this buffer")),
        ({"BEFORE": "atomicAdd(&rows[i], 1.f);"}, ("writes", '"rows"', "reads this buffer")),
        ({"WAIT": ""}, ("reads", '"s"', "writes this buffer")),
        ({"WAIT": "if (threadIdx.x != 33) grid_dependency_wait();"}, ("thread (33, 0, 0) of block (0, 0, 0)", '"s"')),
        ({"WAIT": "if (blockIdx.x != 2) grid_dependency_wait();"}, ("thread (0, 0, 0) of block (2, 0, 0)", '"s"')),
        ({"WAIT": "if (threadIdx.x < 32) grid_dependency_wait(); __syncthreads();"}, ("thread (32, 0, 0)", '"s"')),
        ({"WAIT": "grid_dependency_launch();"}, ("reads", '"s"')),
        ({"THIRD": ""}, ('"s"', "writes this buffer")),
    ],
)
def test_what_comes_too_early(edits, words):
    fault = run(**edits)[0]
    assert all(word in fault for word in words) and "griddepcontrol.wait" in fault and fault.endswith("."), fault


def test_what_an_earlier_launch_writes_is_not_read_only():
    nc = 'float kept_s; asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(kept_s) : "l"({} + i)); '
    nc += "if (kept_s == -1.f) return;"
    [fault] = run(THIRD="grid_dependency_wait(); " + nc.format("s"))
    assert '"s"' in fault and "(.nc)" in fault and "writes this buffer" in fault
    assert run(BEFORE=nc.format("v")) == () and run((False, False, False), THIRD=nc.format("s")) == ()


def test_reads_of_what_is_only_read_may_come_early():
    assert run(BEFORE="if (rows[i] < 0.f) return;") == ()


def test_a_launch_that_never_waits():
    """It touches nothing of the others, and yet the launch after it would wait for it alone."""
    compiled = ptx_kept(SOURCE.replace("BEFORE", "").replace("WAIT", "").replace("THIRD", ""), "sm_90a")
    launches = (
        KernelLaunch("first", (1, 1, 1), (64, 1, 1), 0, tuple(map(Buffer, ("s", "rows", "q")))),
        KernelLaunch("third", (1, 1, 1), (64, 1, 1), 0, tuple(map(Buffer, ("o", "v"))), overlaps=True),
    )
    [fault] = InterpreterBackend().run(
        compiled, launches, {name: torch.zeros(64) for name in "sqov"} | {"rows": torch.zeros(64)}
    )
    assert (
        fault == "No thread of third executes griddepcontrol.wait, so that it may end before the launch before it has."
    )


def test_a_launch_that_does_not_overlap_need_not_wait():
    assert run((False, False, False), WAIT="", THIRD="") == ()
    assert run((False, False, True), WAIT="") == ()


def test_below_hopper_there_is_nothing_to_wait_with():
    assert run((False, False, False), "sm_80") == ()
    assert "griddepcontrol.wait" in run((False, True, True), "sm_80")[0]


def test_calls_follow_one_another():
    with pytest.raises(LaunchError, match="first launch of a call"):
        run((True, True, True))
