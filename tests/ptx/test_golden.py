"""The interpreter against an H100: every launch of the golden file again, to the last bit where the PTX ISA says what
the bits are.
"""

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
    "min": {"(.xorsign.abs)"},
    "max": {"(.xorsign.abs)"},
    "cvta": {"const"},
    # a hint leaves nothing to compare
    "cp": {".L2::cache_hint"},
}
"""Alternatives without a golden, by opcode."""
EXCUSED_OF_PARAMETERS = {".v(((2)|(4)))", "2", "4"}
"""ld.param of vectors, which needs a parameter that is a struct; no launch of ours has one."""


def excused(missing: str) -> bool:
    pattern, _, alternative = missing.rpartition(": ")
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
    assert golden_file.FILE.stat().st_size < 1 << 20


def test_every_accepted_instruction_has_a_golden(recorded):
    """Each entry of the whitelist, and each alternative in its pattern, is taken by an opcode that the GPU ran;
    combinations of alternatives that share an implementation need not be. Words out of a table of the instruction's own
    are represented, not enumerated: atomics' actions, comparisons, wgmma's columns."""
    opcodes = set().union(*(g.opcodes for g in recorded[0] if g.after is not None))
    found = uncovered(opcodes)
    missing = sorted(m for m in found if not excused(m))
    assert not missing, "No golden for:\n" + "\n".join(missing)
    used = {m.rpartition(": ")[2] for m in found}
    needless = {word: words - used for word, words in EXCUSED.items() if words - used}
    assert not needless, needless


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
