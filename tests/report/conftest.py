"""Databases for the tests of the report."""

import pytest

from evoattn.model.records import TrialState
from evoattn.storage import Storage
from tests.report.report_studies import EVIL, add, make_study, timed_study, timing


@pytest.fixture
def measured(storage):
    """60 right candidates of two parameters, of which only A matters; the best two in a final beside SDPA's flash."""
    study = make_study(storage)
    for n in range(60):
        us = 40.0 - 5 * (n % 4) + n % 3 * 0.1 - n / 1000
        genes = {"A": n % 4, "B": n // 4 % 2}
        add(
            storage,
            study,
            TrialState.COMPLETE,
            us=[("screen", us)],
            cost=us * 10,
            parents=[n] if n else [],
            operator="mutation",
            **genes,
        )
    best = [t.number for t in storage.leaderboard(study, 2)]
    for number in best:
        storage.add_timing(number, timing(20.0 if number == best[0] else 21.0, "final"))
    storage.add_peer(study, "flash", timing(99.0, "screen"))
    storage.add_peer(study, "flash", timing(30.0, "final"))
    storage.add_peer(study, "math", timing(200.0, "screen"))
    storage.add_peer(study, "cudnn", None, "Refused: no.")
    for n in range(3):
        add(storage, study, TrialState.INVALID_CONFIG, reason=f"{n + 100} threads are too many.", A=n)
    add(storage, study, TrialState.COMPILE_ERROR, reason=EVIL, A=9)
    return storage, study


@pytest.fixture(scope="session")
def timed(tmp_path_factory):
    """`timed_study`, which no test changes."""
    opened = Storage.open(str(tmp_path_factory.mktemp("timed") / "db.sqlite"))
    yield opened, timed_study(opened)
    opened.close()
