"""Strides past 2^31 without the memory for them: right kernels do not notice, an offset of 32 bits does."""

import numpy as np
import pytest

from evoattn import ptx
from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.interpreter_cases import FarProblem, can_be_far, far_places, interpreter_cases
from evoattn.correctness.validate import check
from evoattn.families.built import BuiltKernel
from evoattn.families.flash_scalar.family import FlashScalar
from evoattn.families.registry import load_space
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from tests.support.compiles import ptx_kept

COPY = """
extern "C" __global__ void copy(const int4* x, int4* out, TYPE stride) {
  out[threadIdx.x] = x[threadIdx.x * stride];
}"""


@pytest.mark.parametrize("kind, right", [("long long", True), ("int", False)])
def test_an_offset_of_32_bits_lands_elsewhere(kind, right):
    """Eight rows of 16 bytes, 3 · 2^32 bytes apart: their index times the stride passes 32 bits."""
    program = ptx_kept(COPY.replace("TYPE", kind), "sm_80").ptx
    x, out, stride = np.arange(32, dtype=np.int32), np.zeros(32, np.int32), (3 << 28) + 1
    number = np.int64(stride) if right else np.int32(stride)
    far = {"x": np.arange(8, dtype=np.uint16) * 3}
    faults = ptx.run_launch(program, "copy", 1, 8, ["x", "out", number], {"x": x, "out": out}, far=far).faults
    assert (not faults and np.array_equal(out, x)) if right else "32 bits has lost" in faults[0]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_strides_and_places_agree(layout):
    """The address of each row by its far strides is that of its compact place, and as many spans as are noted there."""
    problem = AttentionProblem(2, 4, 2, 5, 7, 24, "bf16", layout=layout)
    strides, places = FarProblem(2, 4, 2, 5, 7, 24, "bf16", layout=layout).strides, far_places(problem)
    for tensor in "qkvo":
        batch, heads, rows, _ = problem.shape(tensor)
        for index in np.ndindex(batch, heads, rows):
            near, far = (sum(i * s * 2 for i, s in zip(index, of(tensor)[:3])) for of in (problem.strides, strides))
            apart = (7, 5, 2) if tensor in "vo" else (5, 3, 1)
            spans = sum(i * of_one for i, of_one in zip(index, apart))
            assert far - near == int(places[tensor][near // 16]) << 32 == spans << 32
    assert can_be_far(problem) and not can_be_far(problem.with_(head_dim=4))


@pytest.mark.parametrize("batch, keys, far", [(1, 300, True), (2, 250, True), (2, 300, False)])
def test_keys_in_use_are_far_where_tensor_maps_have_such_strides(batch, keys, far):
    """Batches of keys in use are whole rows apart, 2^32 bytes each, and a tensor map's strides are below 2^40 bytes."""
    problem = AttentionProblem(batch, 2, 1, 5, keys, 64, "fp16", seqused="0:500")
    assert can_be_far(problem) == far
    strides = FarProblem(batch, 2, 1, 5, keys, 64, "fp16", seqused="0:500").strides
    assert all((max(strides(tensor)) * 2 < 1 << 40) == far for tensor in "kv")


@pytest.mark.parametrize("bias, heads, batches", [("s", 0, 0), ("hs", 3, 0), ("bs", 0, 5), ("bhs", 3, 5)])
def test_rows_of_a_bias_are_far_too(bias, heads, batches):
    words = (2, 4, 2, 5, 7, 24, "bf16")
    problem, far = AttentionProblem(*words, bias=bias), FarProblem(*words, bias=bias)
    moved = [b - a for a, b in zip(problem.strides("bias"), far.strides("bias"))]
    assert moved == [batches << 31, heads << 31, 1 << 31, 0]
    last = [extent - 1 for extent in problem.term_shapes["bias"][:3]]
    assert far_places(problem)["bias"][-1] == 5 * last[0] + 3 * last[1] + last[2]


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [*(pytest.param(t, marks=pytest.mark.slow) for t in "qkv"), "o"])
def test_a_kernel_that_drops_a_batch_or_counts_in_32_bits_is_found(tensor):
    family, gpu = FlashScalar(), GPUS["l4"]
    problem = AttentionProblem(2, 4, 2, 128, 128, 16, "fp16")
    config = next(
        c for c in load_space("flash_scalar", gpu).starting_configs() if not family.why_invalid(problem, c, gpu)
    )
    far = next(case for case in interpreter_cases(problem, config) if case.far)
    source = render(family, problem, config, gpu).source
    step = f"batch * {tensor}_batch_stride"
    assert source.count(step) == 1

    def run(text):
        kernel = BuiltKernel(family, config, gpu, ptx_kept(text, gpu.arch))
        return check(far.backend(InterpreterBackend()), far.placed(kernel), far.make(1))

    assert run(source).passed and not run(source.replace(step, "0")).passed
    assert "32 bits has lost" in run(source.replace(step, f"int({step})")).reason
