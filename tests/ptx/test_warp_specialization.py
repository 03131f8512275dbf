"""A producer warp, tensor copies, a ring of stages, wgmma and a tensor store: the right kernel is not accused, each
fault is found."""

import numpy as np
import pytest

from evoattn.families.flash_wgmma.text import wgmma_function
from tests.ptx.golden.harness import run_hopper, tiled

TILES, STAGES, BYTES = 5, 2, 64 * 64 * 2
# D[64, 64] = Σ A[64, 64] B_i[64 keys, 64]ᵀ over the tiles, for each of two consumer warpgroups with an A of its own; D
# leaves as fp16.
KERNEL = (
    wgmma_function("multiply", 64, "fp16", False, False)
    + """
constexpr int TILES = 5, STAGES = 2, BYTES = 64 * 64 * 2, A = 0, B = 2 * BYTES, BARRIERS = B + STAGES * BYTES;
extern "C" __global__ void __launch_bounds__(288) k(const __grid_constant__ TensorMap a_map,
  const __grid_constant__ TensorMap b_map,
                                                    const __grid_constant__ TensorMap d_map, void*, void*, void*) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t base = shared_address(smem), a_full = base + BARRIERS;
  auto full = [&](int stage) { return base + BARRIERS + 8 + 8 * stage; };
  auto empty = [&](int stage) { return base + BARRIERS + 8 + 8 * STAGES + 8 * stage; };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warpgroup = warp / 4;
  if (threadIdx.x == 256) {
    mbarrier_init(a_full, 1);
    for (int i = 0; i < STAGES; i++) mbarrier_init(full(i), 1), mbarrier_init(empty(i), RELEASES);
    INIT_FENCE
  }
  READY
  if (warpgroup == 2) {
    if (lane == 0) {
      mbarrier_arrive_expect_tx(a_full, 2 * BYTES);
      for (int i = 0; i < 2; i++) tma_load_4d(base + A + i * BYTES, a_map, a_full, 0, 64 * i, 0, 0);
      for (int i = 0; i < TILES; i++) {
        const int stage = i % STAGES;
        EMPTY_WAIT
        mbarrier_arrive_expect_tx(full(stage), EXPECTED);
        tma_load_4d(base + B + stage * BYTES, b_map, full(stage), 0, 64 * i, 0, 0);
      }
    }
    return;
  }
  float d[32];
  for (int i = 0; i < 32; i++) d[i] = 0.f;
  const uint32_t a = base + A + warpgroup * BYTES;
  A_WAIT
  for (int i = 0; i < TILES; i++) {
    const int stage = i % STAGES;
    FULL_WAIT
    wgmma_fence();
    const uint64_t a_descriptor = matrix_descriptor(a, 0), b_descriptor = matrix_descriptor(base + B + stage * BYTES,
      0);
    for (int x = 0; x < 128; x += 32) multiply(d, a_descriptor + descriptor_step(x), b_descriptor + descriptor_step(x),
      1);
    wgmma_commit();
    EARLY_RELEASE
    MULTIPLY_WAIT
    RELEASE
  }
  wgmma_wait<0>();
  pin_registers(d);
  const int row = warp % 4 * 16 + lane % 16;
  for (int i = 0; i < 8; i += 2) {
    const uint32_t to = a + row * 128 + ((i + lane / 16) ^ (row % 8)) * 16;
    stmatrix_x4(to, pack2<Fp16>(d[4 * i], d[4 * i + 1]), pack2<Fp16>(d[4 * i + 2], d[4 * i + 3]),
      pack2<Fp16>(d[4 * i + 4], d[4 * i + 5]),
                pack2<Fp16>(d[4 * i + 6], d[4 * i + 7]));
  }
  STORE_FENCE
  STORE_BARRIER
  if (threadIdx.x % 128 == 0) { tma_store_4d(d_map, a, 0, 64 * warpgroup, 0, 0); tma_store_commit(); STORE_WAIT }
}"""
)
RIGHT = {
    "INIT_FENCE": "mbarrier_init_fence();",
    "READY": "__syncthreads();",
    "RELEASES": "8",
    "EXPECTED": "BYTES",
    "EMPTY_WAIT": "mbarrier_wait(empty(stage), i / STAGES % 2 ^ 1);",
    "A_WAIT": "mbarrier_wait(a_full, 0);",
    "FULL_WAIT": "mbarrier_wait(full(stage), i / STAGES % 2);",
    "EARLY_RELEASE": "",
    "MULTIPLY_WAIT": "wgmma_wait<0>(); pin_registers(d);",
    "RELEASE": "if (lane == 0) mbarrier_arrive(empty(stage));",
    "STORE_FENCE": "fence_proxy_async();",
    "STORE_BARRIER": "named_barrier_sync<128>(1 + warpgroup);",
    "STORE_WAIT": "tma_store_wait_read();",
}


