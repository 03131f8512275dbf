"""docs/lessons.md: its commands can run, and scripts/fill_lessons.py finds a study for each number in it."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shlex

import pytest

from evoattn.families import registry
from evoattn.model import gpu
from evoattn.model import named_problems as problems
from evoattn.model.paths import ROOT
from evoattn.model.space import load_space, parse_choices

SPEC = importlib.util.spec_from_file_location("fill_lessons", ROOT / "scripts/fill_lessons.py")
fill_lessons = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fill_lessons)

PAGE = (ROOT / "docs/lessons.md").read_text()
COMMANDS = [shlex.split(line)[2:] for line in PAGE.splitlines() if line.startswith("evoattn search")]
DRAWS = 10000


def options(words: list[str], name: str) -> list[str]:
    return [value for key, value in zip(words[::2], words[1::2]) if key == name]


def studies() -> list[str]:
    return [words[-1] for words in COMMANDS]


@pytest.mark.parametrize("words", COMMANDS, ids=studies())
def test_a_command_has_configs_to_time(words):
    (family,), (name,) = options(words, "--family"), options(words, "--problem")
    space, spec, draw = load_space(family, gpu.GPUS["h100"]), gpu.GPUS["h100"], random.Random(0)
    space, problem = space.restricted(parse_choices(options(words, "--set"))), problems.lookup(name)
    drawn = (space.make_config({p.name: draw.choice(p.values) for p in space.parameters}) for _ in range(DRAWS))
    assert any(registry.lookup(family).why_invalid(problem, config, spec) is None for config in drawn)


def test_every_number_has_its_study(tmp_path):
    """Study n of the page takes n µs, SDPA ten times that: each place changes, none is left, and a second filling
    changes nothing."""
    for number, study in enumerate(studies(), 1):
        row = {
            "median_us": float(number),
            "trial": 100 + number,
            "smem_bytes": 1024 * number,
            "speedups": {"efficient": 10.0, "fa4": 2.0},
        }
        (tmp_path / f"{study}.json").write_text(json.dumps({"leaderboard": [row]}))
    numbers = fill_lessons.Numbers(tmp_path)
    filled = fill_lessons.fill(PAGE, numbers)
    texts = [re.fullmatch(r"<!--(.+?)-->(.*)<!---->", match[0])[2] for match in fill_lessons.PLACE.finditer(filled)]
    assert all(re.fullmatch(r"[\d.]+|[\d.]+ µs( \(trial \d+\))?|yes|no", text) for text in texts)
    assert all(f"(trial {100 + number})" in filled for number in range(1, len(COMMANDS) + 1))
    assert (
        "lesson_tensor_scalar / lesson_tensor_mma-->0.33<" in filled
        and "lesson_fp32_512.sdpa / lesson_fp32_512-->10.00<" in filled
    )
    assert (
        "lesson_limit_32rows.kib < 48-->yes<" in filled and "lesson_threads_16 / lesson_threads_256 > 1-->no<" in filled
    )
    assert fill_lessons.fill(filled, numbers) == filled


def test_the_trials_named_on_the_page_are_in_the_record():
    rows = [json.loads(line) for line in (ROOT / "docs/lessons.jsonl").read_text().splitlines()]
    assert [row["study"] for row in rows] == studies()
    for row in rows:
        assert f"<!--{row['study']}-->{row['best']['median_us']:.2f} µs (trial {row['best']['trial']})<!---->" in PAGE
        assert row["best"]["state"] == "COMPLETE" and row["best"]["stage"] == "final"


def test_a_study_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"lesson_tensor_scalar\.json has no timed kernel"):
        fill_lessons.fill(PAGE, fill_lessons.Numbers(tmp_path))
