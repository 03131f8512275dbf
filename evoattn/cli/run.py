"""`evoattn search` on a terminal: the study under a live display, then its leaderboard."""

from __future__ import annotations

from rich.console import Console

from evoattn.cli.display import Display, best_sentence
from evoattn.correctness import sanitizer
from evoattn.report import render_table, summarise
from evoattn.samplers.base import Sampler
from evoattn.search.loop import Search, SearchError
from evoattn.search.setup import DEFAULT_CACHE, PreparedSearch, sampler_of
from evoattn.storage.versions import collect, differences

LEADERBOARD_ROWS = 10


def _why_nothing(sampler: Sampler) -> str:
    """Why not one config could be proposed: what most draws were refused for, without its numbers, which differ from draw to draw."""
    common = sampler.rejected.most_common(1)
    why = f"; most were refused like this (N for a number): {common[0][0]}" if common else "."
    return f"No config of the chosen part of the space is valid for this problem{why}"


def _why_not_sanitized(prepared: PreparedSearch) -> str:
    if prepared.device is None:
        return "nothing runs on a device in an offline search."
    return "" if sanitizer.find() else sanitizer.NOT_INSTALLED


def run_search(prepared: PreparedSearch, console: Console) -> None:
    """Run the study under a live display, then print its leaderboard."""
    p, storage, study = prepared, prepared.storage, prepared.study
    if p.device:
        console.print(
            f"Searching on the {p.device.product} for {p.problem.describe()} (study {study.name}).", markup=False
        )
    else:
        console.print(
            f"No CUDA device is used: searching offline for the {p.gpu.product} ({p.gpu.arch}); kernels are compiled for it, "
            "checked on the interpreter and ranked by a cost model, never timed.",
            soft_wrap=True,
            markup=False,
        )
        console.print(f"Problem {p.problem.describe()} (study {study.name}).", markup=False)
    here = collect(p.device)
    storage.use_environment(here)
    if changed := differences(study.versions, here):
        console.print(f"Note: not as when the study was made: {'; '.join(changed)}.", markup=False, soft_wrap=True)
    if p.sanitize and (why_not := _why_not_sanitized(p)):
        console.print(f"Note: --sanitize does nothing: {why_not}", markup=False, soft_wrap=True)
    sampler = sampler_of(study.sampler, p.spaces, p.problem, p.gpu, study.seed)
    running = Search(
        storage,
        study,
        p.problem,
        p.gpu,
        p.spaces,
        sampler,
        p.jobs,
        study.options.get("cache", DEFAULT_CACHE),
        p.sanitize,
    )
    title = f"evoattn search --gpu {p.gpu.name} --budget {p.budget_text}"
    with (
        storage.lock_study(study),
        Display(console, running.progress, title, p.budget.seconds, p.budget.trials) as display,
    ):
        progress = running.run(p.budget, display.refresh)
    if running.exhausted and not progress.recorded and progress.best is None:
        raise SearchError(_why_nothing(sampler))
    ended = "interrupted" if running.interrupted else "space exhausted" if running.exhausted else "budget spent"
    console.print(
        f"Done ({ended}): {progress.recorded} candidates in {progress.seconds:.1f} s "
        f"after {progress.starting_seconds:.1f} s of starting workers, {progress.candidates_per_second:.2f} a second"
        + (f"; the GPU worker was busy {progress.busy_share:.0%} of the time." if p.device else "."),
        markup=False,
        soft_wrap=True,
    )
    if ended == "budget spent" and not progress.measured:
        too_small = (
            f"the budget of {p.budget_text} ended before a candidate was measured; give more, for example --budget 30s."
        )
        console.print(f"Note: {too_small}", markup=False)
    for note in progress.notes:
        console.print(f"Note: {note}", markup=False, soft_wrap=True)
    console.print(f"Best: {best_sentence(progress)}.", markup=False)
    render_table(summarise(storage, study, LEADERBOARD_ROWS), console)
    storage.close()
