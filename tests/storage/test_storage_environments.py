"""Where a trial ran is kept with the trial, once for all that ran there, and never made up for old ones."""

import re
import subprocess

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine

from evoattn.model.gpu import DetectedDevice
from evoattn.model.paths import MIGRATIONS
from evoattn.storage import Storage, StorageError, versions
from evoattn.storage.versions import collect, differences
from tests.storage.storage_records import make_study, record, timing

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


def test_a_database_without_environments_is_migrated_and_its_trials_keep_none(url):
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with create_engine(url).begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.exec_driver_sql(
            "INSERT INTO studies VALUES (1, 'old', 'l4', 'sm_89', true, 'genetic', 0, "
            '\'{"batch": 1, "heads": 1, "kv_heads": 1, '
            '"seqlen_q": 8, "seqlen_k": 8, "head_dim": 64}\', \'[]\', \'{"evoattn": "0.0"}\', \'{}\', \'\')'
        )
        connection.exec_driver_sql(
            "INSERT INTO trials (number, study_id, family, config_id, state, reason, operator, created_at, seconds, "
            "config, parents) "
            "VALUES (7, 1, 'flash_mma', 'x', 'TIMEOUT', '', '', '', 0, '{}', '[]')"
        )
    storage = Storage.open(url)
    assert storage.trial(7).state == "TIMEOUT" and storage.environments(storage.trial(7)) == []
    storage.use_environment(HERE)
    assert storage.environments(record(storage, storage.find_study("old"), 1)) == [HERE]
    storage.close()


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
