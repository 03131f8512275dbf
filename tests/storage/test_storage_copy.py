"""A database moved to another one: whole, once, and numbered on from where it was."""

import math

import pytest
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from typer.testing import CliRunner

from evoattn.cli.main import app
from evoattn.model.records import KernelCounters, Profile, Timing, TrialState
from evoattn.storage import Storage, StorageError
from evoattn.storage.copying import copy_database, count_rows
from tests.storage.storage_records import make_study, record, timing

pytestmark = pytest.mark.slow


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def target(request, tmp_path):
    """A second empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'copy.sqlite'}"
    server = request.getfixturevalue("server")
    server.databases = getattr(server, "databases", 0) + 1
    return server.create(f"test{server.databases}")


def fill(storage):
    """Two studies with everything that a database may hold."""
    first, second = make_study(storage), make_study(storage, "second", offline=True)
    storage.use_environment({"host": "a"})
    for index in range(5):
        trial = record(storage, first, index, timings=(timing("screen", 1.0 + index), timing("repeat", 2.0)))
    record(storage, second, 9, TrialState.ESTIMATED, relative_cost=3.5)
    record(storage, second, 10, TrialState.WRONG_RESULT, reason="Über 0.1 µs.")
    storage.add_timing(trial.number, timing("final", 1.5))
    storage.add_peer(first, "cudnn", timing("final", 4.0))
    storage.add_peer(first, "fa3", None, "It is not installed.")
    counters = (KernelCounters("flash_mma", 12.5, {"occupancy, %": 12.0}),)
    storage.add_profile(first, Profile("", "ncu 1", "warm", counters), trial.number)
    return first, second


def contents(storage):
    """All that can be read of a database."""
    studies = storage.studies()
    trials = [list(storage.iter_trials(study, evidence=True)) for study in studies]
    sources = [storage.source(trial.source_hash) for each in trials for trial in each if trial.source_hash]
    places = [storage.environments(trial) for each in trials for trial in each]
    peers = [(storage.peers(study), storage.refusals(study)) for study in studies]
    return studies, trials, sources, places, peers, [storage.profile(t.number) for each in trials for t in each]


def test_all_of_it_arrives_and_new_trials_are_numbered_on(either, url, target):
    fill(either)
    said = CliRunner().invoke(app, ["db", "copy", url, target])
    assert said.exit_code == 0 and "studies 2" in said.output and "trials 7" in said.output, said.output
    copy = Storage.open(target, create=False)
    assert contents(copy) == contents(either)
    study = copy.find_study("first")
    last = max(trial.number for trial in copy.iter_trials(study))
    newest = max(t.number for s in copy.studies() for t in copy.iter_trials(s))
    assert record(copy, study, 77, timings=(timing("screen", 0.5),)).number > max(last, newest)
    assert make_study(copy, "third").id > study.id
    copy.close()


def test_a_target_that_holds_anything_is_refused_untouched(either, url, target):
    fill(either)
    there = Storage.open(target)
    make_study(there, "mine")
    said = CliRunner().invoke(app, ["db", "copy", url, target])
    assert said.exit_code == 1 and "is not empty (1 in its table of studies); copy to a new one" in said.output
    assert [study.name for study in there.studies()] == ["mine"]
    there.close()


def test_large_tables_go_in_pages(either, target):
    fill(either)
    there = Storage.open(target)
    assert copy_database(either, there, at_a_time=2)["trials"] == 7
    assert contents(there) == contents(either)
    there.close()


def test_nothing_is_kept_where_rows_go_missing(either, target):
    def miscount(connection, table):
        rows = count_rows(connection, table)
        return rows + (table.name == "baselines" and rows > 0)

    fill(either)
    there = Storage.open(target)
    with pytest.raises(StorageError, match="2 rows of baselines were read and 3 written; nothing was kept"):
        copy_database(either, there, count=miscount)
    assert there.studies() == []
    there.close()


def test_an_infinite_time_arrives(either, target):
    study = make_study(either)
    trial = record(either, study, 1, timings=(timing("screen", 1.0),))
    either.add_timing(trial.number, Timing.out("It hangs.", disqualified=True))
    there = Storage.open(target)
    copy_database(either, there)
    assert there.trial(trial.number).timings[-1].median_us == math.inf and there.trial(trial.number).disqualified
    assert there.leaderboard(study, 5) == []
    there.close()


def test_a_damaged_source_is_not_taken_for_the_target(tmp_path, target):
    path = tmp_path / "damaged.sqlite"
    storage = Storage.open(str(path))
    study = make_study(storage)
    for index in range(60):
        record(storage, study, index, timings=(timing("screen", 1.0 + index),))
    storage.close()
    data = bytearray(path.read_bytes())
    for page in range(12 * 4096, len(data) - 4096, 4096):  # behind the pages of the tables' own description
        data[page : page + 4096] = bytes(4096)
    path.write_bytes(data)
    said = CliRunner().invoke(app, ["db", "copy", str(path), target])
    assert said.exit_code == 1 and "damaged" in said.output
    assert str(path) in said.output and target not in said.output


class ShutDown(Exception):
    sqlstate = "57P01"


@pytest.mark.parametrize("statement", ["FROM trials", "INSERT INTO trials"])
def test_a_server_that_goes_away_is_waited_for_whichever_it_is(either, target, statement):
    fill(either)
    there = Storage.open(target)
    cut = []

    def goes_away(connection, cursor, text, parameters, context, many):
        if statement in " ".join(text.split()) and not cut:
            cut.append(text)
            raise DBAPIError(text, None, ShutDown())

    server = either if statement.startswith("FROM") else there
    event.listen(server._engine, "before_cursor_execute", goes_away)
    assert copy_database(either, there, at_a_time=2)["trials"] == 7 and cut
    assert contents(there) == contents(either)
    there.close()


def test_a_missing_source_is_a_sentence(tmp_path, target):
    said = CliRunner().invoke(app, ["db", "copy", str(tmp_path / "none.sqlite"), target])
    assert said.exit_code == 1 and "There is no database at" in said.output


def test_a_source_that_is_text_is_a_sentence_about_the_source_database(storage, tmp_path):
    fill(storage)
    with storage._engine.begin() as connection:
        connection.exec_driver_sql("UPDATE sources SET zlib = 'text'")
    target = tmp_path / "target.sqlite"
    said = CliRunner().invoke(app, ["db", "copy", storage.place, str(target)])
    assert said.exit_code == 1 and "Traceback" not in said.output
    assert f"The database {storage.place} holds a value of another kind" in " ".join(said.output.split())
