"""Killed, locked, full, read-only: a sentence, and nothing lost that was acknowledged."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Barrier, Thread

import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.exc import DBAPIError

from evoattn.model.paths import ROOT
from evoattn.storage import Storage, StorageError, versions
from evoattn.storage import engine as database
from evoattn.storage.patience import Patience, say
from tests.storage.storage_records import make_study, record, timing

THREADS, ROUNDS = 4, 300
"""Without a lock of this process's own, two of them held the study in about one round of a hundred."""
RECORDER = """
import sys
from evoattn.storage import Storage
from tests.storage.storage_records import record, timing
storage = Storage.open(sys.argv[1])
study = storage.find_study("first")
with storage.lock_study(study):
    index = 0
    while True:
        trial = record(storage, study, index := index + 1, timings=(timing("screen", 1.0), timing("repeat", 2.0)))
        print(trial.number, flush=True)
"""


def start_recorder(path: Path) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", RECORDER, str(path)], env=environment, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_kill_9_loses_no_recorded_trial_and_leaves_none_half_written(path):
    storage = Storage.open(str(path))
    study = make_study(storage)
    storage.close()
    process = start_recorder(path)
    first = process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    acknowledged = [int(line) for line in [first, *process.stdout] if line.endswith("\n")]
    process.wait()
    with sqlite3.connect(path) as plain:
        assert plain.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert plain.execute("PRAGMA foreign_key_check").fetchall() == []
    storage = Storage.open(str(path))
    kept = list(storage.iter_trials(study))
    assert len(acknowledged) > 10 and [t.number for t in kept][: len(acknowledged)] == acknowledged
    assert len(kept) <= len(acknowledged) + 1 and all(len(t.timings) == 2 for t in kept)
    assert all(storage.source(t.source_hash) for t in kept[-3:])
    with storage.lock_study(study):  # the dead process holds it no more
        assert record(storage, study, 0).number > acknowledged[-1]
    storage.close()


@pytest.mark.slow
def test_one_search_a_study(storage, path):
    study, other = make_study(storage), make_study(storage, "other")
    process = start_recorder(path)
    try:
        process.stdout.readline()
        with (
            pytest.raises(StorageError, match=r"Another search is running on study 'first'; "),
            storage.lock_study(study),
        ):
            pass
        with storage.lock_study(other):  # two searches on one database are welcome
            with (
                pytest.raises(StorageError, match="Another search is running on study 'other'"),
                storage.lock_study(other),
            ):
                pass
            record(storage, other, 1)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_of_threads_that_begin_at_once_one_holds_the_study(storage):
    study, held, interval = make_study(storage), [], sys.getswitchinterval()

    def hold(begin: Barrier, end: Barrier) -> None:
        begin.wait()
        try:
            with storage.lock_study(study):
                held.append(study)
                end.wait()
        except StorageError:
            end.wait()

    sys.setswitchinterval(1e-6)
    try:
        for _ in range(ROUNDS):
            barriers = Barrier(THREADS), Barrier(THREADS)
            threads = [Thread(target=hold, args=barriers) for _ in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(held) == ROUNDS


class Impatient(Storage):
    busy_timeout_s = 0.05


def test_a_locked_database_is_a_sentence(storage, path):
    impatient = Impatient.open(str(path))
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match="is locked by another program; wait until that is done"):
        make_study(impatient)
    blocker.execute("ROLLBACK")
    make_study(impatient)
    blocker.close()
    impatient.close()