def run(**changes):
    """(faults, whether the answer is right, executed steps)"""
    source = KERNEL
    for name, text in (RIGHT | changes).items():
        source = (
            source.replace(f" {name}\n", f" {text}\n")
            .replace(f" {name} }}", f" {text} }}")
            .replace(f", {name})", f", {text})")
        )
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((1, 1, rows, 64)).astype(np.float16) for rows in (128, TILES * 64 - 7))
    d = np.zeros((1, 1, 121, 64), np.float16)
    arrays = [x.view(np.uint16) for x in (a, b, d)]
    maps = [tiled(i, x, (64, 64, 1, 1), 128) for i, x in enumerate(arrays)]
    execution = run_hopper(source, arrays, maps, [], 288, 4 * BYTES + 64)
    b_padded = np.pad(b[0, 0].astype(np.float64), ((0, 7), (0, 0))).reshape(TILES, 64, 64)
    expected = a[0, 0].astype(np.float64) @ b_padded.sum(0).T
    return execution.faults, np.allclose(d[0, 0], expected[:121], atol=0.03, rtol=2e-3), execution.steps


def test_the_right_kernel():
    faults, right, steps = run()
    assert faults == () and right and steps < 5000
    assert run(
        STORE_WAIT='asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");', INIT_FENCE="fence_proxy_async();"
    )[:2] == ((), True)


def test_a_product_in_flight_across_two_stages():
    """The release of a stage follows the wait that leaves only the next product under way."""
    late = {
        "MULTIPLY_WAIT": "wgmma_wait<1>();",
        "RELEASE": "if (i > 0 && lane == 0) mbarrier_arrive(empty((i - 1) % STAGES));",
    }
    assert run(**late)[:2] == ((), True)


LOOK = "wgmma_wait<0>(); pin_registers(d); d[0] += "
LOOK += "0.f * *reinterpret_cast<volatile unsigned char*>(smem + B + stage * BYTES + 3 * lane);"


def test_threads_that_read_a_stage_too():
    """By ordinary loads, so that each needs a fence of its proxy before the copy that overwrites the stage."""
    assert run(MULTIPLY_WAIT=LOOK + "fence_proxy_async(); __syncwarp();")[:2] == ((), True)


