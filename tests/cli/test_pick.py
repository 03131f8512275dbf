"""`evoattn pick` prints the kernel that would run, what it is expected to lose, and why nothing would run."""

from dataclasses import replace

import pytest

from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.portfolio.pick import pick, portfolio_kernels
from evoattn.portfolio.wins import Win, Wins
from evoattn.search.spaces import choose_spaces
from evoattn.search.starting import MOST, begin
from tests.cli.terminal import refused, run

SHAPE = "B=1,H=32,Hkv=8,S=4096,D=128,dtype=bf16,mask=causal"


def test_a_pick_names_its_kernel_and_its_expected_loss(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    said = run("pick", "--gpu", "h100", "--shape", SHAPE)
    assert said.exit_code == 0
    assert "flash_wgmma" in said.output and "BLOCK_M=" in said.output
    assert "longer than the best known" in " ".join(said.output.split())


def test_a_users_own_search_comes_first(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    gpu, problem = GPUS["h100"], parse_shape(SHAPE)
    config = choose_spaces(["flash_mma"], (), True, problem, gpu)["flash_mma"].starting_configs()[0]
    Wins().add([Win("h100", gpu.sm_count, problem, "flash_mma", config.params, 10.0, 20.0)])
    said = run("pick", "--gpu", "h100", "--shape", SHAPE)
    assert "flash_mma" in said.output and "your search measured 10.00 µs" in " ".join(said.output.split())


@pytest.mark.slow
def test_the_pick_of_a_shape_is_that_of_its_calls(monkeypatch, tmp_path):
    """Which say no mask for a last query, no window that hides nothing, and not how many keys are in use."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    one = "B=4,H=32,Hkv=8,Sq=1,Sk=2048,D=128,dtype=bf16"
    for said, called in (
        ("mask=causal_lower_right", "mask=full"),
        ("mask=causal_lower_right,window=4095:0", "mask=full"),
        ("mask=full,window=127:127", "mask=full,window=127:0"),
        ("mask=full,seqused=17:80", "mask=full,seqused=0:2048"),
    ):
        found = [run("pick", "--gpu", "h100", "--shape", f"{one},{words}").output for words in (said, called)]
        assert found[0].splitlines()[1:] == found[1].splitlines()[1:], said


@pytest.mark.slow
def test_what_was_never_measured_is_said():
    words = " ".join(run("pick", "--gpu", "h100", "--shape", SHAPE.replace("128", "112")).output.split())
    assert "Estimated" in words and "no problem of its kind, '16 d112', was timed" in words
    words = " ".join(run("pick", "--gpu", "l4", "--problem", "seed_h100").output.split())
    assert "Estimated" in words and "nothing was timed on l4" in words
    said = run("pick", "--gpu", "h100", "--shape", "B=4,H=32,Sq=16,Sk=1000,D=512,dtype=fp32,mask=full")
    assert said.exit_code == 0 and "PyTorch's own attention would run" in " ".join(said.output.split())


def test_one_of_shape_and_problem_is_asked_for():
    refused(run("pick", "--gpu", "h100"), 2, "Give --shape or --problem")


def test_a_search_begins_at_the_portfolio():
    gpu, problem = GPUS["h100"], parse_shape(SHAPE)
    spaces = choose_spaces((), (), True, problem, gpu)
    first = next(iter(spaces.values()))
    assert first.family == pick(problem, gpu).family
    assert first.starting_configs()[0] == pick(problem, gpu).config
    bare = {name: replace(load_space(name, gpu), starting=()) for name in spaces}
    begun = [c for space in begin(bare, problem, gpu).values() for c in space.starting_configs()]
    assert 1 <= len(begun) <= MOST
    assert not [c for space in choose_spaces((), (), False, problem, gpu).values() for c in space.starting]


def test_a_problem_of_no_class_begins_at_the_nearest_one():
    gpu, problem = GPUS["h100"], parse_shape(SHAPE.replace("D=128", "D=112"))
    space = choose_spaces(["flash_wgmma"], (), True, problem, gpu)["flash_wgmma"]
    assert space.starting_configs()[0] in portfolio_kernels(problem, gpu)


def test_a_search_of_a_part_of_the_space_begins_in_it():
    gpu, problem = GPUS["l4"], parse_shape(SHAPE)
    space = choose_spaces(["flash_mma"], ("BLOCK_M=32,64",), True, problem, gpu)["flash_mma"]
    assert space.starting and {params["BLOCK_M"] for params in space.starting} <= {32, 64}
