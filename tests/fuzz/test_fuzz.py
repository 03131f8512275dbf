"""The script that draws calls of the op and judges them: right answers pass, and each kind of wrong one does not."""

import argparse
import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from benchmarks.calls.no_device import no_code
from evoattn.model.gpu import GPUS
from evoattn.model.paths import cubin_cache
from evoattn.ops.attention import attention
from evoattn.ops.runtime import Runtime, current
from tests.fuzz import __main__ as op_right
from tests.fuzz.ahead import compile_one
from tests.fuzz.asked import Asked, Draw
from tests.fuzz.calls import Call, drawn
from tests.fuzz.judged import _written_beside, judged, why_wrong
from tests.fuzz.judged_faces import ALL, face_of, judged_face
from tests.fuzz.made import BAND, POISON, Maker, called
from tests.fuzz.variants import variants
from tests.fuzz.ways import AT_ONCE, WAYS, ways
from tests.ops.fake_device import BUILT, FakeDevice, fake_runtime

PLAIN = Call(7, batch=2, heads=4, kv_heads=2, seqlen_q=37, seqlen_k=45)


@pytest.mark.slow
def test_the_same_seed_draws_the_same_calls_of_every_kind():
    calls = drawn(3, 200, 1e8)
    assert calls == drawn(3, 200, 1e8) != drawn(4, 200, 1e8)
    assert {call.op for call in calls} == {"attention", "paged", "varlen", "mixed"}
    fields = "window", "softcap", "sink", "alibi", "bias", "mask", "seqused", "lse", "out", "scale"
    for field in (*fields, "table", "bias_places"):
        assert sum(bool(getattr(call, field)) for call in calls) > 5, field


@pytest.mark.slow
def test_no_call_fills_the_memory():
    assert max(call.elements for call in drawn(779, 60, 4e6)) <= 1 << 28, "one without keys had 4e9"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12])
def test_what_pytorch_answers_is_right(seed):
    wrong = [row for number, call in enumerate(drawn(seed, 25, 2e6)) if (row := judged(number, call, "cpu")).wrong]
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"out": "given", "lse": True},
        {"out": "other order", "places": "fused", "seqlen_k": 37, "is_causal": True},
        {"out": "query", "numbers": "large", "scale": 0.25},
        {"places": "late", "numbers": "late key", "is_causal": True, "causal": "lower_right"},
        {"op": "varlen", "places": "bshd", "causal": "lower_right"},
        {"op": "varlen", "places": "wide", "causal": "lower_right", "out": "query"},  # with gaps that no answer has
        {"numbers": "nan", "is_causal": True, "lse": True, "softcap": 5.0, "sink": True},
        {"numbers": "inf", "lse": True},
        {"bias": "hk", "bias_places": "expanded"},
        {"bias": "q", "bias_places": "turned", "sink": True},
        {"mask": "bool", "bias": "qk", "bias_places": "fewer dimensions"},
        {"mask": "float", "bias": "bhqk", "bias_places": "odd start"},
        {"places": "wide", "window": (9, 0), "out": "query"},
    ],
    ids=str,
)
def test_what_a_kernel_answers_is_right(tmp_path, changes):
    with current.use(fake_runtime(FakeDevice(), tmp_path)):
        row = judged(0, dataclasses.replace(PLAIN, **changes), "cpu")
    assert (row.wrong, row.kernel) == ("", True)
    assert row.ran.startswith("flash_wgmma ")


class Misbehaving(FakeDevice):
    """Does something beside the launch, from the fourth one on: the first three are the kernel's own check."""

    after = None

    def __init__(self):
        super().__init__()
        BUILT.clear()

    def launch(self, *arguments):
        status = super().launch(*arguments)
        if len(self.launches) > 3:
            self.after(self.launches[-1])
        return status


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda made, device: made.k.mul_(2), "inputs were changed"),
        (lambda made, device: made.room[:3].zero_(), "6 bytes beside out were written"),
        (lambda made, device: made.out[0, 0, 0].fill_(float("nan")), "outputs are NaN, not 0"),
        (lambda made, device: made.out.mul_(1.2), "times the error that is allowed"),
        (lambda made, device: made.out[0, 0, 0, :1].add_(1e-4 * len(device.launches)), "two runs differ"),
    ],
)
def test_a_wrong_answer_is_found(tmp_path, harm, sentence):
    device, call = Misbehaving(), dataclasses.replace(PLAIN, out="given")
    made = Maker(call, "cpu").made()
    device.after = lambda launched: harm(made, device)
    with current.use(fake_runtime(device, tmp_path)):
        assert sentence in judged(0, call, "cpu", made).wrong


def test_what_is_written_between_the_columns_of_out_is_found():
    call = dataclasses.replace(PLAIN, out="every other column")
    made = Maker(call, "cpu").made()
    inner = made.room[BAND:-BAND]
    poison = torch.full((2,), POISON, dtype=torch.uint8).view(torch.float16)
    made.room.copy_(poison)
    made.out.zero_()
    assert not _written_beside(call, made)
    inner[3] = 0
    assert _written_beside(call, made) == "2 bytes beside out were written"


