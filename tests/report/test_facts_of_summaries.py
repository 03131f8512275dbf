"""What a report reads out of trials stays, until a change wants it otherwise: progress, failures, lineage, what
parameters matter, how the cost model ranks; on a made-up search of 240 trials."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np

from evoattn.model.gpu import GPUS
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompileInfo, Timing, Trial, TrialState
from evoattn.model.space import config_id
from evoattn.report import analysis, data, summary, text, winner
from evoattn.report.data import PeerRatio, StudySummary
from tests.support.facts import changed

GENES = {
    "BLOCK_M": (64, 128, 256),
    "STAGES": (1, 2, 3, 4),
    "EARLY": (False, True),
    "ORDER": ("rows", "heads"),
    "X": (1,),
}
WEIGHTS = {"BLOCK_M": 2.0, "STAGES": 0.5, "EARLY": 0.25}
BEGAN = datetime(2026, 11, 27, 9, 30, tzinfo=UTC)
FAILED = [
    *((TrialState.COMPILE_ERROR, f"error on line {n}: a thing\nmore {n}", 1 + n % 2) for n in range(5)),
    (TrialState.TIMEOUT, "It did not end within 30 s.", 4),
    (TrialState.TIMEOUT, "x" * 500, 4),
    (TrialState.WRONG_RESULT, "", 1),
]


def _trials() -> list[Trial]:
    rng, made = random.Random(7), list[Trial]()
    for number in range(1, 241):
        family = rng.choice(("one", "two", "two"))
        params = {name: rng.choice(values) for name, values in GENES.items()}
        us = 20 + sum(w * GENES[name].index(params[name]) for name, w in WEIGHTS.items()) + rng.random() - number / 400
        state = TrialState.COMPLETE if number % 7 else (TrialState.TIMEOUT, TrialState.WRONG_RESULT)[number % 2]
        timings = [Timing((us, us * 1.1, us * 0.98), {"stage": "screen"})]
        if number % 40 == 1:
            timings.append(Timing((us * 0.99,) * 5, {"stage": "final", "run": "r", "energy_mj": 3.5}))
        if number % 50 == 2:
            timings.append(Timing.out("It changed its inputs.", True))
        parents = tuple(rng.sample(range(1, number), 2)) if number > 20 else ()
        row = (number, 1, family, params, config_id(family, params), state, "", None, CompileInfo(128, 8, 16, 24, 1024))
        then = (BEGAN + timedelta(seconds=3.5 * number)).isoformat()
        estimate = us * rng.uniform(0.8, 1.3) if number % 11 else None
        right = tuple(timings) if state is TrialState.COMPLETE else ()
        made.append(Trial(*row, None, right, estimate, parents, rng.choice(("mutation", "random")), then, 0.5))
    return made


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    trials = _trials()
    study = SimpleNamespace(offline=False, created_at=BEGAN.isoformat())
    by_number = {trial.number: trial for trial in trials}
    right = analysis.right_trials(study, trials)
    results = analysis.by_family(right)
    course = analysis.progress(study, right)
    yield "right", [(trial.number, value) for trial, value in right]
    yield "families", {name: [(t.number, value) for t, value in pairs] for name, pairs in results.items()}
    few = replace(course, value=course.value[:9], improvements=[])
    yield "progress", [course, course.drawn(), few.drawn()]
    yield "undated", analysis.progress(SimpleNamespace(offline=True, created_at="?"), right).elapsed_s
    yield "ranks", analysis._ranks(np.array([3.0, 1.0, 1.0, 2.0, 2.0, 2.0, 9.0])).tolist()
    yield "improvements", analysis.improvements(course, by_number)
    yield "failures", analysis.group_failures(FAILED)
    yield "the cost model", [analysis.rank_cost_model(some) for some in (trials, trials[:9], trials[:14])]
    best = [min(pairs, key=lambda pair: pair[1])[0] for pairs in results.values()]
    yield "lineage", [analysis.lineage(trial, by_number) for trial in (*best, None)]
    columns = {name: analysis.columns_of([t for t, _ in pairs]) for name, pairs in results.items()}
    kept = {name: {gene: [c.values, c.codes.tolist()] for gene, c in of.items()} for name, of in columns.items()}
    yield "columns", kept
    values = {name: [value for _, value in pairs] for name, pairs in results.items()}
    yield "importance", [analysis.importance_of(name, values[name], columns[name]) for name in results]
    few = {name: analysis.columns_of([t for t, _ in pairs[:20]]) for name, pairs in results.items()}
    yield "too few", [analysis.importance_of(name, values[name][:20], few[name]) for name in results]
    yield "genes", analysis.gene_values(results, columns)
    yield "samples", analysis.family_samples(results)
    yield "orders", [analysis.in_order(set(values)) for values in (*GENES.values(), (2, "x", True, 0.5))]
    problem, spec = AttentionProblem(1, 16, 16, 1024, 1024, 64), GPUS["h100"]
    yield "roofs", [summary.roofs(problem, spec), summary.tflops(problem, trials[0].timings[0])]
    launch = KernelLaunch("k", (264, 2, 1), (128, 1, 1), 49152, ())
    yield "occupancy", summary._occupancy(launch, CompileInfo(128, 8, 16, 24, 1024), spec)
    finals = [t.timing for t in trials if t.timing and t.timing.protocol["stage"] == "final"]
    peers = {"flash": [finals[1]], "cudnn": [finals[2], trials[3].timings[0]], "none": []}
    yield "peers", [winner.fastest_peer(timing, peers) for timing in (finals[0], trials[1].timings[0], None)]
    told = {"flash": "", "efficient": "It has no such mask."}
    yield "baselines", summary._baselines({"flash": [trials[2].timings[0]], "cudnn": [finals[1]]}, told, problem)
    for final in ({}, {"7": (1.2, 1.1, 1.3), "9": (1.05, 1.03, 1.07)}, {"7": (1.01, 0.99, 1.02), "9": (1.5, 1.4, 1.6)}):
        ratios = {name: dict(zip(("median", "low", "high"), of, strict=True)) for name, of in final.items()}
        of_final = SimpleNamespace(final=ratios, leaderboard=[SimpleNamespace(trial=3)])
        yield f"verdict {[*final.values()]}", StudySummary.verdict.fget(of_final)
    for kind in ("estimated", "measured"):
        yield f"notice {kind}", StudySummary.notice.fget(SimpleNamespace(kind=kind, gpu="l4"))
    for peer in (None, *(PeerRatio("flash", 12.5, *of) for of in ((1.0, False), (0.9, False), (1.4, True)))):
        yield f"peer {peer}", StudySummary.peer_verdict.fget(SimpleNamespace(winner=SimpleNamespace(peer=peer)))
    yield "no numbers", data._finite({"a": (math.inf, [math.nan, 1.5], {"b": -math.inf}), "c": ("x", 2)})
    yield "a difference", winner.source_diff("a\nb\nc\n", "a\nx\nc\n", "old", "new")
    words = [text.wrapped("one two three four five six", 12, "  "), text.command([["evoattn"], ["a", "b" * 30]], 40)]
    yield (
        "words",
        [*words, text.cost_text(12345.678), text.cost_text(None), text.number(3.14159, 2), text.clean("\x1b[3m")],
    )


def test_what_a_report_reads_out_of_trials_stays():
    assert not changed("summaries")
