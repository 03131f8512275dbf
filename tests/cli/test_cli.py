"""The command line from end to end without a GPU: the main job, and one sentence for every wrong use."""

import json
import re
import sqlite3

import pytest

from evoattn.model.gpu import GPUS, DetectedDevice, GpuError
from evoattn.search.request import choose_device
from tests.cli.terminal import SHAPE, refused, run


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The database of a small finished search, and what the search printed."""
    db = tmp_path_factory.mktemp("study") / "evoattn.sqlite"
    words = ("--gpu", "l4", "--budget", "14trials", "--shape", SHAPE, "--study", "small", "--jobs", 2)
    result = run("search", *words, "--db", db)
    assert result.exit_code == 0, result.output
    return db, result.stdout


@pytest.mark.slow
def test_search_says_first_what_it_searches_and_last_what_it_found(study):
    _, output = study
    assert output.splitlines()[0] == "Problem B=1 H=2 S=96 D=32 fp16 full; budget 14trials."
    assert "searching offline for the L4" in output.splitlines()[1]
    assert re.search(r"14 candidates in", output)
    assert "never timed" in output and "µs" not in output


@pytest.mark.slow
def test_a_restricted_search_and_its_resumption_stay_in_their_part_of_the_space(tmp_path):
    db = tmp_path / "evoattn.sqlite"
    words = (
        "--gpu",
        "l4",
        "--shape",
        SHAPE,
        "--family",
        "flash_mma",
        "--set",
        "BLOCK_M=32,64",
        "--set",
        "RESCALE=lazy,always",
    )
    for search in ((*words, "--no-starting-configs"), ("--resume",)):
        result = run("search", *search, "--budget", "3trials", "--jobs", 2, "--db", db)
        assert result.exit_code == 0, result.output
    rows = sqlite3.connect(db).execute("select config, operator from trials").fetchall()
    assert len(rows) == 6 and {operator for _, operator in rows} <= {"random", "guided"}
    for config in (json.loads(config) for config, _ in rows):
        assert config["BLOCK_M"] in (32, 64) and config["RESCALE"] in ("lazy", "always")


@pytest.mark.slow
def test_every_trial_is_recorded_with_its_source(study):
    rows = sqlite3.connect(study[0]).execute("select state, source_hash, operator from trials").fetchall()
    assert len(rows) == 14
    right = [h for state, h, _ in rows if state == "ESTIMATED"]
    assert len(right) >= 10 and None not in right and len(set(right)) == len(right)
    assert {(state, operator) for state, _, operator in rows if state != "ESTIMATED"} <= {
        ("INVALID_CONFIG", "starting")
    }


@pytest.mark.slow
def test_resume_goes_on_without_repeating(study):
    db, _ = study
    result = run("search", "--resume", "--study", "small", "--budget", "6trials", "--jobs", 2, "--db", db)
    assert result.exit_code == 0, result.output
    rows = sqlite3.connect(db).execute("select config_id from trials").fetchall()
    assert len(rows) == 20 and len(set(rows)) == 20


@pytest.mark.parametrize("command", ["report", "dashboard"])
def test_one_way_to_name_a_study_is_documented(command):
    """The name alone is understood as well, which help does not say."""
    shown = run(command, "--help").stdout
    assert f"{command} [OPTIONS]\n" in shown and "--study NAME" in shown and "STUDY]" not in shown


@pytest.mark.slow
def test_report_formats(study, tmp_path):
    db, _ = study
    assert "never timed" in run("report", "--db", db).stdout
    assert "ESTIMATED" in run("report", "--full", "--db", db).stdout
    data = json.loads(run("report", "--study", "small", "--format", "json", "--db", db).stdout)
    assert data["leaderboard"]
    assert json.loads(run("report", "small", "--format", "json", "--db", db).stdout) == data, "the name alone will do"
    page = tmp_path / "report.html"
    assert run("report", "--format", "html", "-o", page, "--db", db).exit_code == 0
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")
    written = run("report", "--format", "table", "-o", tmp_path / "report.txt", "--db", db)
    assert written.stderr == f"Wrote {tmp_path / 'report.txt'}.\n"
    assert "never timed" in (tmp_path / "report.txt").read_text()
    full = run("report", "--format", "html", "-o", "/dev/full", "--db", db)
    refused(full, 1, "No space left on device: /dev/full.")


@pytest.mark.slow
def test_show_export_and_reproduce(study, tmp_path):
    db, _ = study
    shown = run("show", 1, "--db", db).stdout
    leader = json.loads(run("report", "--format", "json", "--db", db).stdout)["leaderboard"][0]["trial"]
    assert f"{leader} of study small" in run("show", "best", "--study", "small", "--db", db).stdout
    words = ("config id", "ran on", "host", "commit", "inputs' seed", "guided, seed", "source hash")
    assert all(word in shown for word in words)
    kernel = tmp_path / "kernel.cu"
    assert run("export", "best", "-o", kernel, "--db", db).exit_code == 0
    assert "__global__" in kernel.read_text() and "int main" in kernel.read_text()
    result = run("reproduce", "best", "--db", db)
    assert result.exit_code == 0 and result.stdout.rstrip().endswith("\nreproduced"), result.output
    assert "All as recorded with its trial" in result.stdout


def changed_copy(database, folder, statement):
    """A copy of a database after a statement of SQL."""
    copy = folder / "copy.sqlite"
    with sqlite3.connect(database) as source, sqlite3.connect(copy) as target:
        source.backup(target)
    with sqlite3.connect(copy) as db:
        db.execute(statement)
    return copy


@pytest.mark.slow
def test_reproduce_says_what_differs_field_by_field(study, tmp_path):
    copy = changed_copy(
        study[0], tmp_path, "update environments set facts = json_set(facts, '$.host', 'elsewhere', '$.torch', '1.0')"
    )
    words = " ".join(run("reproduce", "best", "--db", copy).stdout.split())
    assert (
        "Not as recorded with its trial: " in words and "torch 1.0, here " in words and "host elsewhere, here " in words
    )


@pytest.mark.slow
def test_a_changed_record_does_not_reproduce(study, tmp_path):
    """The check can fail: a record with another cost than the kernel has is not reproduced."""
    copy = changed_copy(study[0], tmp_path, "update trials set relative_cost = relative_cost * 1.5")
    result = run("reproduce", "best", "--db", copy)
    assert result.exit_code == 1 and "NOT reproduced" in result.stdout


def test_gpus_and_families():
    assert "l4" in run("gpus").stdout
    assert "flash_mma" in run("families").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, expected",
    [
        (("--gpu", "gtx"), "gtx"),
        (("--gpu", "auto"), "--gpu l4"),
        (("--gpu", "l4", "--budget", "soon"), "soon"),
        (("--gpu", "l4", "--problem", "nothing"), "nothing"),
        (("--gpu", "l4", "--shape", "B=1,H=x"), "H"),
        (("--gpu", "l4", "--shape", SHAPE, "--problem", "seed_h100"), "not both"),
        (("--gpu", "l4", "--family", "flash_magic"), "flash_magic"),
        (("--gpu", "l4", "--sampler", "oracle"), "oracle"),
        (("--gpu", "l4", "--cache", "tepid"), "tepid"),
        (("--gpu", "l4", "--set", "BLOCK_M"), "NAME=VALUE"),
        (("--gpu", "l4", "--set", "BLOCK_M=32", "--set", "BLOCK_M=64"), "twice"),
        (("--gpu", "l4", "--set", "BLOCK_Q=32"), "BLOCK_Q"),
        (("--gpu", "l4", "--family", "flash_mma", "--set", "BLOCK_M=32,33"), "BLOCK_M=33"),
        (("--gpu", "l4", "--set", "BLOCK_M=48"), "Other families have it: say --family flash_wmma --family flash_mma."),
        (("--gpu", "l4", "--resume", "--set", "BLOCK_M=32"), "--set"),
        (("--gpu", "l4", "--resume", "--sampler", "tpe"), "--sampler"),
        (("--gpu", "l4", "--resume", "--seed", "0"), "--seed"),
        (("--gpu", "l4", "--resume", "--cache", "cold"), "--cache"),
        (("--gpu", "l4", "--family", "flash_mma", "--shape", "B=1,H=2,S=96,D=1024"), "1024"),
        (("--gpu", "l4", "--family", "flash_mma", "--shape", "B=1,H=2,S=96,D=64,dtype=fp32"), "fp32"),
    ],
)
def test_wrong_use_of_search(tmp_path, words, expected):
    refused(run("search", *words, "--db", tmp_path / "db.sqlite"), 2, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, expected",
    [
        (("show", "999"), "no trial 999"),
        (("show", "first"), "'first' is not the number"),
        (("export", "999"), "no trial 999"),
        (("reproduce", "--", "-1e9"), "'-1e9' is not the number"),
        (("report", "--study", "nothing"), "no study 'nothing' in"),
        (("export", "best", "--study", "x"), "it has small."),
        (("search", "--resume", "--study", "x"), "it has small."),
        (("search", "--resume", "--gpu", "H100"), "for the GPU l4"),
    ],
)
def test_what_is_not_there(study, words, expected):
    refused(run(words[0], "--db", study[0], *words[1:]), 2, expected)


@pytest.mark.slow
def test_a_space_without_a_valid_config_is_a_failed_run_that_says_why(tmp_path):
    db = tmp_path / "db.sqlite"
    words = ("--family", "flash_mma", "--set", "BLOCK_M=16", "--set", "WARPS=4")
    refused(
        run("search", "--gpu", "l4", "--shape", SHAPE, "--jobs", 1, "--budget", "1trials", *words, "--db", db),
        1,
        "N for WARPS=N.",
    )
    refused(run("export", "best", "--db", db), 2, "none that is right")


def test_another_device_than_the_named_one_is_refused():
    device = DetectedDevice(0, "NVIDIA H100 80GB HBM3", (9, 0), "13.0")
    with pytest.raises(GpuError, match=r"H100.*--gpu auto"):
        choose_device("l4", [device])
    assert choose_device("auto", [device]) == (GPUS["h100"], device)
    with pytest.raises(GpuError, match=r"GTX 1080.*is older than sm_80"):
        choose_device("auto", [DetectedDevice(0, "GTX 1080", (6, 1), "12.0")])


@pytest.mark.slow
def test_broken_databases(study, tmp_path):
    text = tmp_path / "text.sqlite"
    text.write_text("this is not a database, but it is long enough to be read as one " * 20)
    refused(run("report", "--db", text), 1)
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as db:
        db.execute("create table people (name text)")
    refused(run("report", "--db", foreign), 1)
    refused(run("report", "--db", tmp_path / "absent.sqlite"), 1)
    refused(
        run("search", "--gpu", "l4", "--db", tmp_path / "no" / "such" / "folder" / "db.sqlite", "--budget", "1trials"),
        1,
    )


@pytest.mark.slow
def test_a_search_that_finds_no_right_kernel_has_failed(tmp_path):
    shared = ["search", "--gpu", "l4", "--offline", "--jobs", 1, "--shape", SHAPE, "--db", tmp_path / "db.sqlite"]
    result = run(*shared, "--budget", "0.01s")
    assert result.exit_code == 1 and "No candidate is right yet" in result.stdout, result.output
