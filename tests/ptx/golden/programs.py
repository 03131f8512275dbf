"""Golden launches of what needs a program: memory in every form, order between threads, atomics."""

import itertools

import numpy as np

from tests.ptx.golden.harness import run_ptx
from tests.ptx.golden.operands import operand

RNG = np.random.default_rng(20260101)


def memory_cases() -> None:
    for t, vector in itertools.product(
        ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64"),
        ("", ".v2", ".v4"),
    ):
        size, lanes = int(t[1:]) // 8, int(vector[2:] or 1)
        if size * lanes > 16:
            continue
        register = {1: "%h", 2: "%h", 4: "%f" if t == "f32" else "%r", 8: "%q"}[size]
        names = ", ".join(f"{register}{i + 3}" for i in range(lanes))
        names = f"{{{names}}}" if vector else names
        step = size * lanes
        out = np.zeros(32 * step, np.uint8)
        run_ptx(
            f"mul.wide.u32 %q0, %i, {step}; add.s64 %q1, %q0, %a0; add.s64 %q2, %q0, %a1; mov.u32 %r0, tile; "
            f"mad.lo.u32 %r0, %i, {step}, %r0;"
            f"ld.global{vector}.{t} {names}, [%q1]; st.shared{vector}.{t} [%r0], {names}; bar.sync 0; xor.b32 %r1, "
            f"%r0, {step};"
            f"ld.shared{vector}.{t} {names}, [%r1]; st.global{vector}.{t} [%q2], {names};",
            RNG.integers(0, 256, 32 * step).astype(np.uint8),
            out,
            declarations=".shared .align 16 .b8 tile[1024];",
            count=False,
        )
    loads = [
        ".volatile.global",
        ".volatile.shared",
        ".global.nc.L1::no_allocate.L2::128B",
        ".weak.global",
        *(f".{o}.{s}.global" for o in ("relaxed", "acquire") for s in ("cta", "gpu", "sys")),
        *(f".global.{c}" for c in ("ca", "cg", "cs", "lu", "cv", "nc")),
        *(f".global.L1::{e}" for e in ("no_allocate", "evict_normal", "evict_unchanged", "evict_first", "evict_last")),
        *(f".global.L2::{b}B" for b in (64, 128, 256)),
        "",
        ".shared::cta",
    ]
    stores = [
        ".volatile.global",
        ".weak.global",
        *(f".{o}.{s}.global" for o in ("relaxed", "release") for s in ("cta", "gpu", "sys")),
        *(f".global.{c}" for c in ("cg", "cs", "wb", "wt")),
        *(f".global.L1::{e}" for e in ("no_allocate", "evict_normal", "evict_unchanged", "evict_first", "evict_last")),
        "",
        ".shared::cta",
    ]
    for words in loads:
        inside = "shared" in words
        place = "[%r0]" if inside else "[%q1]"
        run_ptx(
            f"mul.wide.u32 %q0, %i, 4; add.s64 %q1, %q0, %a0; add.s64 %q2, %q0, %a1; mov.u32 %r0, tile; mad.lo.u32 "
            "%r0, %i, 4, %r0;"
            f"ld.global.u32 %r2, [%q1]; st.shared.u32 [%r0], %r2; bar.warp.sync -1; ld{words}.u32 %r3, {place}; "
            "st.global.u32 [%q2], %r3;",
            operand("u32", 3)[:32],
            np.zeros(32, np.uint32),
            declarations=".shared .align 16 .b8 tile[128];",
            count=False,
        )
    for words in stores:
        place = "[%r0]" if "shared" in words else "[%q2]"
        run_ptx(
            f"mul.wide.u32 %q0, %i, 4; add.s64 %q1, %q0, %a0; add.s64 %q2, %q0, %a1; mov.u32 %r0, tile; mad.lo.u32 "
            "%r0, %i, 4, %r0;"
            f"ld.global.u32 %r2, [%q1]; st{words}.u32 {place}, %r2;"
            + ("ld.shared.u32 %r3, [%r0]; st.global.u32 [%q2], %r3;" if "shared" in words else ""),
            operand("u32", 4)[:32],
            np.zeros(32, np.uint32),
            declarations=".shared .align 16 .b8 tile[128];",
            count=False,
        )


