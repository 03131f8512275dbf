"""The page as text: whole, escaped, its policy strict."""

import json
import re
import shlex
import subprocess
import sys
from html import unescape

import pytest
from jinja2 import Environment, FileSystemLoader

from evoattn.model.paths import REPORT_TEMPLATES
from evoattn.model.records import TrialState
from evoattn.report import render_html, render_json, summarise
from evoattn.report.data import MAX_POINTS, Progress
from evoattn.report.page import SCRIPTS
from tests.report.report_studies import add, make_study, printed, timing


@pytest.mark.slow
def test_page_is_whole_and_escapes_the_database(measured):
    page = render_html(summarise(*measured, 20))
    assert "alert(1)</script>" not in page and "<b onmouseover" not in page
    assert page.count("</script>") == page.count("<script") == 1 + len(SCRIPTS)
    policy = re.search(r'Content-Security-Policy"\s+content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'") and "script-src 'unsafe-inline'" not in policy
    assert policy.count("'sha256-") == len(SCRIPTS)
    assert not re.search(r"src\s*=|href\s*=\s*.(?!#)|url\(|@import", page.split("<script")[0])
    assert len(page.encode()) < 2_000_000


def test_the_winner_comes_first_with_all_that_one_takes_home(timed):
    summary = summarise(*timed)
    page = render_html(
        summary, "my db.sqlite", lambda source, arch: {"flash_wgmma": {"tensor cores": 58}} if source else ""
    )
    without_sources = re.sub(
        r"<pre class=\"code\".*?</pre>", "", page.split("<script")[0].split("</nav>")[1], flags=re.S
    )
    body = " ".join(unescape(re.sub(r"<[^>]+>", "", without_sources)).split())
    winner = summary.winner
    places = [
        body.index(text)
        for text in (
            f"{winner.row.median_us:.2f} µs per call",
            summary.peer_verdict,
            *(f"--set {name}={value}" for name, value in winner.settings.items()),
            summary.verdict,
            f"evoattn export {winner.row.trial} --db 'my db.sqlite' -o kernel.cu",
            f"sha256 {winner.source_hash[:16]}",
            "What the search changed",
            "tensor cores",
            "Progress of the search",
            "Best of each family",
            "Leaderboard",
            "Lineage of the winner",
            "Roofline",
            "Failures",
        )
    ]
    assert places == sorted(places)
    copied = re.search(r'data-copy="([^"]*)">Copy config', page)[1]
    assert shlex.split(copied.replace("\\\n", "")) == [
        *("--family", winner.row.family),
        *(word for name, value in winner.settings.items() for word in ("--set", f"{name}={value}")),
    ]


def test_a_page_without_instruction_counts_says_why(timed):
    page = render_html(summarise(*timed), count=lambda source, arch: "Not counted: no compiler.")
    assert "<p>Not counted: no compiler.</p>" in page


def test_values_that_say_nothing_are_not_on_the_page(storage):
    study = make_study(storage, offline=True)
    for n in range(20):
        add(storage, study, TrialState.ESTIMATED, cost=1000.0 + n, A=n, B=n % 2)
    summary = summarise(storage, study)
    assert summary.genes and not any(gene.tells for gene in summary.genes)
    assert "Values with an effect" not in render_html(summary)


def test_page_of_an_empty_study(storage):
    summary = summarise(storage, make_study(storage), 5)
    assert "No candidate is right yet" in render_html(summary)
    assert "No candidate is right yet" in printed(summary, 100)
    assert json.loads(render_json(summary))["leaderboard"] == []


def test_offline_study_has_no_times_anywhere(storage):
    study = make_study(storage, offline=True)
    for n in range(40):
        add(storage, study, TrialState.ESTIMATED, cost=1000.0 + n, A=n % 4, B=n % 2, parents=[n] if n else [])
    add(storage, study, TrialState.COMPLETE, us=[("final", 1.0)], A=1)  # a stray: never beside estimates
    storage.add_peer(study, "flash", timing(30.0, "final"))
    summary = summarise(storage, study, 50)
    assert {row.state for row in summary.leaderboard} == {"ESTIMATED"} and len(summary.leaderboard) == 40
    text = json.loads(render_json(summary))
    assert text["kind"] == "estimated" and not text["baselines"] and not text["roofs"] and text["cost_model"] is None
    for row in text["leaderboard"]:
        assert [row[k] for k in ("median_us", "p10_us", "p90_us", "tflops", "peak_share")] == [None] * 5 and row[
            "speedups"
        ] == {}
    body = render_html(summary).split("<script")[0]
    for shown in (printed(summary, 160), body):
        assert "not a time" in shown and "µs" not in shown and "SDPA" not in shown and "×" not in shown
        assert not re.search(r"\d TFLOP/s", shown)


def test_many_points_are_thinned_but_no_improvement_is_lost():
    improvements = [0, 7, 19_999]
    count = 20_000
    drawn = Progress("median_us", list(range(count)), [0.0] * count, ["f"] * count, [1.0] * count, improvements).drawn()
    assert len(drawn) <= MAX_POINTS + len(improvements) and set(improvements) <= set(drawn)


@pytest.mark.slow
def test_report_needs_no_slow_library(measured):
    """torch takes three seconds to import, optuna's importance one: a report of a day's search has three in all."""
    storage, _ = measured
    code = (
        "import sys; from evoattn.cli.main import app\n"
        "for kind in ('table', 'json', 'html'):\n"
        "    app(['report', '--format', kind, *sys.argv[1:]], standalone_mode=False)\n"
        "    print('by then', *(n for n in ('torch', 'optuna', 'sklearn', 'cupy') if n in sys.modules))"
    )
    words = [sys.executable, "-c", code, "--db", str(storage.url.database)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert said.count("by then\n") == 3, said[-200:]


@pytest.mark.parametrize(
    ("operator", "words"),
    [
        ("starting", "a starting config"),
        ("random", "drawn at random"),
        ("guided", "proposed by the guided sampler"),
        ("crossover", "made by crossover"),
        ("", "of unknown making"),
    ],
)
def test_how_a_config_was_made_is_said_in_words(operator, words):
    macros = Environment(loader=FileSystemLoader(REPORT_TEMPLATES)).get_template("macros.html.j2")
    assert macros.module.made_by(operator) == words
