"""What a database says of the same records stays, until a change wants it otherwise: two timed studies and an offline
one, with finals, peers, failures, damage and another machine."""

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
from sqlalchemy import text

from evoattn.model.errors import WrongUse
from evoattn.model.gpu import GPUS
from evoattn.model.records import KernelCounters, Profile, Timing, TrialState
from evoattn.storage import Storage, copying, course, database, storage, studies, trials, versions
from evoattn.storage.course import Courses
from evoattn.storage.engine import parse_url, place
from evoattn.storage.errors import StorageError
from evoattn.storage.storage import best_trial, chosen_trial, is_alike
from tests.storage.storage_records import PROBLEM, make_study, record, timing
from tests.support.facts import changed

HERE, THERE = {"host": "one", "torch": "2.13"}, {"host": "two", "torch": "2.11", "driver": "CUDA 13.0"}
ENDS = (TrialState.COMPLETE, TrialState.COMPLETE, TrialState.TIMEOUT, TrialState.WRONG_RESULT, TrialState.PRUNED)


def said(call: Any, *arguments: Any) -> Any:
    """What a call gives, or what its refusal says."""
    try:
        return call(*arguments)
    except (StorageError, WrongUse) as error:
        return f"{type(error).__name__}: {error}"


def _filled(kept: Storage) -> list[Any]:
    first, offline, other = make_study(kept), make_study(kept, "offline", True), make_study(kept, "other")
    kept.use_environment(HERE)
    for n in range(26):
        state = ENDS[n % len(ENDS)]
        times = (timing("screen", 30.0 - n, 31.0, 29.5), timing("repeat", 28.0 + n % 7)) if n % 10 < 2 else ()
        record(kept, first, n, state, times, f"It failed\x1b in way {n % 3}." if not times else "", 40.0 - n)
        record(kept, offline, n, TrialState.ESTIMATED, (), "", 50.0 + (n * 7) % 11 if n else None)
    kept.use_environment(THERE)
    for number, us, run in ((1, 20.0, "a"), (21, 19.0, "a"), (3, 18.0, "b"), (1, 21.0, "b")):
        kept.add_timing(number, replace(timing("final", us, us + 1), protocol={"stage": "final", "run": run}))
    out = {"stage": "final", "run": "b", "disqualified": "In the final: wrong."}
    kept.add_timing(21, Timing((17.0,), out))
    record(kept, other, 99, TrialState.COMPLETE, (timing("screen", 12.0),))
    for name, us, refusal in (
        ("flash", 22.0, ""),
        ("flash", 23.0, ""),
        ("math", None, "No."),
        ("math", None, "Never."),
    ):
        kept.add_peer(first, name, us and timing("final", us), refusal)
    for number, peer, us in ((1, "", 3.0), (1, "", 4.0), (None, "flash", 5.0), (None, "cudnn", 6.0)):
        counters = KernelCounters("kernel", us, {"dram": 0.5})
        kept.add_profile(first, Profile(peer, "ncu 2026", "warm", (counters,), ""), number)
    return [first, offline, other]


def _of_study(kept: Storage, study: Any) -> Iterator[Any]:
    yield [said(kept.leaderboard, study, *words) for words in ((1,), (5,), (30, False), (4, True, "crossover"))]
    yield kept.leaderboard(study, 3, operator="mutation"), kept.counts(study), kept.count_finals(study)
    yield [kept.failures(study), kept.failures(study, 2), kept.numbers(study, 9), kept.numbers(study, 40)]
    yield [kept.peers(study), kept.refusals(study), kept.peer_profiles(study), kept.course(study)]
    for words in ({}, {"evidence": True}, {"after": 20}, {"among": [5, 3, 1, 400]}, {"after": 4, "among": [3, 5]}):
        yield [(t.number, t.timings, t.validation, t.compile_info) for t in kept.iter_trials(study, **words)]


