"""Databases of other versions, of other programs, and tampered with: checked before they are used. Where a trial ran
is kept with the trial, once for all that ran there, and never made up for old ones."""

import json
import re
import shutil
import sqlite3
import subprocess

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.exc import OperationalError

from evoattn.model.gpu import DetectedDevice
from evoattn.model.paths import MIGRATIONS, data_folder
from evoattn.storage import Storage, StorageError, UnknownRecord, versions
from evoattn.storage.engine import Migrations
from evoattn.storage.errors import explain
from evoattn.storage.schema import REVISION, VERSION_TABLE, metadata
from evoattn.storage.versions import collect, differences
from tests.storage.storage_records import PROBLEM, make_study, record, refusal, timing


def test_migrations_build_the_tables_that_the_program_uses(either):
    with either._engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == REVISION


NEXT = """
import sqlalchemy as sa
from alembic import op
revision, down_revision = "next", {base!r}
def upgrade():
    op.add_column("studies", sa.Column("note", sa.Text, server_default="none"))
    {then}
"""


def test_an_older_database_is_migrated_whole_or_not_at_all(storage, path, tmp_path):
    study = make_study(storage)
    storage.close()
    folder = tmp_path / "db"
    shutil.copytree(MIGRATIONS, folder, ignore=shutil.ignore_patterns("*.sqlite*", "__pycache__"))

    class Next(Storage):
        migrations = Migrations("next", folder)

    (folder / "versions" / "next.py").write_text(NEXT.format(base=REVISION, then="op.execute('SELECT * FROM nowhere')"))
    with pytest.raises(StorageError, match="does not have the tables"):
        Next.open(str(path))
    with sqlite3.connect(path) as plain:
        assert "note" not in plain.execute("SELECT sql FROM sqlite_master WHERE name = 'studies'").fetchone()[0]
    (folder / "versions" / "next.py").write_text(NEXT.format(base=REVISION, then="pass"))
    migrated = Next.open(str(path), create=False)
    assert migrated.studies() == [study]
    migrated.close()
    with sqlite3.connect(path) as plain:
        assert plain.execute(f"SELECT note, version_num FROM studies, {VERSION_TABLE}").fetchall() == [("none", "next")]


def test_another_versions_database_is_refused(storage, path):
    storage.close()
    with sqlite3.connect(path) as plain:
        plain.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    assert "another version of evoattn (its tables are at 9999, this one's at" in refusal(path)


def test_a_database_from_before_the_first_release_is_refused_with_what_to_do(storage, path):
    storage.close()
    with sqlite3.connect(path) as plain:
        plain.execute(f"UPDATE {VERSION_TABLE} SET version_num = '0003'")
    assert "before the first release (its tables are at 0003)" in refusal(path)


def test_tables_that_are_newer_than_the_version_named_are_refused_in_words(storage, path):
    storage.close()
    with sqlite3.connect(path) as plain:
        plain.execute(f"DELETE FROM {VERSION_TABLE}")
    assert "are not those of the version that it names; use another copy" in refusal(path)


@pytest.mark.parametrize("create", [True, False])
def test_what_is_no_file_is_no_database(tmp_path, create):
    for place in ("/dev/zero", tmp_path):
        assert f"{place} is no file; choose another one with --db." in refusal(place, create=create)


class Failed(Exception):
    """As psycopg's, of a connection that was not made."""

    sqlstate = None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("FATAL:  sorry, too many clients already", "has too many connections"),
        ("FATAL:  remaining connection slots are reserved for", "has too many connections"),
        ("fe_sendauth: no password supplied", "does not let you in; see to the user and the password"),
        ("Connection refused", "does not answer; see that its server runs"),
    ],
)
def test_a_server_that_takes_no_connection_is_said_for_what_it_is(words, sentence):
    assert sentence in str(explain(OperationalError("", {}, Failed(words)), "x"))


def test_a_data_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    said = refusal(data_folder() / "a.sqlite")
    assert "for the database cannot be made" in said and "--db or EVOATTN_DB" in said
    Storage.open(str(tmp_path / "elsewhere.sqlite")).close()  # which needs no such folder