def order_cases() -> None:
    """Instructions that order or hint and compute nothing: around a load and a store."""
    fences = [
        "membar.cta",
        "membar.gl",
        "membar.sys",
        *(f"fence{o}.{s}" for o in ("", ".sc", ".acq_rel") for s in ("cta", "gpu", "sys")),
        "prefetch.global.L1 [%q1]",
        "prefetch.L2 [%q1]",
        "fence.proxy.async",
        "fence.proxy.async.shared::cta",
        "fence.mbarrier_init.release.cluster",
        "griddepcontrol.wait",
        "griddepcontrol.launch_dependents",
        "nanosleep.u32 20",
        "bar.sync 1",
        "bar.cta.sync 2",
        "barrier.sync 3",
        "barrier.cta.sync.aligned 4, 32",
        "bar.warp.sync -1",
        "bra.uni NEXT;\nNEXT:\nmov.u32 %r3, %r2",
    ]
    for words in fences:
        run_ptx(
            f"mul.wide.u32 %q0, %i, 4; add.s64 %q1, %q0, %a0; add.s64 %q2, %q0, %a1; ld.global.u32 %r2, "
            f"[%q1];\n{words};\nst.global.u32 [%q2], %r2;",
            operand("u32", 3)[:32],
            np.zeros(32, np.uint32),
            count=False,
        )
    for arrive in (
        "bar.arrive",
        "bar.cta.arrive",
        "barrier.arrive",
        "barrier.cta.arrive.aligned",
    ):  # the first warp arrives, the second waits
        run_ptx(
            f"mul.wide.u32 %q0, %i, 4; add.s64 %q2, %q0, %a0; mov.u32 %r0, tile; mad.lo.u32 %r0, %i, 4, %r0; "
            "setp.ge.u32 %p0, %tid, 32; @%p0 bra WAIT;\n"
            f"st.shared.u32 [%r0], %i; {arrive} 5, 64; bra DONE;\nWAIT:\nbar.sync 5, 64; ld.shared.u32 %r1, "
            "[%r0+-128]; st.global.u32 [%q2], %r1;\nDONE:\n",
            np.zeros(64, np.uint32),
            threads=64,
            declarations=".shared .align 16 .b8 tile[256];",
            count=False,
        )
    for words in ("to.global", "global"):
        run_ptx(
            f"cvta.{words}.u64 %q3, %a1; mul.wide.u32 %q0, %i, 4; add.s64 %q1, %q0, %a0; add.s64 %q2, %q0, %q3; "
            "ld.global.u32 %r2, [%q1];"
            "st.global.u32 [%q2], %r2;",
            operand("u32", 3)[:32],
            np.zeros(32, np.uint32),
            count=False,
        )
    run_ptx(
        "mov.u32 %r0, tile; cvt.u64.u32 %q3, %r0; cvta.shared.u64 %q4, %q3; cvta.to.shared.u64 %q5, %q4; sub.u64 %q5, "
        "%q5, %q3; mul.wide.u32 %q0, %i, 8;"
        "add.s64 %q2, %q0, %a0; st.global.u64 [%q2], %q5;",
        np.zeros(32, np.uint64),
        declarations=".shared .align 16 .b8 tile[128];",
        count=False,
    )
    run_ptx(
        "cvta.local.u64 %q4, %q3; cvta.to.local.u64 %q5, %q4; sub.u64 %q5, %q5, %q3; mul.wide.u32 %q0, %i, 8;"
        "add.s64 %q2, %q0, %a0; st.global.u64 [%q2], %q5;".replace("cvta.local", "mov.u64 %q3, 0; cvta.local"),
        np.zeros(32, np.uint64),
        count=False,
    )


ADDRESSES = (
    "mul.wide.u32 %q0, %i, 4; add.s64 %q1, %q0, %a0; add.s64 %q2, %q0, %a1; mov.u32 %r0, tile; mad.lo.u32 %r1, %i, "
    "16, %r0;"
    "ld.global.u32 %r2, [%q1];"
)
TILE = ".shared .align 128 .b8 tile[4096];"


