"""The interpreter against an H100: every launch of the golden file again, to the last bit where the PTX ISA says what
the bits are."""

import re

import numpy as np
import pytest

from tests.ptx.golden import file as golden_file
from tests.ptx.golden.file import Golden
from tests.ptx.whitelist_choices import uncovered

EXCUSED = {
    # ptxas refuses them for this opcode, so that no kernel that compiles has them
    "bfind": {"b32", "b64"},
    "clz": {"u32", "u64"},
    "popc": {"u32", "u64"},
    "shl": {"s", "u"},
    # vectors: until `python -m tests.ptx.golden collect` and `run` have brought them
    "red": {"acq_rel", "acquire", ".v(((2)|(4)))", "2", "4"},
    "ld": {"release", "wb", "wt"},
    "st": {"acquire", "ca", "lu", "cv", ".nc", ".L2::((64B)|(128B)|(256B))", "64B", "128B", "256B"},
    # the pattern takes them and the instruction then refuses: such a kernel is "not interpreted"
    "min": {"(.xorsign.abs)", ".s16x2"},
    "max": {"(.xorsign.abs)", ".s16x2"},
    "cvta": {"const"},
    # a hint leaves nothing to compare; plain bytes: until `collect` and `run` have brought them
    "cp": {".L2::cache_hint", ".async.bulk.shared", ".async.bulk.global.shared", ".reduce.async.bulk.global.shared"},
    # products of 8 bits by mma, of e4m3 with e5m2, with sums of fp16, and the pairs (.s16x2) of min and max: until
    # `collect` and `run` have brought them
    "mma": {
        ".sync.aligned.m16n8k(?P<depth>32).row.col.f32.(?P<type>e4m3|e5m2).(?P=type).f32",
        ".sync.aligned.m16n8k32.row.col.s32.(?P<type>s8).s8.s32",
    },
    "wgmma": {"5m2", "16"},
}
"""Alternatives without a golden, by opcode."""
EXCUSED_OF_PARAMETERS = {".v(((2)|(4)))", "2", "4"}
"""ld.param of vectors, which needs a parameter that is a struct; no launch of ours has one."""


def alternative_of(missing: str) -> str:
    """What an excuse calls it: of an entry without any golden, its pattern up to the first state space's word."""
    pattern, _, alternative = missing.rpartition(": ")
    return pattern.replace("\\", "").partition(")")[2].partition("::")[0] if alternative == "any" else alternative


def excused(missing: str) -> bool:
    pattern, alternative = missing.rpartition(": ")[0], alternative_of(missing)
    word = re.match(r"\(\?P<op>(\w+)\)", pattern)[1]
    return alternative in (EXCUSED_OF_PARAMETERS if r"\.param" in pattern and word == "ld" else EXCUSED.get(word, ()))


@pytest.fixture(scope="module")
def recorded() -> tuple[list[Golden], dict[str, str]]:
    return golden_file.load()


def test_a_gpu_ran_them(recorded):
    goldens, device = recorded
    assert "H100" in device.get("product", ""), (
        "Run `python -m tests.ptx.golden run` on an H100: these launches have no outputs yet."
    )
    assert len(goldens) > 900 and all(g.after is not None for g in goldens)
    assert golden_file.FILE.stat().st_size < 9 << 17


@pytest.mark.slow
def test_every_accepted_instruction_has_a_golden(recorded):
    """Each entry of the whitelist, and each alternative in its pattern, is taken by an opcode that the GPU ran;
    combinations of alternatives that share an implementation need not be. Words out of a table of the instruction's own
    are represented, not enumerated: atomics' actions, comparisons, wgmma's columns."""
    opcodes = set().union(*(g.opcodes for g in recorded[0] if g.after is not None))
    found = uncovered(opcodes)
    missing = sorted(m for m in found if not excused(m))
    assert not missing, "No golden for:\n" + "\n".join(missing)
    used = {alternative_of(m) for m in found}
    needless = {word: words - used for word, words in EXCUSED.items() if words - used}
    assert not needless, needless


@pytest.mark.slow
def test_sums_of_products_of_8_bits_are_those_of_the_gpu_to_the_last_bit(recorded):
    products = [g for g in recorded[0] if any(re.match(r"wgmma.*e4m3", opcode) for opcode in g.opcodes)]
    assert len(products) >= 2
    for golden in products:
        assert golden.after and all(map(np.array_equal, golden.after, golden.interpreted()))


@pytest.mark.slow
def test_the_interpreter_does_what_the_gpu_did(recorded):
    wrong = []
    with np.errstate(all="ignore"):
        for golden in recorded[0]:
            assert golden.after is not None, (
                "Run `python -m tests.ptx.golden run` on an H100: there are no outputs yet."
            )
            if missed := golden_file.disagreements(golden, golden.interpreted()):
                wrong.append(f"{golden.name}: {missed} values; {' '.join(sorted(golden.opcodes, key=len)[-3:])}")
    assert not wrong, "\n".join(wrong)
