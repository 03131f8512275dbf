"""PostgreSQL: what cannot be opened or written is said in words, and no password ever is."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from evoattn.model.gpu import GPUS
from evoattn.model.paths import ROOT
from evoattn.storage import Storage, StorageError
from evoattn.storage.engine import parse_url, place, without_password
from tests.storage.storage_records import PROBLEM, make_study, refusal
from tests.support.postgres import Server, free_port, programs

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.skipif(programs() is None, reason="PostgreSQL is not installed (Debian: apt-get install postgresql)"),
]


def test_what_cannot_be_opened_is_said_at_once(server, postgres_url):
    assert "is empty; run `evoattn search` first" in refusal(postgres_url, create=False)
    assert "has no database postgresql+psycopg://" in refusal(server.url("nowhere"))
    assert "does not answer; see that its server runs" in refusal(f"postgresql://evoattn@127.0.0.1:{free_port()}/x")
    with create_engine(parse_url(postgres_url)).begin() as connection:
        connection.execute(text("CREATE TABLE cats (name text)"))
        connection.execute(text("CREATE ROLE guest LOGIN"))
    assert "some other program's database (it has the table 'cats')" in refusal(postgres_url)


def test_a_guest_may_read_and_is_told_that_it_may_not_write(server, postgres_url):
    storage = Storage.open(postgres_url)
    study = make_study(storage)
    with create_engine(parse_url(postgres_url)).begin() as connection:
        connection.execute(text("DROP ROLE IF EXISTS reader"))
        connection.execute(text("CREATE ROLE reader LOGIN"))
        connection.execute(text("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader"))
    reader = Storage.open(postgres_url.replace("evoattn@", "reader@"), create=False)
    assert reader.studies() == [study]
    with pytest.raises(StorageError, match="You may not do that in the database"):
        make_study(reader, "second")
    for opened in (storage, reader):
        opened.close()
    with create_engine(parse_url(postgres_url)).begin() as connection:
        connection.execute(text("DROP OWNED BY reader"))


def test_a_password_is_never_shown(server, postgres_url):
    storage = Storage.open(postgres_url.replace("evoattn@", "evoattn:secret@"))
    assert "secret" not in storage.place and "evoattn:***@" in storage.place
    storage.close()


def test_a_seed_of_64_bits_is_kept(postgres_url):
    storage = Storage.open(postgres_url)
    study = storage.create_study("big", PROBLEM, GPUS["l4"], True, "random", 2**62, (), {}, {})
    assert storage.find_study("big") == study and study.seed == 2**62
    storage.close()


def test_the_server_of_the_tests_runs_alone_and_leaves_nothing():
    server = Server()
    try:
        server.start()
        assert server.url().startswith("postgresql+psycopg://evoattn@127.0.0.1:")
    finally:
        server.remove()
    assert not server.folder.exists()


@pytest.mark.parametrize(
    "given, shown",
    [
        ("postgresql://me:secret@host/x", "postgresql://me@host/x"),
        ("postgresql+psycopg://me@host:5/x?sslmode=require", "postgresql+psycopg://me@host:5/x?sslmode=require"),
        ("a:b@c.sqlite", "a:b@c.sqlite"),
    ],
)
def test_a_command_to_paste_holds_no_password(given, shown):
    assert without_password(given) == shown
    assert "secret" not in place(parse_url(given))


@pytest.mark.slow
def test_the_script_serves_until_it_is_ended_and_leaves_nothing():
    """A shell ignores SIGINT for what it puts in the background; the script does not."""
    folder = Path(tempfile.mkdtemp())  # pytest's own are closed to the server's user
    folder.chmod(0o755)
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.support.postgres"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        Storage.open(started.stdout.readline().strip()).close()
        started.send_signal(signal.SIGINT)
        assert started.wait(300) == 0 and list(folder.iterdir()) == []
    finally:
        started.kill()
        shutil.rmtree(folder)