def word(body: str) -> None:
    """One word per thread of a warp, %r2, in and %r3 out; %r1 is the thread's own 16 bytes of `tile`, %r0 its start."""
    run_ptx(
        f"{ADDRESSES} {body} st.global.u32 [%q2], %r3;",
        operand("u32", 5)[:32],
        np.zeros(32, np.uint32),
        threads=32,
        declarations=TILE,
        count=False,
    )


ATOMICS = {
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2"),
    "min": ("u32", "s32", "u64", "s64"),
    "max": ("u32", "s32", "u64", "s64"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "exch": ("b32", "b64"),
    "cas": ("b32", "b64", "b16"),
}
"""What PTX has of what the interpreter takes; every thread has a cell of its own, since turns come in no order."""


def atomic_cases() -> None:
    scopes = itertools.cycle(
        ("", ".relaxed.cta", ".relaxed.gpu", ".acquire.gpu", ".release.cta", ".acq_rel.sys", ".relaxed.sys")
    )
    for (action, kinds), space in itertools.product(ATOMICS.items(), ("global", "shared", "")):
        for t in kinds:
            if space == "shared" and t in ("bf16", "f16", "f16x2", "bf16x2"):
                continue
            half = t in ("f16", "bf16", "f16x2", "bf16x2")
            word = f"{next(scopes)}{'.' + space if space else ''}.{action}{'.noftz' if half else ''}.{t}"
            one_atomic("atom", word, action, t, space)
            if action not in ("exch", "cas"):
                one_atomic(
                    "red", word.replace(".acquire", ".relaxed").replace(".acq_rel", ".relaxed"), action, t, space
                )

    for vector in (2, 4):
        values = ", ".join(("%f0", "%f1", "%f2", "%f3")[:vector])
        loads = "".join(f"ld.global.f32 %f{i}, [%q2+{4 * i}];" for i in range(vector))
        run_ptx(
            f"mul.wide.u32 %q0, %i, {4 * vector}; add.s64 %q1, %q0, %a0; add.s64 %q2, %q0, %a1; {loads} "
            f"red.relaxed.gpu.global.add.v{vector}.f32 [%q1], {{{values}}};",
            *(np.concatenate([operand("f32", seed + i)[:32] for i in range(vector)]) for seed in (11, 21)),
            count=False,
        )


def one_atomic(op: str, word: str, action: str, t: str, space: str) -> None:
    size = 4 if t.endswith("x2") else 2 if t.endswith("16") else int(t[1:]) // 8
    register = {2: "%h", 4: "%r", 8: "%q"}[size]
    first = {2: 0, 4: 8, 8: 4}[size]
    old, value, other = (f"{register}{first + i}" for i in range(3))
    cells, values = (operand(t, seed)[:32] for seed in (11, 12))
    if action == "cas":
        cells = np.where(np.arange(32) % 2, cells, values)
    tail = f", {value}, {value}" if action == "cas" else f", {value}"
    place = "[%r0]" if space == "shared" else "[%q1]"
    bits = 8 * size
    body = (
        f"mul.wide.u32 %q0, %i, {size}; add.s64 %q1, %q0, %a0; add.s64 %q2, %q0, %a1; add.s64 %q3, %q0, %a2; mov.u32 "
        "%r0, tile;"
        f"mad.lo.u32 %r0, %i, {size}, %r0; ld.global.b{bits} {value}, [%q2]; ld.global.b{bits} {old}, [%q1];"
        + (f"st.shared.b{bits} [%r0], {old};" if space == "shared" else "")
        + (f"atom{word} {old}, {place}{tail};" if op == "atom" else f"red{word} {place}{tail};")
        + (f"ld.shared.b{bits} {other}, [%r0]; st.global.b{bits} [%q1], {other};" if space == "shared" else "")
        + f"st.global.b{bits} [%q3], {old};"
    )
    run_ptx(
        body,
        cells.copy(),
        values.copy(),
        np.zeros_like(cells),
        declarations=".shared .align 16 .b8 tile[256];",
        count=False,
    )


GROUPS = (memory_cases, order_cases, atomic_cases)
