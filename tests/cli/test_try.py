"""`evoattn try`: why a config cannot be, what was filled in, what each step found, and which element is wrong first."""

import math
import multiprocessing

import pytest
import torch

from evoattn.backends.compiler import compile_source
from evoattn.correctness.arena import UNWRITTEN, bits
from evoattn.correctness.interpreter_cases import interpreter_cases
from evoattn.correctness.judge import first_wrong
from evoattn.correctness.reference import Exact
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.records import Candidate
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import ConfigError
from evoattn.search.attempt import attempt, check_on_interpreter, fill_in
from evoattn.search.starting import starting_configs
from tests.cli.attempt_fakes import Dies, Right, Wrong
from tests.cli.terminal import SHAPE, refused, run

GPU, FAMILY, PROBLEM = GPUS["l4"], FAMILIES["flash_mma"], parse_shape(SHAPE)
WORDS = ("try", "flash_mma", "--gpu", "l4", "--shape", SHAPE)


@pytest.mark.slow
def test_a_right_config_says_all_that_was_found():
    result = run(*WORDS, "BLOCK_M=64")
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    said = " ".join(result.stdout.split())
    assert said.startswith("flash_mma for B=1 H=2 S=96 D=32 fp16 full on the L4 given: BLOCK_M=64 filled in from the ")
    assert "registers per thread, 0 bytes of spill stores" in said and "fit on an SM of the L4, limited by" in said
    cases = interpreter_cases(PROBLEM, fill_in(FAMILY, ["BLOCK_M=64"], PROBLEM, GPU).config)
    assert said.count("interpreter ok Right: ") == len(cases) > 3 and "Relative cost" in said and "µs" not in said


def test_a_config_that_cannot_be_says_why():
    result = run(*WORDS, "BLOCK_M=16", "WARPS=4")
    assert result.exit_code == 1 and "config FAILED BLOCK_M=16 rows do not divide" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    "words, expected",
    [
        (("BLOCK_M=17",), "BLOCK_M=17 is not one of 16, 32"),
        (("BLOCK_Q=16",), "no parameter BLOCK_Q; it has BLOCK_M, BLOCK_N"),
        (("BLOCK_M=16,32",), "give one, not 16, 32"),
        (("BLOCK_M",), "NAME=VALUE"),
        (("--shape", SHAPE + ",dtype=fp32"), "fp32"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_possible(words, expected):
    refused(run(*WORDS, *words), 2, expected)


def test_what_is_left_out_comes_from_the_nearest_starting_config_or_is_changed_to_fit():
    starts = starting_configs(load_space("flash_mma", GPU), PROBLEM, GPU)
    assert any(not FAMILY.why_invalid(PROBLEM, start, GPU) for start in starts)
    for start in starts:
        words = [f"{name}={start[name]}" for name in ("BLOCK_M", "BLOCK_N", "WARPS", "KEY_WARPS", "STAGES", "RESCALE")]
        if not FAMILY.why_invalid(PROBLEM, start, GPU):
            filled = fill_in(FAMILY, words, PROBLEM, GPU)
            assert not filled.why_invalid and {n: filled.config[n] for n in filled.given} == filled.given
            assert filled.config in starts and filled.source == "the nearest starting config"
    changed = fill_in(FAMILY, ["BLOCK_M=16"], PROBLEM, GPU)
    assert changed.config["BLOCK_M"] == 16 and not changed.why_invalid and "BLOCK_M" not in changed.added
    whole = fill_in(FAMILY, [f"{n}={str(v).lower()}" for n, v in starts[0].params.items()], PROBLEM, GPU)
    assert whole.config == starts[0] and not whole.added and not whole.source
    with pytest.raises(ConfigError):
        fill_in(FAMILY, ["BLOCK_M=0"], PROBLEM, GPU)


@pytest.mark.slow
def test_a_wrong_kernel_says_its_first_wrong_element():
    """The kernel multiplies the scores by twice the softmax scale."""
    filled = fill_in(FAMILY, [], PROBLEM, GPU)
    source = render(FAMILY, PROBLEM, filled.config, GPU).source
    right, wrong = "softmax_scale_log2,", "softmax_scale_log2 * 2.0f,"
    assert right in source
    changed = Candidate(FAMILY.name, filled.config.params, filled.config.id, source.replace(right, wrong), GPU.arch)
    kernel = BuiltKernel(FAMILY, filled.config, GPU, compile_source(changed.source, GPU.arch))
    steps = list(check_on_interpreter(kernel, changed, PROBLEM))
    assert [step.agrees for step in steps] == [False, None]
    assert steps[0].sentence.startswith("WRONG: ragged") and steps[1].what == "first wrong"
    assert "o[0, 0, 0, " in steps[1].sentence and "; right is " in steps[1].sentence


def test_the_first_wrong_element_is_the_first_in_order_of_its_indices():
    exact = torch.arange(24, dtype=torch.float64).reshape(1, 2, 3, 4)
    answer = {"o": Exact(exact, 0.1, 0.1), "lse": Exact(torch.zeros(1, 2, 3), 0.01, logarithms=True)}
    lse = torch.zeros(1, 2, 3)

    def said(**changes) -> str:
        out = exact.float() + 0.05
        for index, value in changes.pop("o", {}).items():
            out[index] = value
        return first_wrong({"o": out, "lse": changes.pop("lse", lse)}, answer)

    assert said() == ""
    text = said(o={(0, 1, 0, 2): 7.0, (0, 0, 2, 3): math.nan})
    assert text.startswith(
        "The first wrong element, o[0, 0, 2, 3] (batch 0, head 0, query 2, dim 3), is nan; right is 11"
    )
    assert text.endswith("2 of 24 elements are wrong.")
    assert "is 7; right is 14 ± 0.1. 1 of 24" in said(o={(0, 1, 0, 2): 7.0})
    out = exact.float()
    bits(out)[0, 0, 0, 1] = UNWRITTEN
    assert "o[0, 0, 0, 1] (batch 0, head 0, query 0, dim 1), was never written" in first_wrong(
        {"o": out, "lse": lse}, answer
    )
    assert "lse[0, 1, 0] (batch 0, head 1, query 0), is 5" in said(
        lse=lse.index_put((*map(torch.tensor, (0, 1, 0)),), torch.tensor(5.0))
    )


@pytest.mark.parametrize(
    "device, expected",
    [
        (Right, [("device", True, "Right in all 3 cases; 12.50 µs (10-90 %: 12.00 to 13.00)")]),
        (Wrong, [("device", False, "WRONG_RESULT: two runs differ."), ("first wrong", None, "o[0, 0, 0, 0]")]),
        (Dies, [("device", False, "WORKER_DIED: On the device worker: ")]),
    ],
)
@pytest.mark.slow
def test_where_a_device_is_the_kernel_runs_on_it_too(device, expected):
    filled = fill_in(FAMILY, [], PROBLEM, GPU)
    running = set(multiprocessing.active_children())
    first, *steps = attempt(FAMILY, filled, PROBLEM, GPU, device=True, make_device=device)
    assert (first.what, first.agrees) == ("config", True) and set(multiprocessing.active_children()) <= running
    steps = steps[-len(expected) :]
    assert [(step.what, step.agrees) for step in steps] == [entry[:2] for entry in expected]
    assert all(text in step.sentence for step, (_, _, text) in zip(steps, expected, strict=True))