def _of_all(kept: Storage, made: list[Any]) -> Iterator[tuple[str, Any]]:
    for study in made:
        yield study.name, [study, *_of_study(kept, study)]
    yield "studies", [kept.studies(), kept.study_names(), kept.latest_study(), kept.free_name("first")]
    yield "names", [kept.free_name("new"), said(kept.study, 2), said(kept.study, 9), kept.find_study("\0")]
    asked = ("offline", None, "nobody", "x" * 3)
    yield "chosen", [said(kept.chosen_study, name) for name in asked]
    numbers = ("1", "2", "777", "best", "0x1", "1" * 13)
    yield "trials", [said(chosen_trial, kept, *w) for w in itertools.product(numbers, (None, "first", "offline"))]
    small, l4, h100 = PROBLEM.with_(batch=2), GPUS["l4"], GPUS["h100"]
    of_problem = [(PROBLEM, None), (PROBLEM, l4), (PROBLEM, h100), (small, None), (None, l4)]
    yield "of problems", [said(chosen_trial, kept, word, None, *w) for word in ("best", "1") for w in of_problem]
    yield "best", [said(best_trial, kept, *words) for words in of_problem[:4]]
    yield "alike", [is_alike(made[0], *w, off) for w in of_problem[:4] for off in (None, True, False)]
    yield "where", [kept.environments(kept.trial(number)) for number in (1, 2, 3, 53)]
    yield "sources", [kept.source(kept.trial(1).source_hash), said(kept.source, "0" * 64)]
    yield "counters", [kept.profile(1), kept.profile(2)]


def _refused(folder: Path) -> Iterator[Any]:
    (folder / "text").write_text("no database")
    (folder / "empty").write_bytes(b"")
    for name in ("nothing", "text", "empty", ".", "a/b"):
        for create in (False, True):
            found = said(Storage.open, str(folder / name), create)
            yield found if isinstance(found, str) else found.study_names()
    yield [said(lambda url=url: place(parse_url(url))) for url in ("sqlite:///x.db", "sqlite://", "odd://x")]


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    turns = itertools.count()
    clock = mock.Mock(side_effect=lambda: f"2026-11-27T09:{next(turns) % 60:02}:00.000+00:00")
    with TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with contextlib.ExitStack() as patches:
            for module in (database, storage, studies, trials):
                patches.enter_context(mock.patch.object(module, "now", clock))
            kept = Storage.open(f"{folder}/db.sqlite")
            made = _filled(kept)
        with mock.patch.multiple(trials, PAGE=7), mock.patch.multiple(course, AT_A_TIME=7):
            found = [*_of_all(kept, made)]
            twin = Storage.open(f"{folder}/twin.sqlite")
            found.append(("copied", [copying.copy_database(kept, twin, 5), said(copying.copy_database, kept, twin)]))
            found.append(("copy", [twin.leaderboard(made[0], 3), twin.numbers(made[1], 4)]))
            with kept._engine.begin() as connection:
                connection.execute(text("UPDATE trials SET state = 'ODD' WHERE number = 9"))
                connection.execute(text("UPDATE studies SET arch = 'odd' WHERE id = 3"))
                connection.execute(text("UPDATE trials SET config = '{' WHERE study_id = 2"))
            whole = [t.number for t in kept.iter_trials(made[0], whole_only=True)]
            found.append(("damaged", [whole, kept.studies(), said(kept.counts, made[0]), said(kept.trial, 9)]))
            found.append(("no JSON", said(Courses.course, kept, made[1])))
            found.append(("damage", [said(lambda: [*kept.iter_trials(made[0])]), said(Courses.course, kept, made[0])]))
        found.append(("refused", [*_refused(Path(folder))]))
        found.append(("warnings", [(one.category, str(one.message)) for one in warned]))
        kept.close(), twin.close()
        for name, value in found:
            yield name, _without(value, folder)
    yield "writing", [kept._patience._writing().get_execution_options(), [*versions.collect(None)]]
    yield (
        "differences",
        [versions.differences(HERE, THERE), versions.differences(THERE, HERE), versions.differences(HERE, HERE)],
    )


def _without(value: Any, folder: str) -> Any:
    """Without the folder of this run in any text."""
    if isinstance(value, str):
        return value.replace(folder, "FOLDER")
    return [_without(each, folder) for each in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.slow
def test_what_a_database_says_stays():
    assert not changed("records")


def test_a_folder_is_made_whole_and_may_be_there(tmp_path):
    for _ in range(2):
        database._make(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    assert "cannot be made" in said(database._make, tmp_path / "file" / "c")
