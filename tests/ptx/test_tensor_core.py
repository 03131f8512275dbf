"""Matrix instructions against the layouts of the PTX ISA, element by element, and against products of whole
matrices.
"""

import numpy as np
import pytest

from tests.ptx.golden.harness import run_ptx

RNG = np.random.default_rng(0)
STORE_4 = "mul.wide.u32 %q0, %tid, 16; add.s64 %q0, %q0, %a{out}; st.global.v4.b32 [%q0], {{{regs}}};"
FILL_SHARED = """
mul.wide.u32 %q0, %tid, 16; add.s64 %q0, %q0, %a0; ld.global.v4.u32 {%r0,%r1,%r2,%r3}, [%q0];
shl.b32 %r4, %tid, 4; mov.u32 %r5, tile; add.u32 %r4, %r4, %r5; st.shared.v4.u32 [%r4], {%r0,%r1,%r2,%r3}; bar.sync 0;
"""
TILE = ".shared .align 16 .b8 tile[1024];"


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix(count, trans):
    """Two warps; row addresses in a scrambled order, lanes that give none hold an address far outside."""
    halves = RNG.integers(0, 65536, (64, 8)).astype(np.uint16)  # 64 rows of 16 bytes
    rows = RNG.permutation(64).astype(np.uint32)
    addresses = rows * 16
    addresses[np.arange(64) % 32 >= 8 * count] = 1 << 20
    out = np.zeros((64, 4), np.uint32)
    regs = [f"%r{10 + i}" for i in range(4)]
    body = (
        FILL_SHARED
        + "".join(f"mov.b32 {r}, 0;" for r in regs)
        + f"""
mul.wide.u32 %q0, %tid, 4; add.s64 %q0, %q0, %a1; ld.global.u32 %r6, [%q0]; add.u32 %r6, %r6, %r5;
ldmatrix.sync.aligned.m8n8.x{count}{".trans" if trans else ""}.shared.b16 {{{",".join(regs[:count])}}}, [%r6];
"""
        + STORE_4.format(out=2, regs=",".join(regs))
    )
    assert not run_ptx(body, halves, addresses, out, threads=64, declarations=TILE).faults
    got = out.view(np.uint16).reshape(64, 4, 2)
    for thread in range(64):
        lane, first = thread % 32, thread // 32 * 32
        for m in range(count):
            for e in range(2):
                row, column = lane // 4, 2 * (lane % 4) + e
                if trans:
                    row, column = column, row
                assert got[thread, m, e] == halves[rows[first + 8 * m + row], column]


def test_stmatrix_is_the_inverse_of_ldmatrix():
    halves = RNG.integers(0, 65536, (64, 8)).astype(np.uint16)
    out = np.zeros((64, 8), np.uint16)
    for trans in ("", ".trans"):
        body = (
            FILL_SHARED
            + f"""
ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r10,%r11,%r12,%r13}}, [%r4]; bar.sync 0;
xor.b32 %r4, %r4, 16; stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r4], {{%r10,%r11,%r12,%r13}}; bar.sync 0;
xor.b32 %r4, %r4, 16; ld.shared.v4.b32 {{%r10,%r11,%r12,%r13}}, [%r4];
"""
            + STORE_4.format(out=1, regs="%r10,%r11,%r12,%r13")
        )
        assert not run_ptx(body, halves, out, threads=64, declarations=TILE).faults
        assert np.array_equal(out, halves[np.arange(64) ^ 1])


def fragments(kind):
    """(bits of a register from two floats, or one for tf32; the floats those bits hold)."""
    if kind == "f16":
        return lambda x: x.astype(np.float16).view(np.uint16), lambda x: x.astype(np.float16).astype(np.float64)
    cut = lambda x, keep: x.view(np.uint32) & np.uint32(keep)
    if kind == "bf16":
        return lambda x: (cut(x, 0xFFFF0000) >> 16).astype(
            np.uint16
        ), lambda x: cut(x, 0xFFFF0000).view(np.float32).astype(np.float64)
    return lambda x: cut(x, 0xFFFFE000), lambda x: cut(x, 0xFFFFE000).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("kind, depth", [("f16", 16), ("f16", 8), ("bf16", 16), ("bf16", 8), ("tf32", 8), ("tf32", 4)])
