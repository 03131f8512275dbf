"""Golden launches of what needs a program: warps, matrices, asynchronous copies, barriers, parameters."""

import itertools

import numpy as np

from tests.ptx.golden.cases import plain
from tests.ptx.golden.harness import observed, parsed, run_ptx
from tests.ptx.golden.operands import operand
from tests.ptx.golden.programs import RNG, TILE, word


def warp_cases() -> None:
    word("and.b32 %r4, %r2, 3; match.any.sync.b32 %r3, %r4, -1;")
    word("and.b32 %r4, %r2, 0; match.all.sync.b32 %r3|%p0, %r4, -1;")
    word("match.all.sync.b32 %r3|%p0, %r2, -1;")
    word("and.b32 %r4, %r2, 3; cvt.u64.u32 %q5, %r4; match.any.sync.b64 %r3, %q5, -1;")
    for mode in ("all", "any", "uni"):
        for limit in (0, 7, 32):
            word(f"setp.lt.u32 %p1, %i, {limit}; vote.sync.{mode}.pred %p0, %p1, -1; selp.b32 %r3, 1, 0, %p0;")
    word("and.b32 %r4, %r2, 1; setp.eq.u32 %p1, %r4, 1; vote.sync.ballot.b32 %r3, %p1, -1;")
    for action, t in (
        *((a, t) for a in ("add", "min", "max") for t in ("u32", "s32")),
        ("and", "b32"),
        ("or", "b32"),
        ("xor", "b32"),
    ):
        word(f"redux.sync.{action}.{t} %r3, %r2, -1;")
    for mode, clamp in (("up", 0), ("down", 31), ("bfly", 31), ("idx", 31), ("down", 0x1807), ("idx", 0x181F)):
        for distance in (1, 5, 16):
            word(
                f"shfl.sync.{mode}.b32 %r4|%p0, %r2, {distance}, {clamp}, -1; selp.b32 %r5, 1, 0, %p0; xor.b32 %r3, "
                "%r4, %r5;"
            )
    word("elect.sync %r4|%p0, -1; selp.b32 %r3, 256, 0, %p0; add.u32 %r3, %r3, %r4;")
    word("activemask.b32 %r3;")


