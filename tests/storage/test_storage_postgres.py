"""PostgreSQL: searches side by side, a server that goes away and comes back, and refusals in words."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import create_engine, event, text

from evoattn.model.paths import ROOT
from evoattn.storage import Storage, StorageError
from evoattn.storage.engine import insert_missing, parse_url
from evoattn.storage.schema import REVISION, VERSION_TABLE, sources
from tests.storage.storage_records import make_study, record, timing

pytestmark = pytest.mark.postgres

RECORDER = """
import sys
from evoattn.storage import Storage
from tests.storage.storage_records import record, timing
storage = Storage.open(sys.argv[1])
study = storage.find_study(sys.argv[2])
with storage.lock_study(study):
    for index in range(int(sys.argv[3])):
        trial = record(storage, study, index, timings=(timing("screen", 1.0), timing("repeat", 2.0)), source=str(index))
        print(trial.number, flush=True)
"""


def start_recorder(url: str, study: str, trials: int) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", RECORDER, url, study, str(trials)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def patient(url: str, wait_s: float = 20.0) -> tuple[Storage, list[str]]:
    """An open database, and what it says while it waits."""
    storage, said = Storage.open(url), []
    storage._patience.wait_s, storage._patience.tell = wait_s, said.append
    return storage, said


def test_searches_side_by_side_lose_nothing_when_one_is_killed_and_the_server_crashes(server, postgres_url):
    storage = Storage.open(postgres_url)
    studies = [make_study(storage, name) for name in ("first", "second", "killed")]
    storage.close()
    first, second, killed = (start_recorder(postgres_url, study.name, 400) for study in studies)
    promised = {killed: [killed.stdout.readline() for _ in range(20)]}
    with pytest.raises(StorageError, match="Another search is running on study 'killed'"):
        Storage.open(postgres_url).lock_study(studies[2]).__enter__()
    killed.send_signal(signal.SIGKILL)
    for process in (first, second):  # a search that has not begun when the server stops ends with a sentence
        promised[process] = [process.stdout.readline()]
    server.stop(signal.SIGQUIT)  # no connection is ended in order
    server.start()
    said = {}
    for process in (first, second, killed):
        promised[process] = [*promised.get(process, []), *process.stdout]
        said[process] = process.stderr.read()
        process.wait(60)
    storage = Storage.open(postgres_url)
    for process, study in zip((first, second, killed), studies):
        kept = {trial.number: trial for trial in storage.iter_trials(study)}
        numbers = [int(line) for line in promised[process] if line.strip()]
        assert set(numbers) <= set(kept) and len(kept) <= len(numbers) + (process is killed)
        assert all(len(trial.timings) == 2 for trial in kept.values())
        if process is not killed:
            assert len({trial.config["BLOCK_M"] for trial in kept.values()}) == len(kept) == 400
            assert process.returncode == 0, said[process]
    assert all("does not answer; waiting up to 120 s for it" in said[process] for process in (first, second))
    with storage.lock_study(studies[2]):  # the dead process holds it no more
        record(storage, studies[2], 1000)
    storage.close()


def test_a_write_waits_for_the_server_in_one_sentence(server, postgres_url):
    storage, said = patient(postgres_url)
    study = make_study(storage)
    lock = storage.lock_study(study)
    lock.__enter__()
    server.stop()
    timer = threading.Timer(1.0, server.start)
    timer.start()
    trial = record(storage, study, 1)
    assert storage.trial(trial.number).config == trial.config
    assert said == [f"The database {storage.place} does not answer; waiting up to 20 s for it."]
    timer.join()
    with pytest.raises(StorageError, match="Another search is running"), storage.lock_study(study):
        pass
    lock.__exit__(None, None, None)
    server.stop()
    storage._patience.wait_s = 0.1
    try:
        with pytest.raises(StorageError, match="does not answer; see that its server runs, then try again"):
            list(storage.iter_trials(study))
    finally:
        server.start()
        storage.close()


@pytest.mark.parametrize("kept", [True, False])
def test_a_transaction_whose_commit_was_cut_off_is_done_once(postgres_url, kept):
    """The connection dies while it commits: only the server knows whether the trial was kept."""
    storage, said = patient(postgres_url)
    study = make_study(storage)
    other = create_engine(parse_url(postgres_url))
    cuts = []

    def cut(connection):
        if connection.get_execution_options().get("writes") and not cuts:
            backend = connection.scalar(text("SELECT pg_backend_pid()"))
            if kept:
                connection.connection.dbapi_connection.commit()
            with other.connect() as killer:
                cuts.append(killer.scalar(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": backend}))
            if kept:  # what is left to commit is nothing: one more statement finds the connection gone
                connection.execute(text("SELECT 1"))

    event.listen(storage._engine, "commit", cut)
    trial = record(storage, study, 1, timings=(timing("screen", 1.0),))
    assert cuts == [True] and said == []  # the line alone was cut: the next try finds the server
    assert [t.number for t in storage.iter_trials(study)] == [trial.number]
    assert len(storage.trial(trial.number).timings) == 1
    other.dispose()
    storage.close()


def test_a_transaction_that_a_crash_undid_is_not_taken_for_another_one(server, postgres_url):
    """A server that crashes gives numbers of transactions, of which it kept nothing, to others."""
    storage, said = patient(postgres_url)
    rival, _ = patient(postgres_url)
    study, others = make_study(storage), make_study(rival, "other")
    crashes = []

    def crash(connection):
        if connection.get_execution_options().get("writes") and not crashes:
            server.stop(signal.SIGQUIT)
            server.start()
            crashes.extend(record(rival, others, n) for n in range(3))

    event.listen(storage._engine, "commit", crash)
    trial = record(storage, study, 1, timings=(timing("screen", 1.0),))
    assert len(crashes) == 3 and said == []
    assert [t.number for t in storage.iter_trials(study)] == [trial.number]
    assert len(list(rival.iter_trials(others))) == 3
    for opened in (storage, rival):
        opened.close()


def test_a_study_stays_locked_over_a_restart_unless_another_search_took_it(server, postgres_url):
    storage, _ = patient(postgres_url)
    rival, _ = patient(postgres_url)
    study = make_study(storage)
    with storage.lock_study(study):
        server.stop(signal.SIGQUIT)
        server.start()
        record(storage, study, 1)  # takes the lock again
        with pytest.raises(StorageError, match="Another search is running"), rival.lock_study(study):
            pass
        server.stop(signal.SIGQUIT)
        server.start()
        with rival.lock_study(study), pytest.raises(StorageError, match="Another search is running"):
            record(storage, study, 2)
    for opened in (storage, rival):
        opened.close()


def test_one_search_a_study_in_one_process_too(postgres_url):
    storage = Storage.open(postgres_url)
    study, other = make_study(storage), make_study(storage, "other")
    refused = pytest.raises(StorageError, match="Another search is running on study 'first'")
    with storage.lock_study(study), storage.lock_study(other), refused, storage.lock_study(study):
        pass
    with storage.lock_study(study):
        storage.close()


def test_a_lock_is_free_though_the_server_has_not_noticed_that_its_connection_is_closed(postgres_url, monkeypatch):
    storage, rival = Storage.open(postgres_url), Storage.open(postgres_url)
    study = make_study(storage)
    with storage.lock_study(study):
        connection = storage._patience.guards[-1].__self__.connection
        monkeypatch.setattr(connection, "close", lambda: None)
    with rival.lock_study(study):
        pass
    monkeypatch.undo()
    connection.close()
    for opened in (storage, rival):
        opened.close()


def test_many_open_an_empty_database_at_once(postgres_url, server):
    with ThreadPoolExecutor(6) as pool:
        opened = list(pool.map(Storage.open, [postgres_url] * 6))
    for storage in opened:
        storage.close()
    with create_engine(parse_url(postgres_url)).connect() as connection:
        assert connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).all() == [(REVISION,)]


def test_searches_that_add_the_same_sources_in_opposite_order_both_go_on(postgres_url):
    """Each waits for the other's first source: PostgreSQL undoes one of the two transactions."""
    opened = [Storage.open(postgres_url) for _ in range(2)]
    packed = [{"hash": f"{n}" * 64, "zlib": b""} for n in range(2)]
    both_have_one = threading.Barrier(2, timeout=120)

    def add_both(storage, order):
        tries = []

        def add(connection):
            tries.append("again")
            insert_missing(connection, sources, order[:1])
            if len(tries) == 1:
                both_have_one.wait()
            insert_missing(connection, sources, order[1:])
            return len(tries)

        return storage._patience.write(add)

    with ThreadPoolExecutor(2) as pool:
        assert max(pool.map(add_both, opened, (packed, packed[::-1]))) > 1
    for storage in opened:
        storage.close()
    with create_engine(parse_url(postgres_url)).connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM sources")).all() == [(2,)]
