"""Mutants of the templates: what can be changed, where it lands in a rendered source, and that the offline path finds a
sample of them (`tests/mutation` runs them all)."""

import re
from dataclasses import replace

import pytest

from evoattn.correctness.cases import proof_of
from evoattn.families.block_list import packed_mask
from evoattn.families.registry import FAMILIES
from evoattn.model.block_list import draw
from evoattn.model.paths import ROOT
from tests.mutation.changes import changes_of
from tests.mutation.python_mutants import equivalents
from tests.mutation.rooms import ROOMS
from tests.mutation.sources import bare_lines, changes_in, files_of, mutants_of
from tests.mutation.variants import serving, settings_of
from tests.mutation.verdicts import SURVIVED, Reason, Verdict, load_reasons, survivors, table

TEXT = """// if (a < b) wait();
__device__ void f(int lane, int* p_smem) {
  for (int tile = 0; tile < tiles; ++tile) {
    __syncthreads();  // a reason
    if (lane == 0) mbarrier_wait(full + 8 * at.stage, at.parity);
    p_smem[batch * stride + min(lane, 7)] = 1;
    cp_async_wait<STAGES - 2>();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = 0;
}
"""


def changed(kind):
    return [c.what for c in changes_of(TEXT) if c.kind == kind]


def test_what_is_changed():
    assert "__syncthreads() → (void)0" in changed("delete")
    assert "__syncthreads() → __syncwarp()" in changed("weaken")
    assert any(what.startswith("lines exchanged: __syncthreads();") for what in changed("move"))
    assert "at.parity → (at.parity ^ 1)" in changed("flip") and "lane == 0 → true" in changed("flip")
    assert changed("edge").count("< → <=") == 1  # neither in the comment nor where registers are unrolled
    assert "min(lane, 7) → (lane)" in changed("edge") and "at.stage → (at.stage + 1)" in changed("stage")
    assert "batch * stride + → nothing" in changed("term")
    assert "STAGES - 2 → (STAGES - 2) + 1" in changed("weaken")


def test_what_is_changed_of_values():
    assert "lane → warp" not in changed("name")  # the text has no warp
    assert "tile → tiles" in changed("name") and "7 → 8" in changed("constant") and "* → +" in changed("operator")
    assert "* stride → nothing" in changed(
        "factor"
    ) and "full + 8 * at.stage, at.parity → at.parity, full + 8 * at.stage" in changed("swap")
    assert "→ + 1" in [
        what.strip() for what in changed("loop")
    ] and "p_smem[batch * stride + min(lane, 7)] = 1 → (void)0" in changed("stale")
    assert "__syncthreads();  // a reason → 2 lines later" in changed("far move")
    assert "at.parity → 0" in changed("neighbour")


def test_what_is_changed_of_statements():
    assert not changed("twice")  # neither a barrier nor an assignment does more then
    assert "< → >=" in changed("negate") and "i → (i) ^ 1" in changed("index")


MORE = """
float f(float x, int lane) {
  const float shift = fmaxf(x, -1.5f);
  const int row = lane ^ 0x7;
  sum += x * x;
  best = exp2_approx(x * scale - shift);
  if constexpr (WIDE) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(x), "f"(x));
  load(shift);
  wait(row);
  do look(seen); while (seen == 0);
  return wide ? x : -shift;
}
"""


@pytest.mark.parametrize(
    "kind, what",
    [
        ("twice", "sum += x * x; → { sum += x * x; sum += x * x; }"),
        ("call", "fmaxf → fminf"),
        ("bits", "0x7 → 0x6"),
        ("bits", "^ → |"),
        ("compound", "+= → -="),
        ("float", "1.5f → (1.5f * 16.f)"),
        ("float", "- → nothing"),
        ("initial", "lane ^ 0x7 → 0"),
        ("round", "x * x → __uint_as_float(__float_as_uint(x * x) & 0xffff0000u)"),
        ("order", "load(shift); wait(row); → wait(row); load(shift);"),
        ("negate", "WIDE → !(WIDE)"),
        ("negate", "seen == 0 → !(seen == 0)"),
        ("partly", "→ if (threadIdx.x % 32 != 31)"),
        ("partly", "→ if (threadIdx.x % 32 == 5) return;"),
        ("choice", "x : -shift → -shift : x"),
        ("term", "- shift → nothing"),
        ("ptx", ".rn → .rz"),
        ("rarely", "→ if (blockIdx.x != 2)"),
        ("nudge", "x → (x + x / 64)"),
    ],
)  # fmt: skip
def test_what_else_is_changed_of_statements(kind, what):
    assert what in [c.what.strip() for c in changes_of(MORE) if c.kind == kind]


def test_a_change_leaves_the_rest_as_it_is():
    for change in changes_of(TEXT):
        text = change.apply(TEXT)
        assert text != TEXT and len(text) == len(TEXT) - (change.end - change.first) + len(change.new)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(4)
def test_every_family_has_mutants_of_its_template_and_headers(family):
    mutants = mutants_of(family)
    assert {m.file for m in mutants} <= set(files_of(family)) and f"{family}.cu.j2" in files_of(family)
    assert len({m.change.kind for m in mutants}) >= 6 and len(mutants) > 200
    assert len(mutants) == sum(len(changes_in(file)) for file in files_of(family)), "a key is of one change"


@pytest.mark.parametrize("family", serving("block lists"))
def test_of_three_settings_with_lists_some_read_bits_of_a_predicate(family):
    settings = settings_of(family, "block lists", 3, 4497)
    cases = [c.problem for s in settings for c in proof_of(s.problem).interpreter_cases(s.problem, s.config)]
    packed = [(packed_mask(p), rows, p.block_mask[0].keys) for p in cases for of in draw(*p.block_mask) for rows in of]
    longest = {(len(rows[2].partial), 32 * bits.row_words // keys) for bits, rows, keys in packed if bits and rows[2:]}
    assert any(partial > 1 for partial, _ in longest)
    assert "backward" in family or any(partial > room for partial, room in longest)
    assert any(s.problem.predicate for s in settings) and any(not s.problem.predicate for s in settings)


def test_the_table_counts_equivalents_apart():
    known = Reason("f.cuh", "wait();", "", True, "nobody waits")
    verdicts = [Verdict("x", f"f.cuh | {line} | delete | → nothing", "", verdict) for line, verdict in LINES]
    assert "| x | 3 | 0 | 1 | 0 | 0 | 1 | 1 | 50.0% |" in table(verdicts, [known])
    assert [reason for _, reason in survivors(verdicts, [known])] == [known, None]
    assert survivors(verdicts, [replace(known, family="y")])[0][1] is None


LINES = [("wait();", SURVIVED), ("sync();", SURVIVED), ("go();", "fault"), ("no();", "same PTX")]


def test_reasons_are_read():
    assert all(reason.why and reason.file for reason in load_reasons())


def test_reasons_are_of_lines_that_there_are():
    gone = [r for r in load_reasons() if re.sub(r" \(again \d+\)$", "", r.line) not in bare_lines(r.file)]
    of_python = [one for one in equivalents() if not any(one["line"] == line.strip() for line in lines_of(one["file"]))]
    assert not gone + of_python


def lines_of(file):
    path = ROOT / "evoattn" / file
    return (path if path.exists() else ROOT / file).read_text().splitlines()


def test_the_rooms_of_python_s_mutants_have_files_and_tests():
    for name, room in ROOMS.items():
        for pattern in (*room.files, *room.tests):
            assert next(ROOT.glob(pattern), None), (name, pattern)