def test_a_full_disk_is_a_sentence_and_costs_only_the_trial_in_hand(storage, path):
    study = make_study(storage)
    kept = record(storage, study, 1, timings=(timing("screen", 1.0),))

    def limit(connection, _record):
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={pages + 2}")

    storage.close()
    full = Storage(database.parse_url(str(path)))
    event.listen(full._engine, "connect", limit)
    with pytest.raises(
        StorageError, match=r"is full; free some space, then try again \(a search goes on with --resume\)\."
    ):
        for i in range(2, 200):
            record(full, study, i, timings=(timing("screen", 1.0),), source=os.urandom(3000).hex())
    full.close()
    again = Storage.open(str(path))
    assert next(t.number for t in again.iter_trials(study)) == kept.number
    assert all(len(t.timings) == 1 and again.source(t.source_hash) for t in again.iter_trials(study))
    assert record(again, study, 500).number
    again.close()
    with sqlite3.connect(path) as plain:
        assert plain.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def as_nobody(work) -> str:
    """What `work()` says in a forked process without root's right to write everywhere."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            said = work()
        except BaseException as error:  # the parent is to see whatever it was
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True], ids=["closed", "being written by its owner"])
def test_a_read_only_database_serves_reading_and_refuses_writing(busy):
    folder = Path(tempfile.mkdtemp())  # pytest's own are closed to other users
    try:
        storage = Storage.open(str(folder / "evoattn.sqlite"))
        study = make_study(storage)
        trial = record(storage, study, 1, timings=(timing("screen", 1.0),))
        if not busy:
            storage.close()
        for file in folder.iterdir():
            file.chmod(0o444)
        folder.chmod(0o555)

        def read_then_write() -> str:
            reader = Storage.open(str(folder / "evoattn.sqlite"), create=False)
            found = reader.leaderboard(reader.latest_study(), 5) == [trial] and bool(reader.source(trial.source_hash))
            make_study(reader, "second")
            return str(found)

        said = as_nobody(read_then_write)
        assert (
            said.startswith("StorageError: The database")
            and "is read-only; make the file and its folder writable" in said
        ), said
        said = as_nobody(
            lambda: str(len(Storage.open(str(folder / "evoattn.sqlite"), create=False).leaderboard(study, 5)))
        )
        assert said == "1"
        storage.close()
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_trial_outlives_a_power_cut(tmp_path):
    """SQLite syncs at each commit (2 is FULL) of a write-ahead log, and holds rows to their foreign keys."""
    url = database.parse_url(str(tmp_path / "db.sqlite"))
    with database.connect(url).connect() as connection:
        found = [
            connection.exec_driver_sql(f"PRAGMA {p}").scalar() for p in ("synchronous", "journal_mode", "foreign_keys")
        ]
    assert found == [2, "wal", 1]


class Said(Exception):
    """An error as a driver of PostgreSQL has it."""

    def __init__(self, sqlstate):
        self.sqlstate = sqlstate


def failing(*codes):
    """Fails with these SQLSTATEs in turn, then answers."""
    left = [*codes]

    def once():
        if left:
            raise DBAPIError("select 1", {}, Said(left.pop(0)))
        return "an answer"

    return once


def patience(wait_s):
    told = []
    return Patience(create_engine("sqlite://"), "db", wait_s, told.append, pause_s=0.01), told


def test_a_server_is_waited_for_so_long_and_no_longer():
    waiting, told = patience(0.0)
    with pytest.raises(DBAPIError):
        waiting.until_there(failing(*["57P03"] * 4))
    assert len(told) == 1


def test_what_git_does_not_take_for_a_checkout_has_no_commit(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    for place in (tmp_path, tmp_path / "nothing"):
        monkeypatch.setattr(versions, "ROOT", place)
        assert versions._commit.__wrapped__() == "unknown"


def test_what_is_waited_for_is_said_on_stderr(capsys):
    say("It is away.")
    assert capsys.readouterr() == ("", "evoattn: It is away.\n")


def test_a_short_absence_is_waited_for():
    waiting, told = patience(60.0)
    assert waiting.until_there(failing(None, "08006", "57P01")) == "an answer" and len(told) == 1


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_what_another_transaction_undid_is_done_again_at_once(code):
    waiting, told = patience(0.0)
    assert waiting.until_there(failing(*[code] * 5)) == "an answer" and not told


def test_another_error_is_raised():
    waiting, told = patience(60.0)
    with pytest.raises(DBAPIError):
        waiting.until_there(failing("42P01"))
    assert not told


def test_a_long_query_comes_to_its_end(tmp_path):
    counts = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 200000) SELECT max(x) FROM n"
    with database.connect(database.parse_url(str(tmp_path / "some.db"))).connect() as connection:
        assert connection.exec_driver_sql(counts).scalar() == 200_000


@pytest.mark.parametrize("barred", ["file", "folder"])
def test_a_file_or_a_folder_that_may_not_be_written_is_read_only(tmp_path, monkeypatch, barred):
    path = tmp_path / "some.db"
    path.touch()
    url, other = database.parse_url(str(path)), path if barred == "file" else tmp_path
    assert not database.is_read_only(url)
    monkeypatch.setattr(os, "access", lambda one, _: one != other)
    assert database.is_read_only(url)