def test_databases_that_are_not_ours_are_refused_untouched(tmp_path):
    foreign, text, empty = tmp_path / "foreign.sqlite", tmp_path / "notes.txt", tmp_path / "empty.sqlite"
    with sqlite3.connect(foreign) as plain:
        plain.execute("CREATE TABLE cats (name)")
    text.write_text("no database " * 200)
    empty.touch()
    assert "is some other program's database (it has the table 'cats')" in refusal(foreign)
    assert "is not a SQLite database" in refusal(text)
    assert "is empty; run `evoattn search` first" in refusal(empty, create=False)
    assert "There is no database at" in refusal(tmp_path / "none.sqlite", create=False)
    assert "cannot be opened; see that its folder is there" in refusal(tmp_path / "nowhere" / "a.sqlite")
    assert "is no file" in refusal(tmp_path)
    assert text.read_text() == "no database " * 200 and not (tmp_path / "none.sqlite").exists()


@pytest.mark.parametrize(
    "url, part",
    [
        ("nodialect://x", "SQLite or PostgreSQL, not in 'nodialect'"),
        ("postgresql+nodriver://x/y", "No driver"),
        ("sqlite://", "give --db a file"),
        ("sqlite:///:memory:", "give --db a file"),
        ("://", "neither a file nor"),
        ("sqlite:///a.sqlite?mode=ro", "options behind a question mark"),
        ("a.sqlite?mode=ro", "options behind a question mark"),
    ],
)
def test_urls_that_cannot_be_are_sentences(url, part):
    assert part in refusal(url)


@pytest.mark.slow
@pytest.mark.parametrize(
    "table, column, value",
    [
        ("trials", "state", "BEST"),
        ("trials", "config", "[1]"),
        ("trials", "config", '{"BLOCK_M": {"a": 1}}'),
        ("trials", "config", "{"),
        ("trials", "config", "[" * 100_000),
        ("trials", "parents", '["1"]'),
        ("trials", "validation", '{"backend": "cuda", "checks": [{"case": "x"}]}'),
        ("trials", "registers", "many"),
        ("trials", "relative_cost", "cheap"),
        ("trials", "relative_cost", 0),
        ("trials", "compile_options", "3"),
        ("samples", "samples_us", "[]"),
        ("samples", "samples_us", '["fast"]'),
        ("samples", "samples_us", "{}"),
        ("samples", "protocol", '{"stage": "quick"}'),
        ("samples", "protocol", "[]"),
    ],
)
def test_a_tampered_trial_is_a_sentence(storage, path, table, column, value):
    trial = record(storage, make_study(storage), 1, timings=(timing("screen", 1.0),))
    with sqlite3.connect(path) as plain:
        plain.execute(f"UPDATE {table} SET {column} = ?", (value,))
    with pytest.raises(StorageError, match="use another copy" if table == "trials" else "A timing is damaged"):
        storage.trial(trial.number)


def test_a_state_that_no_trial_has_is_a_sentence_where_trials_are_counted(storage, path):
    study = make_study(storage)
    record(storage, study, 1, timings=(timing("screen", 1.0),))
    with sqlite3.connect(path) as plain:
        plain.execute("UPDATE trials SET state = 'FOO'")
    for count in (storage.counts, storage.failures):
        with pytest.raises(StorageError, match=r"A trial of study first is damaged .*'FOO'.*; use another copy"):
            count(study)


@pytest.mark.parametrize("change", [{"head_dim": 65}, {"heads": "16"}, {"extra": 1}, {"name": ["a"]}])
def test_a_tampered_study_is_a_sentence(storage, path, change):
    make_study(storage)
    with sqlite3.connect(path) as plain:
        plain.execute("UPDATE studies SET problem = ?", (json.dumps(PROBLEM.to_dict() | change),))
    with pytest.raises(StorageError, match="Study 'first' is damaged"):
        storage.latest_study()


