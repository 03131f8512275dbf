"""What a search on a device says where torch's import is slow; its workers are fakes."""

from io import StringIO

import pytest
from rich.console import Console

from evoattn.cli.run import run_search
from evoattn.model.gpu import DetectedDevice
from evoattn.search.machines import Machines
from evoattn.search.request import SearchWords, plan, read_words
from evoattn.search.setup import begin_study
from tests.search.studies_of_fakes import fakes

DEVICE = DetectedDevice(0, "NVIDIA H100 80GB HBM3", (9, 0), "13.0")


@pytest.mark.slow
@pytest.mark.parametrize("sentence, notes", [("its bytecode is not kept.", 1), ("", 0)])
def test_the_sentence_is_a_note_before_the_search(tmp_path, sentence, notes):
    words = SearchWords(
        budget="1trials",
        problem="seed_h100",
        families=("flash_mma",),
        sampler="random",
        db=str(tmp_path / "db"),
        jobs=1,
    )
    request, console = read_words(words), Console(file=StringIO(), width=200)
    prepared = begin_study(request, plan(words, request.problem, [DEVICE]))
    asked = []

    def why_slow(spec):
        asked.append(spec.name)
        return sentence

    run_search(prepared, Machines([DEVICE]), console, fakes(), why_slow=why_slow)
    assert asked == ["torch"]
    assert console.file.getvalue().count("Note: its bytecode is not kept.") == notes
