"""wgmma against NumPy: shapes, operand layouts, scales; and registers touched while it runs. Conversions of 8-bit
floats over all codes, against torch's own."""

import numpy as np
import pytest
import torch

from evoattn.ptx.isa.eight_bits import VALUES, to_code
from tests.ptx.golden.harness import run_hopper, run_ptx
from tests.ptx.golden.wgmma_product import product

PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{{names}}}, %q0, %q0, %p0, 1, 1, 0, 0;"


@pytest.mark.parametrize(
    "columns, dtype, swizzle, a_in, b_major",
    [
        (8, "fp16", 128, "registers", "k"),
        (256, "bf16", 128, "registers", "mn"),
        (72, "fp16", 128, "k", "k"),
        (48, "bf16", 128, "k", "mn"),
        (128, "fp16", 128, "mn", "mn"),
        (64, "fp16", 64, "k", "k"),
        (96, "bf16", 64, "mn", "mn"),
        (40, "fp16", 32, "k", "k"),
        (48, "fp16", 32, "mn", "mn"),
        (24, "bf16", 0, "k", "k"),
        (80, "fp16", 0, "mn", "mn"),
        (128, "e4m3", 128, "registers", "k"),
        (96, "e4m3", 32, "registers", "k"),
        (40, "e4m3", 64, "k", "k"),
    ],
)
def test_layouts(columns, dtype, swizzle, a_in, b_major):
    d, expected, execution = product(columns, dtype, swizzle, a_in, b_major)
    assert not execution.faults
    np.testing.assert_allclose(d, expected, atol=2e-2 if dtype == "e4m3" else 2e-4)  # of 8 bits 14 are kept
    assert execution.counters.tensor_flops == 2 * 64 * columns * 64 * (2 if dtype == "e4m3" else 1)


def test_sums_in_fp16():
    d, expected, execution = product(72, "e4m3", pairs=True)
    assert not execution.faults
    np.testing.assert_array_equal(d, d.astype(np.float16))
    np.testing.assert_allclose(d, expected, atol=5e-2)


def test_scales():
    d, expected, _ = product(16, accumulate="step > 0")
    np.testing.assert_allclose(d, expected, atol=1e-4)
    d, expected, _ = product(16, accumulate="step > 0", change=lambda text: text.replace("p, 1, 1,", "p, -1, 1,"))
    np.testing.assert_allclose(d, -expected, atol=1e-4)
    d, expected, _ = product(16, accumulate="step > 0", change=lambda text: text.replace("p, 1, 1,", "p, -1, -1,"))
    np.testing.assert_allclose(d, expected, atol=1e-4)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"fence": ""}, "no fence.proxy.async between"),
        ({"between": "d[3] += 1.f;"}, "touches registers of a wgmma"),
        ({"between": 'asm volatile("" : "+f"(d[0])); if (d[1] > 1e30f) out[0] = 1;'}, "touches registers of a wgmma"),
        ({"arranged": ""}, "with no wgmma.fence before"),
        ({"arranged": "", "a_in": "k"}, "with no wgmma.fence before"),
        ({"arranged": "wgmma_fence(); d[1] *= 3.f;"}, "with no wgmma.fence before"),
        ({"arranged": "wgmma_fence(); a[2][1] ^= t;"}, "with no wgmma.fence before"),
        ({"pending": 1}, "touches registers of a wgmma"),
        (
            {"between": 'asm volatile("mov.b32 %0, 0;" : "+r"(a[0][0])); asm volatile("" :: "r"(a[0][0]));'},
            "touches registers of a wgmma",
        ),
        ({"between": "smem[t] = make_uint4(0, 0, 0, 0);", "a_in": "k"}, "what a wgmma of warpgroup 0 has read"),
        (
            {"between": "__syncthreads(); smem[t] = make_uint4(0, 0, 0, 0);", "a_in": "k"},
            "what a wgmma of warpgroup 0 has read",
        ),
    ],
)
def test_faults(options, words):
    _, _, execution = product(8, **options)
    assert any(words in fault for fault in execution.faults), execution.faults


def test_operands_may_be_overwritten_after_the_wait():
    _, _, execution = product(
        8, a_in="k", between="wgmma_wait<0>(); __syncthreads(); smem[t] = make_uint4(0, 0, 0, 0);"
    )
    assert not execution.faults


def test_a_part_of_a_warpgroup_is_not_enough():
    source = """
extern "C" __global__ void k(float* out) { if (threadIdx.x < 96) { wgmma_fence(); } }"""
    [fault] = run_hopper(source, [np.zeros(4, np.float32)]).faults
    assert "wgmma.fence" in fault


def test_the_first_product_needs_a_fence_though_nobody_has_written_its_registers():
    """Its accumulators are written by the product alone, for scale-d is false, and A and B lie in shared memory."""
    names = ", ".join(f"%f{i}" for i in range(4))
    once = PRODUCT.format(names=names)
    zeros = f"mov.u32 %r0, tile; mov.b64 %q0, 65; setp.ne.u32 %p0, 0, 0; FENCE {once} {once}"
    done = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    tile = ".shared .align 128 .b8 tile[4096];"
    for fence, right in (("wgmma.fence.sync.aligned;", True), ("", False)):
        faults = run_ptx(zeros.replace("FENCE", fence) + done, declarations=tile, threads=128).faults
        assert faults == () if right else "first product" in faults[0] and "with no wgmma.fence" in faults[0]


KINDS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_has_its_value(kind):
    codes = torch.arange(256, dtype=torch.uint8).view(KINDS[kind])
    assert np.array_equal(VALUES[kind], codes.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_halfway_between_codes_go_to_the_even_one(kind):
    finite = VALUES[kind][:128][np.isfinite(VALUES[kind][:128])].astype(np.float64)
    middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    beside = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))])
    values = np.concatenate([beside, -beside])
    assert np.array_equal(to_code(values, kind), torch.from_numpy(values).to(KINDS[kind]).view(torch.uint8).numpy())
    limits = np.array([np.inf, -np.inf, np.nan, 1e9], np.float32)
    last = len(finite) - 1
    assert to_code(limits, kind).tolist() == [last, last | 0x80, 0x7F, last]
