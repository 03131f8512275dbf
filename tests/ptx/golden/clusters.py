"""Golden launches of what blocks of a cluster do to each other, of order between blocks, and of the widest products."""

import itertools

import numpy as np

from tests.ptx.golden.harness import run_ptx
from tests.ptx.golden.operands import operand
from tests.ptx.golden.programs import one_atomic, word
from tests.ptx.golden.wgmma_product import product

BLOCKS = 4
SETUP = """mul.wide.u32 %q0, %i, 16; add.s64 %q1, %q0, %a0; add.s64 %q2, %q0, %a1; mov.u32 %r0, tile; mad.lo.u32 %r1, \
%tid, 16, %r0;
mov.u32 %r40, %cluster_ctarank; mov.u32 %r41, %cluster_nctarank; add.u32 %r42, %r40, 1; rem.u32 %r42, %r42, %r41;
ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%q1];
"""
"""A thread's 16 bytes of the input in %r4 … %r7; %r1 is where it has 16 bytes of `tile`, %r42 the rank of the next
block.
"""
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
FILL = f"st.shared.v4.u32 [%r1], {{%r4, %r5, %r6, %r7}}; {MEET}"
NEXT = "mapa.shared::cluster.u32 %r10, %r1, %r42;"
OUT = "st.global.v4.u32 [%q2], {%r4, %r5, %r6, %r7};"
TAKE = f"ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r1]; {OUT}"


def in_clusters(body: str, cluster: int = 2) -> None:
    """`body` by four warps, a block each."""
    inputs = np.random.default_rng(9).integers(0, 1 << 32, 4 * 32 * BLOCKS, np.uint32)
    run_ptx(
        SETUP + body,
        inputs,
        np.zeros_like(inputs),
        blocks=BLOCKS,
        cluster=cluster,
        count=False,
        declarations=".shared .align 128 .b8 tile[512]; .shared .align 8 .b8 signal[8];",
    )


def remote_cases() -> None:
    for cluster in (2, 4):
        in_clusters(f"{FILL} {NEXT} ld.shared::cluster.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r10]; {OUT} {MEET}", cluster)
        in_clusters(f"{MEET} {NEXT} st.shared::cluster.v4.u32 [%r10], {{%r4, %r5, %r6, %r7}}; {MEET} {TAKE}", cluster)
    for arrive, wait in itertools.product(("", ".release"), ("", ".acquire")):
        meet = f"barrier.cluster.arrive{arrive}; barrier.cluster.wait{wait};\n"
        in_clusters(f"{FILL.replace(MEET, meet)} {NEXT} ld.shared::cluster.u32 %r4, [%r10]; {OUT} {meet}")
    in_clusters(f"barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;\n{OUT}")
    in_clusters(
        f"{FILL} cvt.u64.u32 %q3, %r1; cvta.shared.u64 %q4, %q3; mapa.u64 %q5, %q4, %r42; ld.u32 %r5, [%q5]; {OUT} "
        f"{MEET}"
    )
    for words in (".relaxed.cluster", ".acquire.cluster"):
        in_clusters(f"{FILL} {NEXT} ld{words}.shared::cluster.u32 %r4, [%r10]; {OUT} {MEET}")
    for words in (".relaxed.cluster", ".release.cluster"):
        in_clusters(f"{FILL} {NEXT} st{words}.shared::cluster.u32 [%r10], %r4; {MEET} {TAKE}")


