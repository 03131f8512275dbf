"""All kernels that cheat, on the interpreter, through compile pool, evaluation and storage; on a device
`tests/cheats` runs the same."""

import pytest

from evoattn.model import gpu
from evoattn.model.records import TrialState
from evoattn.storage import Storage
from tests.cheats.faults import CHEATS, HONEST
from tests.cheats.pipeline import run_cheats

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def caught(tmp_path_factory):
    storage = Storage.open(str(tmp_path_factory.mktemp("cheats") / "db.sqlite"))
    return run_cheats(storage, gpu.GPUS["h100"], offline=True, jobs=2)[1]


def test_every_cheat_is_caught_and_named(caught):
    assert len(caught) == len(CHEATS) + 2 and len(CHEATS) >= 18
    assert not [(c.cheat.name, c.trial.state, c.sentence) for c in caught if not c.as_expected]


def test_only_the_honest_lead(caught):
    assert [c.cheat for c in caught if c.on_leaderboard] == [HONEST, HONEST]


def test_none_that_the_interpreter_cannot_read_is_called_right(caught):
    for c in caught:
        if c.trial.state is TrialState.COMPILE_ERROR:
            assert c.sentence.startswith("Not interpreted")
