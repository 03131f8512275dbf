"""`tests/checks/sanitize.py` without a device: which kernels it takes. What compute-sanitizer says, in words; and a
clear sentence where it is not installed."""

import json

import pytest

from evoattn.correctness import sanitizer
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.families.flash_scalar.family import FlashScalar
from evoattn.families.registry import load_space
from evoattn.model import shape_text as problems
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, CompileInfo
from evoattn.model.space import ConfigError, KernelConfig
from evoattn.search.starting import starting_configs
from tests.checks import sanitize

H100, PROBLEM = GPUS["h100"], problems.lookup("seed_l4_s512")


def test_starting_configs_of_every_family_that_takes_the_problem():
    configs = sanitize.chosen(PROBLEM, H100, None, 1, list(registry.FAMILIES))
    takers = [name for name, family in registry.FAMILIES.items() if family.why_unsupported(PROBLEM, H100) is None]
    assert [config.family for config in configs] == takers


def test_the_file_comes_first_and_no_config_twice(tmp_path):
    space = load_space("flash_mma", H100)
    valid = [config.params for config in starting_configs(space, PROBLEM, H100)]
    row = {"problem": PROBLEM.to_dict(), "arch": H100.arch, "median_us": 1.0, "family": "flash_mma"}
    file = tmp_path / "configs.jsonl"
    file.write_text("".join(json.dumps(row | {"config": params}) + "\n" for params in (valid[2], valid[2], valid[0])))
    chosen = [config.params for config in sanitize.chosen(PROBLEM, H100, file, 2, ["flash_mma"])]
    assert chosen == [valid[2], valid[0], valid[1]]  # two lines of the file are one config
    alone = sanitize.chosen(PROBLEM, H100, file, 2, list(registry.FAMILIES), alone=True)
    assert [config.params for config in alone] == [valid[2]]


def test_a_file_of_something_else_is_refused(tmp_path):
    file = tmp_path / "configs.jsonl"
    file.write_text("nothing")
    with pytest.raises(ConfigError, match="Line 1"):
        sanitize.chosen(PROBLEM, H100, file, 1, ["flash_mma"])


MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at flash_scalar+0x5a0
=========     Address 0x7f2 is out of bounds
========= ERROR SUMMARY: 3 errors
"""


@pytest.mark.parametrize(
    "code, output, words, damning",
    [
        (0, "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", sanitizer.CLEAN, False),
        (sanitizer.FOUND, MEMCHECK, "found: Invalid __global__ read of size 16 bytes", True),
        (
            sanitizer.FOUND,
            "========= Barrier error detected. Divergent threads.\n",
            "found: Barrier error detected. Divergent threads.",
            True,
        ),
        (1, "Traceback\nImportError: no cupy\n", "no verdict, exit code 1: ImportError: no cupy", False),
        (255, "", "no verdict, exit code 255: no output", False),
    ],
)
def test_verdicts(code, output, words, damning):
    verdict = sanitizer.verdict(code, output)
    plain, hopper = (CompiledKernel(b"", ptx, CompileInfo()) for ptx in ("bar.sync 0;", "mbarrier.init.shared.b64"))
    assert verdict == words and sanitizer.is_damning({"memcheck": verdict}, hopper) == damning
    assert sanitizer.is_damning({"racecheck": verdict}, plain) == damning and not sanitizer.is_damning(
        {"racecheck": verdict}, hopper
    )
    assert sanitizer.is_damning({"synccheck": verdict}, hopper) == damning


def test_where_it_is_not_installed_one_sentence_says_so():
    config, compiled = KernelConfig("flash_scalar", {}), CompiledKernel(b"", "", CompileInfo())
    kernel = BuiltKernel(FlashScalar(), config, GPUS["h100"], compiled)
    said = sanitizer.sanitize(AttentionProblem(1, 1, 1, 8, 8, 16), kernel, find=lambda: None)
    assert said == dict.fromkeys(sanitizer.TOOLS, sanitizer.NOT_INSTALLED)
