"""An operation that a test adds goes down the line without a word of it in evoattn."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evoattn.backends.compiler import compile_source
from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.cases import make_case
from evoattn.correctness.judge import first_wrong
from evoattn.correctness.reference import exact_attention, exact_lse
from evoattn.correctness.validate import check_small_cases, run_case
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import FAMILIES
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from tests.operation import merge_two

L4, FAMILY, CONFIG = GPUS["l4"], merge_two.MergeTwo(), KernelConfig("merge_two", {"BLOCK_M": 32})
PROBLEM = parse_shape("B=1 H=2 S=50 D=16 fp32 op=merge_two")


def built(edit=lambda source: source):
    source = edit(render(FAMILY, PROBLEM, CONFIG, L4).source)
    return BuiltKernel(FAMILY, CONFIG, L4, compile_source(source, L4.arch))


def test_the_text_of_a_problem_names_it():
    assert PROBLEM.describe() == "B=1 H=2 S=50 D=16 fp32 full op=merge_two"
    assert parse_shape(PROBLEM.describe()) == PROBLEM == AttentionProblem(**PROBLEM.to_dict())
    assert PROBLEM.short_name().endswith("_merge_two")
    assert "op" not in PROBLEM.with_(op="forward").to_dict()
    assert [tensor.name for tensor in PROBLEM.inputs] == ["o1", "lse1", "o2", "lse2"]
    assert PROBLEM.flops == 3 * 100 * 16 and PROBLEM.bytes == 100 * (12 * 17 + 1)
    with pytest.raises(ProblemError, match=r"op must be one of .*forward, .*backward"):
        PROBLEM.with_(op="sideways")


def test_no_family_of_another_operation_serves_it():
    assert all("not merge_two" in f.why_unsupported(PROBLEM, L4) for f in FAMILIES.values())
    assert FAMILY.why_unsupported(PROBLEM, L4) is None
    assert "computes merge_two, not forward" in FAMILY.why_unsupported(PROBLEM.with_(op="forward"), L4)


def test_its_reference_is_attention_over_all_keys():
    whole = AttentionProblem(1, 2, 2, 50, 60, 16, "fp32", lse=True)
    q, k, v = (torch.randn(whole.shape(name), generator=torch.Generator().manual_seed(3)) for name in "qkv")
    given = {}
    for number, keys in enumerate((slice(0, 23), slice(23, 60)), 1):
        part = whole.with_(seqlen_k=keys.stop - keys.start)
        given[f"o{number}"] = exact_attention(part, q, k[:, :, keys], v[:, :, keys], torch.float64)
        given[f"lse{number}"] = exact_lse(part, q, k[:, :, keys])
    answer = merge_two.make_answer(PROBLEM, given)
    torch.testing.assert_close(answer["o"].values, exact_attention(whole, q, k, v, torch.float64))
    torch.testing.assert_close(answer["lse"].values, exact_lse(whole, q, k))


def test_the_interpreter_finds_a_right_kernel_right():
    results = check_small_cases(InterpreterBackend(), built(), PROBLEM, 1)
    assert [(r.case, r.passed) for r in results] == [("ragged", True), ("parts without keys", True)], results


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new, case, sentence",
    [
        ("lse2[row] - most", "lse1[row] - most", "ragged", "largest error"),
        ("most + __logf(sum)", "most", "ragged", "largest error of a log-sum-exp"),
        ("lse2[row] > lse1[row]", "lse1[row] > lse2[row]", "ragged", "largest error"),
        ("if (row >= rows) return;", "", "ragged", "o"),
        ("const bool seen = most > -1e30f", "const bool seen = true", "parts without keys", "NaN"),
    ],
)
def test_the_interpreter_finds_a_wrong_kernel_wrong(old, new, case, sentence):
    def edit(source):
        assert old in source
        return source.replace(old, new)

    last = check_small_cases(InterpreterBackend(), built(edit), PROBLEM, 1)[-1]
    assert not last.passed and last.case == case and sentence in last.reason, last


def test_the_first_wrong_element_is_named():
    small = make_case("own", PROBLEM, 1, "cpu", double=True)
    kernel = built(lambda source: source.replace("most + __logf(sum)", "most"))
    _, outputs = run_case(InterpreterBackend(), kernel, replace(small, name="own"))
    assert "lse[0, 0, 0] (batch 0, head 0, query 0)" in first_wrong(outputs, small.answer)


ROOT, HOST = Path(__file__).parents[2], Path(__file__).parent / "host"
COMMANDS = """
import json, sys
import tests.operation.registered
from typer.testing import CliRunner
from evoattn.cli.main import app
print(json.dumps([CliRunner().invoke(app, words).output for words in json.loads(sys.argv[1])]))
"""
SHAPE = "B=1 H=2 S=50 D=16 fp32 op=merge_two"


@pytest.mark.slow
def test_an_operation_from_outside_goes_the_whole_line(tmp_path):
    exported, place = tmp_path / "merge.cu", ("--db", str(tmp_path / "merge.db"))
    words = ("--gpu", "l4", "--offline", "--budget", "3trials", "--jobs", "1", "--no-keep")
    commands = [("search", "--shape", SHAPE, *words), ("report",), ("show", "best"), ("reproduce", "best")]
    commands.append(("export", "best", "-o", str(exported)))
    given = json.dumps([(*words, *place) for words in commands])
    program = [sys.executable, "-c", COMMANDS, given]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    searched, report, shown, reproduced, _ = (" ".join(said.split()) for said in json.loads(done.stdout))
    assert "Best kernel: trial" in searched, searched
    assert "merge_two" in report and "physics alone orders its kernels" in report
    assert "Right on the interpreter" in shown and "parts without keys: error" in shown
    assert reproduced.endswith("reproduced")
    source = exported.read_text()
    for name, text in (("right", source), ("wrong", source.replace("most + __logf(sum)", "most"))):
        (tmp_path / f"{name}.cpp").write_text(text)
        build = ["g++", "-std=c++17", "-Wall", "-Werror", f"-isystem{HOST}", f"{name}.cpp", "-o", name]
        subprocess.run(build, cwd=tmp_path, check=True)
        said = subprocess.run([tmp_path / name], capture_output=True, text=True)
        assert (said.returncode == 0) == (name == "right") and said.stdout.rstrip().endswith(name.upper()), said.stdout
        assert said.stdout.count("ok   ") == (6 if name == "right" else 4), said.stdout