def test_a_damaged_study_does_not_lock_the_others_out(storage, path):
    make_study(storage, "first")
    second = make_study(storage, "second")
    with sqlite3.connect(path) as plain:
        plain.execute("UPDATE studies SET seed = 'x' WHERE name = 'first'")
    with pytest.warns(RuntimeWarning, match="Passed over: Study 'first' is damaged"):
        assert storage.studies() == [second]
    assert storage.study_names() == ["first", "second"]
    with pytest.raises(UnknownRecord, match="it has first, second"):
        storage.chosen_study("third")


@pytest.mark.parametrize("packed", [b"", b"text", None], ids=["empty", "not compressed", "another text"])
def test_a_tampered_source_is_refused(storage, path, packed):
    trial = record(storage, make_study(storage), 1)
    other = record(storage, storage.latest_study(), 2)
    with sqlite3.connect(path) as plain:
        if packed is None:
            (packed,) = plain.execute("SELECT zlib FROM sources WHERE hash = ?", (other.source_hash,)).fetchone()
        plain.execute("UPDATE sources SET zlib = ? WHERE hash = ?", (packed, trial.source_hash))
    with pytest.raises(StorageError, match="is not in the database as it was recorded"):
        storage.source(trial.source_hash)


HERE = {
    "evoattn": "0.1",
    "commit": "abc+",
    "host": "a",
    "device": "NVIDIA H100",
    "uuid": "GPU-1",
    "driver": "CUDA 13.0",
}
THERE = HERE | {"host": "b", "uuid": "GPU-2"}


def test_each_trial_and_timing_names_where_it_ran(either, plain):
    storage = either
    study = make_study(storage)
    unknown = record(storage, study, 0)
    storage.use_environment(HERE)
    first, second = (record(storage, study, i, timings=(timing("screen", 1.0),)) for i in (1, 2))
    storage.use_environment(dict(reversed(HERE.items())))  # the same facts: the same row
    third = record(storage, study, 3, timings=(timing("screen", 1.0),))
    storage.use_environment(THERE)
    fourth = record(storage, study, 4, timings=(timing("screen", 1.0),))
    storage.add_timing(first.number, timing("final", 1.0))
    assert storage.environments(unknown) == []
    assert storage.environments(first) == [HERE, THERE]
    assert storage.environments(second) == storage.environments(third) == [HERE] and storage.environments(fourth) == [
        THERE
    ]
    assert plain("SELECT count(*) FROM environments") == [(2,)]
    plain("UPDATE environments SET facts = '[1]'")
    with pytest.raises(StorageError, match="Environment 1 is damaged"):
        storage.environments(second)


def test_what_is_collected_here_and_what_differs_there():
    here = collect(None)
    assert {"evoattn", "commit", "python", "compiler", "torch", "numpy", "cupy", "host", "system"} <= set(here)
    assert all(isinstance(value, str) and value for value in here.values())
    assert differences(HERE, HERE) == []
    assert differences(HERE, THERE | {"cupy": "14"}) == [
        "host a, here b",
        "uuid GPU-1, here GPU-2",
        "cupy absent, here 14",
    ]


def test_a_device_is_told_from_others_of_its_kind():
    facts = collect(DetectedDevice(0, "NVIDIA H100", (9, 0), "13.0", "GPU-1"))
    assert (facts["device"], facts["driver"], facts["uuid"]) == ("NVIDIA H100", "CUDA 13.0", "GPU-1")
    assert "uuid" not in collect(DetectedDevice(0, "NVIDIA H100", (9, 0), "13.0"))


def test_the_commit_says_whether_files_differ_from_it(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    monkeypatch.setattr(versions, "ROOT", tmp_path)
    assert versions._commit.__wrapped__() == "unknown"
    (tmp_path / "file").write_text("a")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "a"]):
        git(*words)
    assert re.fullmatch(r"[0-9a-f]{12}", clean := versions._commit.__wrapped__())
    (tmp_path / "file").write_text("b")
    assert versions._commit.__wrapped__() == clean + "+"
