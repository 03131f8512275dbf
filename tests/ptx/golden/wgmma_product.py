"""A wgmma product of a 64-row tile by a tile of `columns`: operands in every layout, against NumPy."""

from collections.abc import Callable

import numpy as np

from evoattn.families.flash_wgmma.text import EightBits, wgmma_function
from evoattn.ptx import Execution
from evoattn.ptx.isa.eight_bits import VALUES
from tests.ptx.golden.harness import accumulators_to_matrix, run_hopper, swizzle_address

KERNEL = """
MULTIPLY
extern "C" __global__ void k(const uint4* a_image, const uint4* b_image, const float* c, float* out,
  uint64_t a_descriptor,
                             uint64_t b_descriptor, int a_step, int b_step) {
  extern __shared__ __align__(1024) uint4 smem[];
  const int t = threadIdx.x;
  for (int i = t; i < A_BYTES / 16; i += 128) smem[i] = a_image[i];
  for (int i = t; i < B_BYTES / 16; i += 128) smem[A_BYTES / 16 + i] = b_image[i];
  FENCE
  __syncthreads();
  float d[COLUMNS / 2]; uint32_t a[STEPS][4];
  for (int i = 0; i < COLUMNS / 2; i++) d[i] = c[t * (COLUMNS / 2) + i];
  for (int i = 0; i < 4 * STEPS; i++) a[i / 4][i % 4] = ((const uint32_t*)a_image)[t * 4 * STEPS + i];
  const uint64_t base = shared_address(smem) >> 4;
  ARRANGED
#pragma unroll
  for (int step = 0; step < STEPS; step++) multiply(d, A_OPERAND, b_descriptor + base + step * b_step, ACCUMULATE);
  wgmma_commit();
  BETWEEN
  wgmma_wait<PENDING>();
  pin_registers(d);
  for (int i = 0; i < COLUMNS / 2; i++) out[t * (COLUMNS / 2) + i] = d[i];
}"""
PAIRS = {
    "float d[COLUMNS / 2];": "uint32_t d[COLUMNS / 4];",
    "for (int i = 0; i < COLUMNS / 2; i++) d[i] = c[t * (COLUMNS / 2) + i];": "for (int i = 0; i < COLUMNS / 4; i++)"
    " d[i] = pack2<Fp16>(c[t * (COLUMNS / 2) + 2 * i], c[t * (COLUMNS / 2) + 2 * i + 1]);",
    "for (int i = 0; i < COLUMNS / 2; i++) out[t * (COLUMNS / 2) + i] = d[i];": "for (int i = 0; i < COLUMNS / 4; i++)"
    " for (int e = 0; e < 2; e++) out[t * (COLUMNS / 2) + 2 * i + e] = to_float(Fp16{uint16_t(d[i] >> 16 * e)});",
}
"""What becomes of the kernel where accumulators are pairs of fp16."""
STEPS = 4
LAYOUTS = {128: 1, 64: 2, 32: 3, 0: 0}
Image = tuple[np.ndarray, int, int, int | list[int]]
"""Its 16-bit words, the leading and the stride offset in bytes, and the bytes of a step of k, or of each."""