def test_a_number_where_the_formula_has_none_is_wrong():
    call = dataclasses.replace(PLAIN, numbers="nan", lse=True, is_causal=True)
    made = Maker(call, "cpu").made()
    double = (tensor.double() for tensor in (made.q, made.k, made.v))
    answer, lse = attention(*double, is_causal=True, enable_gqa=True, return_lse=True)
    rows = torch.arange(37) >= 22  # which see key 22
    assert torch.equal(answer[0, :2].isnan().any(-1), rows.expand(2, -1)) and not answer[1].isnan().any()
    right = answer.half(), lse.float()
    assert why_wrong(call, made, *right)[0] == ""
    assert "outputs are NaN" in why_wrong(call, made, right[0].nan_to_num(), right[1])[0]
    assert "none" in why_wrong(call, made, right[0], right[1].nan_to_num())[0]


@pytest.mark.parametrize("table", ["int64", "turned", "shared", "wild"])
def test_unusual_tables_of_pages(table):
    call = Call(7, "paged", 3, 4, 2, 2, 90, page=16, table=table, seqused=True, causal=True)
    made = Maker(call, "cpu").made()
    assert (made.table.dtype == torch.int64) == (table == "int64")
    assert made.table.is_contiguous() != (table == "turned")
    assert torch.equal(made.table[0], made.table[1]) == (table == "shared")
    assert bool((made.table.abs() >= len(made.k)).any()) == (table == "wild")
    assert not judged(0, call, "cpu", made).wrong


def test_some_sinks_are_none():
    sinks = Maker(dataclasses.replace(PLAIN, sink=True), "cpu").made().sinks
    assert torch.isneginf(sinks).tolist() == [True, False, False, True]


def test_the_same_seed_draws_the_same_ways():
    assert ways(3, 200) == ways(3, 200) != ways(4, 200)
    assert ways(3, 100) == ways(3, 200)[:100]
    assert set(ways(3, 400)) == set(WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("changes", [{}, {"is_causal": True, "lse": True, "out": "given"}, {"window": (9, 0)}], ids=str)
@pytest.mark.sampled(3)
def test_every_way_is_right(tmp_path, way, changes):
    BUILT.clear()  # the kernel is checked anew
    device, call = FakeDevice(), dataclasses.replace(PLAIN, **changes)
    with current.use(fake_runtime(device, tmp_path)), torch.no_grad():
        row = judged(0, call, "cpu", way=way)
    assert (row.wrong, row.kernel) == ("", True)
    again = AT_ONCE if way == "threads" and not call.out else 1
    if way in ("vmap", "gradients") and not call.out:
        again = 0  # PyTorch answers
    assert len(device.launches) == 3 + 2 + again, "the check's, two eager ones, and those of the way"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["threads", "sdpa", "compiled"])
def test_a_way_that_answers_other_bits_is_wrong(tmp_path, way):
    device = Misbehaving()
    made = Maker(PLAIN, "cpu").made()
    device.after = lambda launched: setattr(device, "error", 1e-4 * (len(device.launches) >= 5))
    with current.use(fake_runtime(device, tmp_path)), torch.no_grad():
        assert judged(0, PLAIN, "cpu", made, way).wrong == "two runs differ"


def test_a_line_that_was_not_ended_is_no_row(tmp_path):
    row = json.dumps(dict(number=0, call="", kernel=False, ran="", error=0.0, wrong=""))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{row}\n{row[:20]}\n{row.replace('0', '1', 1)}\n{row[:30]}")
    assert set(op_right.rows_of(rows)) == {0, 1}


def test_a_call_that_raises_is_wrong(tmp_path):
    assert "RuntimeError" in judged(0, dataclasses.replace(PLAIN, kv_heads=3), "cpu").wrong


def test_the_log_sum_exp_is_judged():
    call = dataclasses.replace(PLAIN, lse=True)
    made = Maker(call, "cpu").made()
    answer, lse = called(call, made, False, None)
    assert why_wrong(call, made, answer, lse)[0] == ""
    assert "log-sum-exp" in why_wrong(call, made, answer, lse + 1e-2)[0]


def test_kernels_are_compiled_ahead(tmp_path):
    asked = []
    numbered = 5, dataclasses.replace(PLAIN, head_dim=128, value_dim=128, dtype="bf16")
    assert compile_one(GPUS["h100"], tmp_path, False, numbered, lambda *build: asked.append(build)) == numbered
    ((_, problem, _, gpu, folder),) = asked
    assert (problem.head_dim, problem.dtype, gpu.name, folder) == (128, "bf16", "h100", tmp_path)


def test_without_a_device_pytorch_answers():
    with current.use(Runtime(None, current.best_known, cubin_cache())), torch.no_grad():
        row = judged(0, PLAIN, "cpu")
    assert not row.kernel and row.ran.startswith("the tensors are on the CPU")


