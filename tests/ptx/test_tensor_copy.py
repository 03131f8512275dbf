"""Tensor copies: where the engine puts what, what lies outside, and what it refuses."""

import numpy as np
import pytest

from evoattn.ptx import ImpossibleLaunch
from tests.ptx.golden.harness import run_hopper, swizzle_address, tiled

LOAD = """
extern "C" __global__ void k(const __grid_constant__ TensorMap map, const uint16_t* source, uint16_t* out, ARGUMENTS) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t tile = shared_address(smem) + SHIFT, barrier = tile + BYTES;
  if (threadIdx.x == 0) { mbarrier_init(barrier, 1); mbarrier_init_fence(); }
  __syncthreads();
  if (threadIdx.x == 0) {
    prefetch_tensor_map(map);
    mbarrier_arrive_expect_tx(barrier, BYTES);
    asm volatile("cp.async.bulk.tensor.RANKd.shared::SPACE.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{COORDINATES}], [%2];"
                 :: "r"(tile), "l"(&map), "r"(barrier), OPERANDS : "memory");
  }
  mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < BYTES / 2; i += 32) out[i] = ((uint16_t*)(smem + SHIFT))[i];
}"""


def load(tensor, box, where, swizzle, shift=0, space="cluster"):
    """(the box as it lies in shared memory, faults); `box` and `where` count from the innermost dimension."""
    rank, size = tensor.ndim, int(np.prod(box)) * 2
    source = (
        LOAD.replace("RANK", str(rank)).replace("SPACE", space).replace("BYTES", str(size)).replace("SHIFT", str(shift))
    )
    source = source.replace("COORDINATES", ", ".join(f"%{3 + i}" for i in range(rank)))
    source = source.replace("ARGUMENTS", ", ".join(f"int x{i}" for i in range(rank)))
    source = source.replace("OPERANDS", ", ".join(f'"r"(x{i})' for i in range(rank)))
    out = np.zeros(size // 2, np.uint16)
    execution = run_hopper(
        source, [tensor, out], [tiled(0, tensor, box, swizzle)], [np.int32(x) for x in where], 32, size + shift + 8
    )
    return out, execution


def expected_box(tensor, box, where, swizzle):
    """An element at a time, by the definition."""
    out = np.zeros(int(np.prod(box)), np.uint16)
    for number, index in enumerate(np.ndindex(box[::-1])):
        at = [i + w for i, w in zip(index, where[::-1])]
        if all(0 <= a < n for a, n in zip(at, tensor.shape)):
            out[swizzle_address(np.int64(2 * number), swizzle) // 2] = tensor[tuple(at)]
    return out


@pytest.mark.parametrize("swizzle, inner", [(0, 24), (0, 64), (32, 16), (64, 32), (128, 64)])
@pytest.mark.parametrize("where", [(0, 0), (8, 3), (-8, -5), (56, 40), (200, 100)])
def test_a_box_with_each_swizzle_and_odd_bounds(swizzle, inner, where):
    tensor = np.arange(1, 45 * 72 + 1, dtype=np.uint16).reshape(45, 72)
    out, execution = load(tensor, (inner, 19), where, swizzle)
    assert not execution.faults and np.array_equal(out, expected_box(tensor, (inner, 19), where, swizzle))


@pytest.mark.parametrize(
    "shape, box, where",
    [
        ((40,), (16,), (32,)),
        ((3, 9, 16), (16, 4, 2), (0, 7, 1)),
        ((2, 3, 9, 64), (64, 5, 1, 2), (0, 6, 2, 1)),
        ((2, 2, 3, 5, 64), (64, 4, 2, 1, 1), (0, 2, 1, 1, 1)),
    ],
)
def test_a_box_of_each_rank(shape, box, where):
    tensor = np.arange(1, np.prod(shape) + 1, dtype=np.uint16).reshape(shape)
    swizzle = 128 if box[0] == 64 else 0
    out, execution = load(tensor, box, where, swizzle, space="cta")
    assert not execution.faults and np.array_equal(out, expected_box(tensor, box, where, swizzle))


SLIDING = 1 << 30


def slide(tensor, row, length, end, outer=SLIDING):
    """Sixteen rows of a sequence of `length` rows before row `end` of a tensor of 64 columns, and faults: a map that
    slides (`evoattn.families.tensor_tiles.sliding_map`)."""
    size, rows = 16 * 128, len(tensor)
    source = LOAD.replace("RANK", "5").replace("SPACE", "cluster").replace("BYTES", str(size)).replace("SHIFT", "0")
    source = source.replace("COORDINATES", "%3, %4, %5, %6, %7").replace("ARGUMENTS", "int x, int y, int z")
    source = source.replace("OPERANDS", f'"r"(0), "r"(x), "r"(y), "r"(z), "r"({outer})')
    shape, strides = (64, SLIDING, 1, rows + 1, SLIDING + 1), (128, 128 * rows, 128, (1 << 34) - 128)
    sliding = {**tiled(0, tensor, (64, 16), 128), "shape": shape, "strides_bytes": strides, "box": (64, 16, 1, 1, 1)}
    out = np.zeros(size // 2, np.uint16)
    where = [np.int32(x) for x in (SLIDING - length + row, 0, end)]
    execution = run_hopper(source, [tensor, out], [{**sliding, "wraps": True}], where, 32, size + 8)
    return out, execution.faults


@pytest.mark.slow
@pytest.mark.parametrize(
    "row, length, end", [(0, 40, 40), (16, 21, 21), (32, 35, 40), (0, 3, 3), (0, 0, 7), (16, 9, 30)]
)
def test_a_map_that_slides_ends_with_the_sequence(row, length, end):
    tensor = np.arange(1, 40 * 64 + 1, dtype=np.uint16).reshape(40, 64)
    out, faults = slide(tensor, row, length, end)
    assert not faults and np.array_equal(out, expected_box(tensor[end - length : end], (64, 16), (0, row), 128))


def test_a_map_that_slides_out_of_its_buffer_is_a_fault():
    tensor = np.zeros((40, 64), np.uint16)
    [fault] = slide(tensor, 0, 9, 5)[1]
    assert "A tensor map reaches" in fault


@pytest.mark.parametrize("outer", [0, SLIDING - 1])
def test_a_map_that_slides_needs_its_outer_coordinate(outer):
    tensor = np.zeros((40, 64), np.uint16)
    [fault] = slide(tensor, 0, 9, 30, outer)[1]  # 2^30 rows further on: the same low half of the address, if outer is 0
    assert "A tensor map reaches" in fault


def test_copied_bytes_are_counted():
    tensor = np.zeros((10, 64), np.uint16)
    _, execution = load(tensor, (64, 16), (0, 4), 128)
    counters = execution.counters
    assert (counters.async_copy_bytes, counters.global_sectors) == (
        2048,
        6 * 128 / 32 + 2048 / 32,
    )  # rows 4 to 9; stores to `out`


STORE = """
extern "C" __global__ void k(const __grid_constant__ TensorMap map, uint16_t* out, int x0, int x1, int x2, int x3) {
  extern __shared__ __align__(1024) unsigned char smem[];
  for (int i = threadIdx.x; i < 64 * 24; i += 32) ((uint16_t*)smem)[i] = i + 1;
  FENCE
  SYNC
  if (threadIdx.x == 0) { tma_store_4d(map, shared_address(smem), x0, x1, x2, x3); COMMIT WAIT }
  AFTER
}"""


def store(
    where=(0, 0, 0, 0),
    fence="fence_proxy_async();",
    sync="__syncthreads();",
    commit="tma_store_commit();",
    wait="tma_store_wait_read();",
    after="",
):
    out = np.full((2, 3, 21, 64), 7, np.uint16)
    source = STORE
    for name, text in (("FENCE", fence), ("SYNC", sync), ("COMMIT", commit), ("WAIT", wait), ("AFTER", after)):
        source = source.replace(name, text)
    execution = run_hopper(
        source, [out], [tiled(0, out, (64, 24, 1, 1), 128)], [np.int32(x) for x in where], 32, 64 * 24 * 2
    )
    return out, execution.faults


def test_a_store_is_clipped_to_the_tensor():
    out, faults = store((0, 5, 2, 1))
    image = np.arange(1, 64 * 24 + 1, dtype=np.uint16)
    box = image[swizzle_address(2 * np.arange(64 * 24), 128) // 2].reshape(24, 64)
    assert not faults and np.array_equal(out[1, 2, 5:], box[:16])
    assert (np.delete(out.reshape(6, 21, 64), 5, 0) == 7).all() and (out[1, 2, :5] == 7).all()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"fence": ""}, "no fence.proxy.async between"),
        (
            {"fence": "", "sync": "__syncthreads(); fence_proxy_async();"},
            "no barrier between",
        ),  # the fence must come before the barrier
        ({"sync": ""}, "no barrier between"),
        ({"wait": ""}, "exits before its tensor store has read"),
        ({"commit": "", "wait": "tma_store_wait_read();"}, "exits before its tensor store has read"),
        (
            {
                "wait": "",
                "after": "__syncthreads(); smem[threadIdx.x] = 0; if (threadIdx.x == 0) tma_store_wait_read();",
            },
            "what a tensor store of warp 0 has read",
        ),
    ],
)
def test_stores_that_race(change, words):
    assert not store()[1]
    faults = store(**change)[1]
    assert any(words in fault for fault in faults), faults