def place(
    image: np.ndarray, row: np.ndarray, column: np.ndarray, values: np.ndarray, row_bytes: int, swizzle: int
) -> None:
    """Write 16-bit values at (row, column) of a tile of rows of `row_bytes`, swizzled."""
    image[swizzle_address(row * row_bytes + 2 * column, swizzle) // 2] = values


def k_major(matrix: np.ndarray, swizzle: int) -> Image:
    """(image, leading and stride offsets in bytes, bytes a k16 step) of `[rows, 64]` with k contiguous, in tiles as
    wide as a swizzle."""
    rows, depth = matrix.shape
    image = np.zeros(matrix.size, np.uint16)
    row, column = np.indices(matrix.shape)
    if swizzle == 0:  # 8 rows of 16 bytes together; leading: the next 8 columns, stride: the next 8 rows
        image[column // 8 * rows * 8 + row * 8 + column % 8] = matrix
        return image, rows * 16, 128, rows * 32
    wide = swizzle // 2
    chunk, inner = np.divmod(column, wide)
    image[(chunk * rows * wide + swizzle_address(row * swizzle + 2 * inner, swizzle) // 2)] = matrix
    return (
        image,
        16,
        8 * swizzle,
        [step * 32 % swizzle + step * 32 // swizzle * rows * swizzle for step in range(depth // 16)],
    )


def mn_major(matrix: np.ndarray, swizzle: int) -> Image:
    """The same of `[rows, 64]` with the rows (M or N) contiguous: tiles of as many rows as a swizzle holds, a line for
    each k."""
    rows, depth = matrix.shape
    row, column = np.indices(matrix.shape)
    if swizzle == 0:  # 8 k of 16 bytes together; stride: the next 8 rows, leading: the next 8 k
        image = np.zeros(matrix.size, np.uint16)
        image[row // 8 * depth * 8 + column * 8 + row % 8] = matrix
        return image, 128, depth * 16, 256
    wide = swizzle // 2
    chunk, inner = np.divmod(row, wide)
    image = np.zeros(-(-rows // wide) * wide * depth, np.uint16)
    image[chunk * depth * wide + swizzle_address(column * swizzle + 2 * inner, swizzle) // 2] = matrix
    return image, depth * swizzle, 8 * swizzle, 16 * swizzle


def descriptor(start: int, leading: int, stride: int, swizzle: int) -> np.uint64:
    return np.uint64(start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | LAYOUTS[swizzle] << 62)


def as_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "fp16":
        return values.astype(np.float16).view(np.uint16)
    if dtype == "e4m3":  # any two finite numbers: the mantissas of normal ones are random bits, too
        return values.astype(np.float32).view(np.uint32).astype(np.uint16) & 0xBFBF
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def as_values(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "e4m3":
        return VALUES[dtype][bits.view(np.uint8)].astype(np.float64)
    return (bits.view(np.float16) if dtype == "fp16" else (bits.astype(np.uint32) << 16).view(np.float32)).astype(
        np.float64
    )


def fragments_a(bits: np.ndarray) -> np.ndarray:
    """`[64, 64]` → `[128 threads, 4 steps, 4 registers, 2]`: fragment A of mma m16n8k16, a warp its own 16 rows (PTX
    ISA). Of 8 bits the same, two numbers for one."""
    out = np.zeros((128, STEPS, 4, 2), np.uint16)
    for thread in range(128):
        warp, g, t = thread // 32, thread % 32 // 4, thread % 4
        for step, i, e in np.ndindex(STEPS, 4, 2):
            out[thread, step, i, e] = bits[16 * warp + g + 8 * (i % 2), 16 * step + 2 * t + e + 8 * (i // 2)]
    return out


def product(
    columns: int,
    dtype: str = "fp16",
    swizzle: int = 128,
    a_in: str = "registers",
    b_major: str = "k",
    accumulate: str = "1",
    fence: str = "fence_proxy_async();",
    between: str = "",
    arranged: str = "wgmma_fence();",
    pending: int = 0,
    change: Callable[[str], str] = lambda text: text,
    pairs: bool = False,
) -> tuple[np.ndarray, np.ndarray, Execution]:
    """(D, what it should be, faults) of D = A[64, 64] B + C in four steps, of 8 bits A[64, 128]."""
    rng = np.random.default_rng(columns)
    a_bits, b_bits = (as_bits(rng.standard_normal(shape), dtype) for shape in ((64, 64), (columns, 64)))
    c = rng.standard_normal((128, columns // 2)).astype(np.float32)
    layouts: dict[str, Callable[[np.ndarray, int], Image]] = {
        "k": k_major,
        "mn": mn_major,
        "registers": lambda bits, _: (fragments_a(bits).ravel(), 0, 0, 0),
    }
    b_image, b_leading, b_stride, b_steps = layouts[b_major](b_bits, swizzle)
    a_image, a_leading, a_stride, a_steps = layouts[a_in](a_bits, swizzle)
    of = EightBits(dtype, pairs=pairs)
    text = change(wgmma_function("multiply", columns, of, a_in == "registers", b_major == "mn", a_in == "mn"))
    kernel = KERNEL
    for old, new in PAIRS.items() if pairs else ():
        kernel = kernel.replace(old, new)
    source = (
        kernel.replace("MULTIPLY", text)
        .replace("ACCUMULATE", accumulate)
        .replace("BETWEEN", between)
        .replace("ARRANGED", arranged)
    )
    stepped = []
    for name, steps in (("a", a_steps), ("b", b_steps)):
        if isinstance(steps, list):  # a step to the next tile is longer than one inside a tile
            source = source.replace(
                f"step * {name}_step", "(" + " + ".join(f"(step == {i}) * {s >> 4}" for i, s in enumerate(steps)) + ")"
            )
            steps = 0
        stepped.append(np.int32(steps >> 4))
    operand = "a[step]" if a_in == "registers" else "a_descriptor + base + step * a_step"
    if a_in != "registers" and isinstance(a_steps, list):
        operand = (
            "a_descriptor + base + (" + " + ".join(f"(step == {i}) * {s >> 4}" for i, s in enumerate(a_steps)) + ")"
        )
    a_bytes = -(-a_image.nbytes // 1024) * 1024
    a_space, b_space = np.zeros(a_bytes // 2, np.uint16), np.zeros(-(-b_image.nbytes // 1024) * 512, np.uint16)
    a_space[: a_image.size], b_space[: b_image.size] = a_image, b_image
    for name, value in (
        ("A_OPERAND", operand),
        ("FENCE", fence),
        ("A_BYTES", a_bytes),
        ("B_BYTES", b_space.nbytes),
        ("COLUMNS", columns),
        ("STEPS", STEPS),
        ("PENDING", pending),
    ):
        source = source.replace(name, str(value))
    out = np.zeros_like(c)
    scalars = [descriptor(0, a_leading, a_stride, swizzle), descriptor(a_bytes, b_leading, b_stride, swizzle), *stepped]
    execution = run_hopper(source, [a_space, b_space, c, out], (), scalars, 128, a_bytes + b_space.nbytes)
    expected = as_values(a_bits, dtype) @ as_values(b_bits, dtype).T + (
        accumulators_to_matrix(c) if accumulate == "1" else 0
    )
    return accumulators_to_matrix(out), expected, execution