def signal_cases() -> None:
    """Stores and arrivals that complete on another block's mbarrier."""
    begin = "setp.eq.u32 %p0, %tid, 0; mov.u32 %r2, signal; mapa.shared::cluster.u32 %r11, %r2, %r42;" + NEXT

    def make(count: int) -> str:
        return f"@%p0 mbarrier.init.shared.b64 [%r2], {count}; @%p0 fence.mbarrier_init.release.cluster;\n"

    wait = "AGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r2], 0; @!%p1 bra AGAIN;\n"
    packs = "mov.b64 %q4, {%r4, %r5}; mov.b64 %q5, {%r6, %r7};"
    for kind, vector in itertools.product(("b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64"), ("", ".v2", ".v4")):
        size, lanes = int(kind[1:]) // 8, int(vector[2:] or 1)
        if size * lanes > 16:
            continue
        names = ", ".join((["%r4", "%r5", "%r6", "%r7"] if size == 4 else ["%q4", "%q5"])[:lanes])
        names = f"{{{names}}}" if vector else names
        weak = ".weak" if kind == "b32" else ""
        in_clusters(
            f"{begin} {packs} st.shared.v4.u32 [%r1], {{%r7, %r6, %r5, %r4}}; {make(1)}"
            f"@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {32 * size * lanes}; {MEET}"
            f"st.async{weak}.shared::cluster.mbarrier::complete_tx::bytes{vector}.{kind} [%r10], {names}, "
            f"[%r11];\n{wait} {TAKE} {MEET}"
        )
    for words in (".release.cluster.shared::cluster", ".shared::cluster"):
        if words.startswith(".release"):
            in_clusters(
                f"{begin} {make(32)} {MEET} st.shared::cluster.u32 [%r10], %r4; mbarrier.arrive{words}.b64 _, "
                f"[%r11];\n{wait}"
                f"ld.shared.u32 %r5, [%r1]; {OUT} {MEET}"
            )
        in_clusters(
            f"{begin} {make(1)} {MEET} @%p0 mbarrier.arrive.expect_tx{words}.b64 _, [%r11], 0;\n{wait} {OUT} {MEET}"
        )
    in_clusters(
        f"{begin} {make(1)} {MEET} @%p0 mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%r11], 0; {MEET}"
        f"@%p0 mbarrier.arrive.release.cluster.shared.b64 _, [%r2];\n{wait.replace('try_wait', 'test_wait')} {OUT} "
        f"{MEET}"
    )


def grid_order_cases() -> None:
    """Words of the scope of a cluster, and how the last block of several is found."""
    for action, t in (("inc", "u32"), ("add", "u32"), ("exch", "b32"), ("cas", "b32")):
        one_atomic("atom", f".acq_rel.gpu.global.{action}.{t}", action, t, "global")
    one_atomic("atom", ".relaxed.cluster.global.add.u32", "add", "u32", "global")
    one_atomic("red", ".relaxed.cluster.global.add.u32", "add", "u32", "global")
    one_atomic("red", ".release.gpu.global.max.s32", "max", "s32", "global")
    for words in ("fence.cluster", "fence.acq_rel.cluster", "fence.sc.cluster"):
        word(f"{words}; mov.u32 %r3, %r2;")
    word("ld.relaxed.cluster.global.u32 %r3, [%q1];")
    word("st.relaxed.cluster.global.u32 [%q2], %r2; mov.u32 %r3, %r2;")
    # each of four blocks leaves its values, and the one that draws the last number adds them up
    values, sums, turn = operand("u32", 5)[:64], np.zeros(16, np.uint32), np.zeros(1, np.uint32)
    run_ptx(
        "mul.wide.u32 %q0, %i, 4; add.s64 %q1, %q0, %a0; add.s64 %q2, %q0, %a1; ld.global.u32 %r2, [%q1]; "
        "st.global.u32 [%q2], %r2;"
        "membar.gl; bar.sync 0; setp.eq.u32 %p0, %tid, 0; mov.u32 %r4, drawn; @!%p0 bra OVER;\n"
        "atom.acq_rel.gpu.global.inc.u32 %r3, [%a2], 3; st.shared.u32 [%r4], %r3;\nOVER:\nbar.sync 0; ld.shared.u32 "
        "%r3, [%r4];"
        "setp.ne.u32 %p1, %r3, 3; @%p1 exit; fence.acq_rel.gpu; mul.wide.u32 %q0, %tid, 4; add.s64 %q1, %q0, %a1; "
        "mov.u32 %r5, 0;\n"
        + "".join(f"ld.global.u32 %r6, [%q1+{64 * b}]; add.u32 %r5, %r5, %r6;" for b in range(4))
        + "add.s64 %q2, %q0, %a3; st.global.u32 [%q2], %r5;",
        values,
        np.zeros(64, np.uint32),
        turn,
        sums,
        blocks=4,
        threads=16,
        declarations=".shared .align 4 .b8 drawn[4];",
        count=False,
    )


def wide_product_cases() -> None:
    for columns, dtype, a_in, b_major in (
        (128, "fp16", "k", "k"),
        (128, "bf16", "registers", "mn"),
        (256, "fp16", "registers", "k"),
    ):
        product(columns, dtype, 128, a_in, b_major)


GROUPS = (remote_cases, signal_cases, grid_order_cases, wide_product_cases)