def test_memory_may_be_used_again_after_the_wait():
    assert not store(after="__syncthreads(); smem[threadIdx.x] = 0;")[1]


def test_misplaced_boxes_are_faults():
    tensor = np.zeros((40, 64), np.uint16)
    assert "no multiple of 1024" in load(tensor, (64, 16), (0, 0), 128, shift=512)[1].faults[0]
    assert not load(tensor, (32, 16), (0, 0), 64, shift=512)[1].faults
    wide = {**tiled(0, tensor, (64, 16), 128), "shape": (64, 41)}
    source = LOAD
    for name, text in (
        ("ARGUMENTS", "int x"),
        ("SHIFT", "0"),
        ("BYTES", "2048"),
        ("RANK", "2"),
        ("SPACE", "cluster"),
        ("COORDINATES", "%3, %3"),
        ("OPERANDS", '"r"(x)'),
    ):
        source = source.replace(name, text)
    out = np.zeros(1024, np.uint16)
    [fault] = run_hopper(source, [tensor, out], [wide], [np.int32(0)], 32, 2056).faults
    assert "reaches" in fault and '"a0"' in fault
    [fault] = run_hopper(source, [tensor, out], [tiled(0, tensor, (64, 32), 128)], [np.int32(0)], 32, 2056).faults
    assert "4096 bytes at byte 0 of shared memory" in fault


@pytest.mark.parametrize(
    "change",
    [
        {"box": (64, 257)},
        {"box": (128, 16)},
        {"strides_bytes": (120,)},
        {"swizzle_bytes": 48},
        {"box": (60, 16)},
        {"shape": (64, 0)},
    ],
)
def test_maps_that_the_driver_refuses(change):
    tensor = np.zeros((40, 64), np.uint16)
    source = (
        'extern "C" __global__ void k(const __grid_constant__ TensorMap map, int* out) { prefetch_tensor_map(map); }'
    )
    assert not run_hopper(source, [tensor], [tiled(0, tensor, (64, 16), 128)]).faults
    with pytest.raises(ImpossibleLaunch):
        run_hopper(source, [tensor], [{**tiled(0, tensor, (64, 16), 128), **change}])