def shared_cases() -> None:
    """What needs shared memory: matrices in and out by each count, asynchronous copies, barriers that count, atomics by
    ::cta.
    """
    fill = "st.shared.v4.u32 [%r1], {%r2, %i, %r2, %i}; bar.sync 0;"
    for count, trans, space in itertools.product((1, 2, 4), ("", ".trans"), ("", "::cta")):
        names = "{" + ", ".join(f"%r{10 + i}" for i in range(count)) + "}"
        mix = "".join(f"xor.b32 %r3, %r3, %r{10 + i}; shf.l.wrap.b32 %r3, %r3, %r3, 7;" for i in range(count))
        word(
            f"{fill} mov.u32 %r3, 1; ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared{space}.b16 {names}, [%r1]; {mix}"
        )
        sources = "{" + ", ".join(["%r2", "%i", "%r2", "%i"][:count]) + "}"
        word(
            f"st.shared.v4.u32 [%r1], {{%i, %i, %i, %i}}; bar.sync 0; "
            f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared{space}.b16 [%r1], {sources};"
            "bar.sync 0; ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r1]; shf.l.wrap.b32 %r3, %r10, %r11, 9; xor.b32 "
            "%r3, %r3, %r12;"
        )
    for cache, space, ahead in itertools.product(
        ("ca", "cg"), ("", "::cta"), ("", ".L2::64B", ".L2::128B", ".L2::256B")
    ):
        size = 16 if cache == "cg" else 4
        run_ptx(
            f"mul.wide.u32 %q0, %i, {size}; add.s64 %q1, %q0, %a0; add.s64 %q2, %q0, %a1; mov.u32 %r0, tile; "
            f"mad.lo.u32 %r1, %i, {size}, %r0;"
            f"and.b32 %r5, %i, {size - 1}; setp.ge.u32 %p0, %i, 16; selp.b32 %r5, {size}, %r5, %p0;"
            f"cp.async.{cache}.shared{space}.global{ahead} [%r1], [%q1], {size}, %r5; cp.async.commit_group; "
            "cp.async.wait_group 0; cp.async.wait_all;"
            + (
                "ld.shared.v4.u32 {%r6, %r7, %r8, %r9}, [%r1]; st.global.v4.u32 [%q2], {%r6, %r7, %r8, %r9};"
                if size == 16
                else "ld.shared.u32 %r6, [%r1]; st.global.u32 [%q2], %r6;"
            ),
            RNG.integers(0, 256, 32 * size).astype(np.uint8),
            np.zeros(32 * size, np.uint8),
            declarations=TILE,
            count=False,
        )
    for op, result in (
        ("atom.shared::cta.add.u32 %r3, [%r1], %r2", ""),
        ("red.shared::cta.max.u32 [%r1], %r2", "ld.shared.u32 %r3, [%r1];"),
    ):
        word(f"{fill} {op}; {result}")
    for release, acquire, space, wait in itertools.product(
        ("", ".release.cta"), ("", ".acquire.cta"), (".shared", ".shared::cta"), ("test_wait", "try_wait")
    ):
        word(
            "setp.ne.u32 %p0, %i, 0; st.shared.u32 [%r1+64], %r2;"
            f"@!%p0 mbarrier.init{space}.b64 [%r0], 32; bar.sync 0; mbarrier.arrive{release}{space}.b64 %q5, [%r0];\n"
            f"AGAIN:\nmbarrier.{wait}{acquire}{space}.b64 %p1, [%r0], %q5; @!%p1 bra AGAIN;\nld.shared.u32 %r3, "
            "[%r1+64]; bar.sync 0;"
            f"@!%p0 mbarrier.inval{space}.b64 [%r0];"
        )
    for relaxed, space in (
        ("", ".shared"),
        (".relaxed.cta", ".shared::cta"),
    ):  # bytes expected, then made up for by an arrival that expects none
        word(
            "setp.ne.u32 %p0, %i, 0; @!%p0 mbarrier.init.shared.b64 [%r0], 1; bar.sync 0;"
            f"@!%p0 mbarrier.expect_tx{relaxed}{space}.b64 [%r0], 0; @!%p0 mbarrier.arrive.expect_tx.shared.b64 %q5, "
            "[%r0], 0;\n"
            "AGAIN:\nmbarrier.try_wait.parity.shared.b64 %p1, [%r0], 0; @!%p1 bra AGAIN;\nselp.b32 %r3, 1, 0, %p1;"
        )
    word(
        "st.local.u32 [scratch+4], %r2; ld.local.u32 %r3, [scratch+4];".replace(
            "st.local", ".local .align 8 .b8 scratch[16]; st.local", 1
        )
    )


def parameter_cases() -> None:
    kinds = [f"{letter}{bits}" for letter in "bus" for bits in (8, 16, 32, 64)] + ["f32", "f64"]

    def size(t: str) -> int:
        return int(t[1:]) // 8

    register = {1: "%h0", 2: "%h0", 4: "%r0", 8: "%q0"}
    values = [operand(t, n)[40:41][0] for n, t in enumerate(kinds)]
    names = ", ".join(f".param .{t} p{n}" for n, t in enumerate(kinds))
    moves = "".join(
        f"ld.param.{t} {register[size(t)]}, [p{n}]; st.global.{t} [%q1+{8 * n}], {register[size(t)]};\n"
        for n, t in enumerate(kinds)
    )
    text = f""".version 8.0\n.target sm_90a\n.address_size 64
.visible .entry kernel(.param .u64 out, {names}) {{
.reg .b16 %h<2>; .reg .b32 %r<2>; .reg .b64 %q<2>;
ld.param.u64 %q1, [out];
{moves} ret;
}}"""
    observed(parsed(text), [], [np.zeros(8 * len(kinds), np.uint8)], values, 1, 1, 0, count=False)