def test_a_process_that_ends_before_its_first_call_is_not_started_again(tmp_path):
    """Else a machine whose driver fails at once would start processes without end."""
    rows, codes = tmp_path / "rows.jsonl", [op_right.BROKEN, -11, -11, 0]
    row = dict(number=0, call="", kernel=False, ran="", error=0.0, wrong="the process ended")

    def run() -> int:
        if codes[0] == op_right.BROKEN:
            rows.write_text(json.dumps(row) + "\n")
        return codes.pop(0)

    assert op_right.started_anew(run, rows) == -11
    assert codes == [-11, 0]


@pytest.mark.slow
def test_the_script_goes_on_where_a_process_ended(tmp_path, monkeypatch, capsys):
    """What a process began and did not end is wrong, and is not tried again. Its processes are this one here."""
    rows = tmp_path / "rows.jsonl"
    begun = [dict(number=n, call="", kernel=False, ran="", error=0.0, wrong="the process ended") for n in (0, 1)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in [*begun, begun[0] | {"wrong": ""}]))
    words = ["--count", "4", "--most-flops", "1e6", "--json", str(rows), "--folder", str(tmp_path)]

    def run(command):
        monkeypatch.setattr(sys, "argv", command[2:])
        return subprocess.CompletedProcess(command, op_right.main())

    monkeypatch.setattr(op_right.signal, "signal", lambda *_: None)
    monkeypatch.setattr(op_right.subprocess, "run", run)
    assert run(["", "-m", "tests.fuzz", *words, "--until", "1e12"]).returncode == 0
    found = {row["number"]: row["wrong"] for row in map(json.loads, rows.read_text().splitlines())}
    assert found == {0: "", 1: "the process ended", 2: "", 3: ""}
    monkeypatch.setattr(sys, "argv", ["tests.fuzz", *words])
    assert op_right.main() == 0 and capsys.readouterr().out.startswith("4 calls in ")


def test_what_was_judged_before_it_is_stopped_is_said(tmp_path, monkeypatch, capsys):
    def stopped(command):
        with (tmp_path / "rows").open("w") as file:
            op_right.write(file, op_right.Judged(0, "a call", True, "flash_mma", 0.2, ""))
            op_right.write(file, op_right.Judged(1, "the next", False, "", 0.0, op_right.ENDED))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", stopped)
    monkeypatch.setattr(op_right.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["op_right.py", "--json", str(tmp_path / "rows")])
    assert op_right.main() == op_right.STOPPED
    assert "1 calls in 0 s, 0 wrong; by kernels: 1" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2 * len(ALL)), ids=face_of)
@pytest.mark.sampled(3)
def test_what_pytorch_answers_to_other_faces_is_right(number):
    with current.use(Runtime(None, current.best_known, cubin_cache())), torch.no_grad():
        row = judged_face(91, number, "cpu", lambda: 0)
    assert not row.wrong and not row.kernel and face_of(number) in row.call


def judged_as(ask, **words):
    """The verdict on a question to which 1 is right."""
    asked = Asked("one", ask, lambda dtype: [torch.ones(9, dtype=dtype)], [torch.zeros(3)], **words)
    return judged_face(1, 0, "cpu", lambda: 0, {"only": lambda draw: asked}).wrong


def test_wrong_answers_of_other_faces_are_found():
    counted = iter(range(99))
    assert judged_as(lambda: [torch.ones(9)]) == ""
    assert "times the error" in judged_as(lambda: [torch.full((9,), 1.1)])
    assert "outputs are NaN" in judged_as(lambda: [torch.full((9,), float("nan"))])
    assert judged_as(lambda: [torch.ones(9) + 1e-8]) == "" == judged_as(lambda: [torch.ones(9).half()])
    assert judged_as(lambda: [torch.ones(9) + 1e-7 * next(counted)]) == "two runs differ"
    assert judged_as(lambda: [torch.ones(9) + 1e-7 * next(counted)], same_bits=False, part=1e-4) == ""
    assert judged_as(lambda: [torch.ones(9) + 1e-6], exactly=True) == "the numbers are others"
    assert judged_as(lambda: [torch.ones(9), torch.ones(1)]).startswith("ValueError")
    given = torch.zeros(3)
    changing = Asked("one", lambda: [given.add_(1)], lambda dtype: [torch.ones(3, dtype=dtype)], [given])
    assert "inputs [0] were changed" in judged_face(1, 0, "cpu", lambda: 0, {"only": lambda draw: changing}).wrong


@pytest.mark.slow
def test_kernels_of_other_faces_are_compiled_ahead(tmp_path):
    names = []

    def build(family, *asked):
        names.append(family.name)
        return no_code(family, *asked)

    words = argparse.Namespace(count=2, seed=6, faces=[])
    asking = op_right.of_faces(words, "cpu", int)
    assert asking.ahead(GPUS["h100"], tmp_path, True, 1, build=build) == 1 and asking.items == [0, 1]
    assert names == ["flash_wgmma", "backward_wgmma"] and face_of(1) == "packed-gradients"


def test_the_usual_scale_is_given_beside_soft_caps():
    """A launch may exchange the one for the other."""
    words = [variants(Draw.of(3, number, "cpu"), (1, 2, 3, 4), 64)[0] for number in range(200)]
    assert {5.0, 30.0} == {one["softcap"] for one in words if "softcap" in one and one.get("scale") == 0.125}
