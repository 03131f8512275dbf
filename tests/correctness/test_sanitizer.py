"""What compute-sanitizer says, in words; and a clear sentence where it is not installed."""

import pytest

from evoattn.correctness import sanitizer
from evoattn.families.built import BuiltKernel
from evoattn.families.flash_scalar.family import FlashScalar
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, CompileInfo
from evoattn.model.space import KernelConfig

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