def _registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def more_cases() -> None:
    for t, result in itertools.product(("f16", "bf16"), ("u32", "s32")):
        plain(f"set.lt.{result}.{t}", result, t, t)
    word("mov.u32 %r3, %r2; setp.ne.u32 %p0, %i, %i; @%p0 trap;")  # never taken: a trap ends the context
    word("setp.gt.u32 %p0, %i, 16; mov.u32 %r3, %r2; @%p0 bra OVER;\nadd.u32 %r3, %r3, 1;\nOVER:\n")
    word("st.global.u32 [%q2], %r2; ret.uni; mov.u32 %r3, 0;")
    for layout, ab, cd, t in itertools.product(
        ("row", "col"), ("global", "shared"), ("global", "shared"), ("f16", "bf16")
    ):
        count = 8 if t == "f16" else 4
        ab_space, cd_space = (s + "::cta" * (s == "shared" and layout == "col") for s in (ab, cd))
        at = {"global": ("%a0", "%a0+512", "%a1"), "shared": ("%r30", "%r30+512", "%r30+1024")}
        floats_ = "{" + ", ".join(f"%f{i}" for i in range(8)) + "}"
        bodies = (
            f"mov.u32 %r30, tile; mad.lo.u32 %r31, %i, 32, %r30; mul.wide.u32 %q0, %i, 32; add.s64 %q1, %q0, %a0; "
            "add.s64 %q2, %q0, %a1;"
            "ld.global.v4.u32 {%r32, %r33, %r34, %r35}, [%q1]; st.shared.v4.u32 [%r31], {%r32, %r33, %r34, %r35};"
            "ld.global.v4.u32 {%r32, %r33, %r34, %r35}, [%q1+16]; st.shared.v4.u32 [%r31+16], {%r32, %r33, %r34, %r35};"
            "ld.global.v4.u32 {%r32, %r33, %r34, %r35}, [%q2]; st.shared.v4.u32 [%r31+1024], {%r32, %r33, %r34, %r35};"
            "ld.global.v4.u32 {%r32, %r33, %r34, %r35}, [%q2+16]; st.shared.v4.u32 [%r31+1040], {%r32, %r33, %r34, "
            "%r35}; bar.sync 0;"
            f"wmma.load.a.sync.aligned.{layout}.m16n16k16.{ab_space}.{t} {_registers(0, count)}, [{at[ab][0]}], 16;"
            f"wmma.load.b.sync.aligned.{layout}.m16n16k16.{ab_space}.{t} {_registers(8, count)}, [{at[ab][1]}], 16;"
            f"wmma.load.c.sync.aligned.{layout}.m16n16k16.{cd_space}.f32 {floats_}, [{at[cd][2]}], 16;"
            f"wmma.mma.sync.aligned.{layout}.{layout}.m16n16k16.f32{'.f32' if t == 'f16' else '.bf16.bf16.f32'} "
            f"{floats_}, {_registers(0, count)}, {_registers(8, count)}, {floats_};"
            f"bar.sync 0; wmma.store.d.sync.aligned.{layout}.m16n16k16.{cd_space}.f32 [{at[cd][2]}], {floats_}, 16; "
            "bar.sync 0;"
            + (
                "ld.shared.v4.u32 {%r32, %r33, %r34, %r35}, [%r31+1024]; st.global.v4.u32 [%q2], {%r32, %r33, %r34, "
                "%r35};"
                "ld.shared.v4.u32 {%r32, %r33, %r34, %r35}, [%r31+1040]; st.global.v4.u32 [%q2+16], {%r32, %r33, "
                "%r34, %r35};"
                if cd == "shared"
                else ""
            )
        )
        rng = np.random.default_rng(3)
        ab_values = rng.standard_normal(512).astype(np.float32)
        ab_bits = (
            ab_values.astype(np.float16).view(np.uint16)
            if t == "f16"
            else (ab_values.view(np.uint32) >> 16).astype(np.uint16)
        )
        run_ptx(bodies, ab_bits, rng.standard_normal(256).astype(np.float32), declarations=TILE, count=False)


GROUPS = (warp_cases, shared_cases, parameter_cases, more_cases)