def test_mma(kind, depth):
    """The element of each register is that of the tables in the PTX ISA, "Matrix fragments for mma.m16n8k…"."""
    a, b, c = (RNG.standard_normal(s).astype(np.float32) for s in ((16, depth), (depth, 8), (16, 8)))
    encode, decode = fragments(kind)
    per_register = 1 if kind == "tf32" else 2
    chunk = 4 * per_register
    a_count, b_count = 2 * depth // chunk, depth // chunk
    inputs = np.zeros((32, 12), np.uint32)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(a_count):
            column = t * per_register + chunk * (i // 2)
            inputs[lane, i] = encode(np.ascontiguousarray(a[g + 8 * (i % 2), column : column + per_register])).view(
                np.uint32
            )[0]
        for i in range(b_count):
            row = t * per_register + chunk * i
            inputs[lane, 4 + i] = encode(np.ascontiguousarray(b[row : row + per_register, g])).view(np.uint32)[0]
        for i in range(4):
            inputs[lane, 8 + i] = c[g + 8 * (i // 2), 2 * t + i % 2].view(np.uint32)
    out = np.zeros((32, 4), np.float32)
    loads = "".join(
        f"ld.global.v4.b32 {{%r{4 * i},%r{4 * i + 1},%r{4 * i + 2},%r{4 * i + 3}}}, [%q0+{16 * i}];" for i in range(3)
    )
    names = lambda first, count: "{" + ",".join(f"%r{first + i}" for i in range(count)) + "}"
    body = f"""mul.wide.u32 %q0, %tid, 48; add.s64 %q0, %q0, %a0; {loads}
mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32 {names(8, 4)}, {names(0, a_count)}, {names(4, b_count)},
  {names(8, 4)};
""" + STORE_4.format(out=1, regs="%r8,%r9,%r10,%r11")
    execution = run_ptx(body, inputs, out)
    assert not execution.faults
    assert execution.counters.tensor_flops == 2 * 16 * 8 * depth
    expected = decode(a) @ decode(b) + c
    for lane in range(32):
        for i in range(4):
            assert abs(out[lane, i] - expected[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]) < 1e-5


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize(
    "a_layout, b_layout, d_layout", [("row", "col", "row"), ("col", "row", "col"), ("row", "row", "row")]
)
def test_wmma(kind, a_layout, b_layout, d_layout):
    """D = A·B + C through shared memory (A, B) and global memory (C, D), with lines 24 elements apart."""
    a, b, c = (RNG.standard_normal((16, 16)).astype(np.float32) for _ in range(3))
    encode, decode = fragments(kind)

    def lines(matrix, layout, dtype):
        padded = np.zeros((16, 24), dtype)
        padded[:, :16] = matrix if layout == "row" else matrix.T
        return padded

    operands = np.concatenate(
        [lines(encode(a), a_layout, np.uint16).ravel(), lines(encode(b), b_layout, np.uint16).ravel()]
    )
    addend, out = lines(c, d_layout, np.float32), np.zeros((16, 24), np.float32)
    count, four = 8 if kind == "f16" else 4, "{%r2,%r3,%r4,%r5}"
    regs = lambda first, n: "{" + ",".join(f"%r{first + i}" for i in range(n)) + "}"
    types = "f32.f32" if kind == "f16" else "f32.bf16.bf16.f32"
    body = f"""
shl.b32 %r0, %tid, 4; mov.u32 %r1, tile; cvt.u64.u32 %q0, %r0; add.s64 %q0, %q0, %a0; add.u32 %r0, %r0, %r1;
{"".join(f"ld.global.v4.b32 {four}, [%q0+{512 * i}]; st.shared.v4.b32 [%r0+{512 * i}], {four};" for i in range(3))}
bar.sync 0;
wmma.load.a.sync.aligned.{a_layout}.m16n16k16.shared.{kind} {regs(8, count)}, [%r1], 24;
wmma.load.b.sync.aligned.{b_layout}.m16n16k16.shared.{kind} {regs(16, count)}, [%r1+768], 24;
wmma.load.c.sync.aligned.{d_layout}.m16n16k16.global.f32 {regs(24, 8)}, [%a1], 24;
wmma.mma.sync.aligned.{a_layout}.{b_layout}.m16n16k16.{types} {regs(32, 8)}, {regs(8, count)}, {regs(16, count)},
  {regs(24, 8)};
wmma.store.d.sync.aligned.{d_layout}.m16n16k16.global.f32 [%a2], {regs(32, 8)}, 24;"""
    assert not run_ptx(body, operands, addend, out, declarations=".shared .align 32 .b8 tile[1536];").faults
    result = out[:, :16] if d_layout == "row" else out[:, :16].T
    np.testing.assert_allclose(result, decode(a) @ decode(b) + c, atol=1e-5)
    assert not out[:, 16:].any()


def test_mma_by_a_part_of_the_warps_leaves_the_others_alone():
    """Warp 1 skips it; its registers keep what they had."""
    body = """
mov.u32 %r0, 0x3c003c00; mov.f32 %f0, 0f40000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
setp.gt.u32 %p0, %tid, 31; @%p0 bra SKIP;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0,%f1,%f2,%f3}, {%r0,%r0,%r0,%r0}, {%r0,%r0}, {%f0,%f1,%f2,%f3};
SKIP:""" + STORE_4.format(out=0, regs="%f0,%f1,%f2,%f3")
    out = np.zeros((64, 4), np.float32)
    assert not run_ptx(body, out, threads=64).faults
    assert (out[:32] == 18).all() and (out[32:] == 2).all()