FAULTS = [
    ({"MULTIPLY_WAIT": LOOK + "__syncwarp();"}, "has read, with no fence.proxy.async between"),
    (
        {"MULTIPLY_WAIT": LOOK + "if (lane < 31) fence_proxy_async(); __syncwarp();"},
        "has read, with no fence.proxy.async between",
    ),
    ({"FULL_WAIT": ""}, "reads what a tensor copy to the mbarrier at byte 32776 wrote last"),
    ({"A_WAIT": ""}, "reads what a tensor copy to the mbarrier at byte 32768 wrote last"),
    (
        {"A_WAIT": "", "FULL_WAIT": RIGHT["FULL_WAIT"] + "if (i == 4) mbarrier_wait(a_full, 0);"},
        "byte 32768 wrote last",
    ),
    ({"FULL_WAIT": "mbarrier_wait(full(stage), i / STAGES % 2 ^ 1);"}, "deadlocked"),
    (
        {"FULL_WAIT": "if (warp % 4 != 2) mbarrier_wait(full(stage), i / STAGES % 2); __syncwarp();"},
        "reads what a tensor copy",
    ),
    ({"EMPTY_WAIT": ""}, "overwrites what a tensor copy to the mbarrier at byte 32776 wrote last"),
    ({"EMPTY_WAIT": "mbarrier_wait(empty(stage), i / STAGES % 2);"}, "deadlocked"),
    ({"EARLY_RELEASE": RIGHT["RELEASE"], "RELEASE": ""}, "overwrites what a wgmma of warpgroup 0 has read"),
    ({"MULTIPLY_WAIT": "wgmma_wait<1>();"}, "overwrites what a wgmma of warpgroup 0 has read"),
    ({"MULTIPLY_WAIT": ""}, "overwrites what a wgmma of warpgroup 0 has read"),
    ({"RELEASES": "4"}, "overwrites what a wgmma of warpgroup 1 has read"),
    ({"RELEASES": "9"}, "lacks 1 arrivals"),
    ({"RELEASE": "if (lane == 0 && warpgroup == 0) mbarrier_arrive(empty(stage));"}, "deadlocked"),
    ({"EXPECTED": "BYTES + 16"}, "lacks 0 arrivals and 16 bytes"),
    ({"EXPECTED": "BYTES / 2"}, "deadlocked"),
    ({"INIT_FENCE": ""}, "with no fence after its initialization"),
    ({"READY": "__syncwarp();"}, "mbarrier"),
    ({"STORE_FENCE": ""}, "no fence.proxy.async between"),
    ({"STORE_BARRIER": ""}, "no barrier between"),
    (
        {"STORE_BARRIER": "named_barrier_sync<128>(1 + warpgroup); fence_proxy_async();", "STORE_FENCE": ""},
        "no barrier between",
    ),
    ({"STORE_WAIT": ""}, "exits before its tensor store"),
    ({"MULTIPLY_WAIT": "wgmma_wait<1>(); d[0] *= 2.f;"}, "touches registers of a wgmma"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, words", FAULTS, ids=[" ".join(f"{n}={t}" for n, t in c.items())[:60] for c, _ in FAULTS]
)
def test_each_fault_is_found(changes, words):
    faults, _, _ = run(**changes)
    assert any(words in fault for fault in faults), faults


def test_a_copy_that_nobody_waits_for():
    changes = {
        "EMPTY_WAIT": "if (i == TILES - 1) tma_load_4d(base + B + stage * BYTES, b_map, a_full, 0, 0, 0, 0);"
        + RIGHT["EMPTY_WAIT"]
    }
    faults, _, _ = run(**changes)
    assert any("overwrites" in fault for fault in faults), faults
    source = """
extern "C" __global__ void k(const __grid_constant__ TensorMap map, void*) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t barrier = shared_address(smem) + 8192;
  if (threadIdx.x == 0) { mbarrier_init(barrier, 1); mbarrier_init_fence(); mbarrier_arrive_expect_tx(barrier, 8192);
    LOAD }
}"""
    source = source.replace("LOAD", "tma_load_4d(shared_address(smem), map, barrier, 0, 0, 0, 0); WAIT")
    tensor = np.zeros((1, 1, 64, 64), np.uint16)
    maps = [tiled(0, tensor, (64, 64, 1, 1), 128)]
    [fault] = run_hopper(source.replace("WAIT", ""), [tensor], maps, smem=8200).faults
    assert "nobody has waited for a tensor copy to the mbarrier at byte 8192" in fault
    assert not run_hopper(source.replace("WAIT", "mbarrier_wait(barrier, 0);"), [tensor], maps, smem=8200).faults


@pytest.mark.parametrize("fence, faults", [("", 1), ("fence_proxy_async();", 0)])
def test_a_barrier_of_the_block_is_no_fence_of_the_proxy(fence, faults):
    source = """
extern "C" __global__ void k(const __grid_constant__ TensorMap map, void*, int* out) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t barrier = shared_address(smem) + 8192;
  if (threadIdx.x == 0) { mbarrier_init(barrier, 1); mbarrier_init_fence(); }
  __syncthreads();
  for (int i = 0; i < 2; i++) {
    if (threadIdx.x == 0) { mbarrier_arrive_expect_tx(barrier, 8192); tma_load_4d(shared_address(smem), map, barrier,
      0, 0, 0, 0); }
    mbarrier_wait(barrier, i);
    out[threadIdx.x] = reinterpret_cast<volatile int*>(smem)[threadIdx.x];
    FENCE
    __syncthreads();
  }
}"""
    tensor, out = np.zeros((1, 1, 64, 64), np.uint16), np.ones(128, np.int32)
    execution = run_hopper(
        source.replace("FENCE", fence), [tensor, out], [tiled(0, tensor, (64, 64, 1, 1), 128)], smem=8200
    )
    assert len(execution.faults) == faults and all(
        "no fence.proxy.async between" in fault for fault in execution.faults
    )
