"""`evoattn search` on a terminal: the study under a live display, then its result."""

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

from rich.console import Console

from evoattn import report
from evoattn.cli.common import kept_in, unusual
from evoattn.cli.display import Display
from evoattn.correctness import sanitizer
from evoattn.engine.progress import Progress
from evoattn.engine.tools import SearchError, Tools
from evoattn.evaluation.imports import why_slow
from evoattn.model.records import Study
from evoattn.report.text import WIDEST, command, print_lines, print_text
from evoattn.samplers.base import Sampler
from evoattn.search.early_start import EarlyStart
from evoattn.search.kept import keep_leader
from evoattn.search.machines import Machines
from evoattn.search.request import SearchWords
from evoattn.search.setup import PreparedSearch, make_search
from evoattn.storage.versions import collect, differences


def _workers(progress: Progress) -> str:
    return "GPU worker" if progress.boards == 1 else f"{progress.boards} GPU workers"


def _boards(progress: Progress) -> str:
    """How far the boards of a search are apart."""
    factors = progress.speeds
    least = min(factors.values())
    slower = ", ".join(f"{name} {factor / least - 1:.1%}" for name, factor in factors.items() if factor > least)
    fastest = min(factors, key=lambda name: factors[name])
    return f"Boards by the reference kernel: {fastest} is the fastest; slower by: {slower or 'nothing'}."


def _why_nothing(sampler: Sampler) -> str:
    """Why not one config could be proposed: what most draws were refused for, without its numbers, which differ."""
    common = sampler.rejected.most_common(1)
    why = f"; most were refused like this (N for a number): {common[0][0]}" if common else "."
    return f"No config of the chosen part of the space is valid for this problem{why}"


def _why_not_sanitized(prepared: PreparedSearch) -> str:
    if prepared.plan.device is None:
        return "nothing runs on a device in an offline search."
    return "" if sanitizer.find() else sanitizer.NOT_INSTALLED


def _say_earlier(prepared: PreparedSearch, earlier: Study, console: Console) -> None:
    leaders = prepared.storage.leaderboard(earlier, 1)
    best = f", best {leaders[0].timing.median_us:.2f} µs" if leaders and leaders[0].timing else ""
    trials = sum(prepared.storage.counts(earlier).values())
    print_text(console, f"Searched before, in study {earlier.name} ({trials} trials{best}). To go on with that one:")
    _print_resume(prepared, earlier, console)


def resume_command(words: SearchWords, study: str) -> list[list[str]]:
    """The command that goes on with a study as `words` asked for it, by groups of words: what the study itself does not
    keep is said again."""
    places = {"--devices": words.devices, "--ray": words.ray, "--jobs": words.jobs, "--db": unusual(words.db)}
    again = [[name, str(value)] for name, value in places.items() if value is not None]
    sanitize = [["--sanitize"]] if words.sanitize else []
    return [["evoattn", "search"], ["--resume"], ["--study", study], *again, *sanitize]


def _print_resume(prepared: PreparedSearch, study: Study, console: Console) -> None:
    print_lines(console, command(resume_command(prepared.words, study.name), min(console.width, WIDEST)))


def run_search(
    prepared: PreparedSearch,
    machines: Machines,
    console: Console,
    tools: Tools | None = None,
    early: EarlyStart | None = None,
    why_slow: Callable[[ModuleSpec | None], str] = why_slow,
) -> bool:
    """Run the study under a live display, then print its result; whether a kernel was right, or the search was
    interrupted. `early`: see `make_search`. `why_slow`: a sentence on torch's import, or none. Raises `SearchError`
    where no config was valid."""
    storage, study, wanted = prepared.storage, prepared.study, prepared.plan
    try:
        print_text(console, f"Study {study.name}.")
        if prepared.words.resume:
            print_text(console, f"Problem {wanted.problem.describe()}, on {wanted.gpu.name}.")
        if prepared.earlier:
            _say_earlier(prepared, prepared.earlier, console)
        here = collect(wanted.device)
        storage.use_environment(here)
        if changed := differences(study.versions, here):
            print_text(console, f"Note: not as when the study was made: {'; '.join(changed)}.")
        if prepared.words.sanitize and (why_not := _why_not_sanitized(prepared)):
            print_text(console, f"Note: --sanitize does nothing: {why_not}")
        if wanted.device and (slow := why_slow(find_spec("torch"))):
            print_text(console, f"Note: {slow}")
        interrupted = _search(prepared, machines, console, tools, early)
        from evoattn.report.screen import print_result  # imports NumPy, for which the start of a search does not wait

        summary = report.summarise(storage, study, 1, course=False)
        print_result(summary, console, kept_in(storage, study, prepared.words.db))
        if prepared.words.keep and (said := keep_leader(prepared)):
            print_text(console, said)
        return interrupted or summary.winner is not None
    finally:
        storage.close()


def _search(
    prepared: PreparedSearch, machines: Machines, console: Console, tools: Tools | None, early: EarlyStart | None
) -> bool:
    """Whether it was interrupted."""
    storage, study, wanted, budget = prepared.storage, prepared.study, prepared.plan, prepared.budget
    title = f"evoattn search --gpu {wanted.gpu.name} --budget {prepared.words.budget}"
    with storage.lock_study(study):
        running = make_search(prepared, machines, tools, early)
        with Display(console, running.progress, title, budget.seconds, budget.trials) as display:
            progress = running.run(budget, display.refresh)
    if running.exhausted and not progress.recorded and progress.best is None:
        raise SearchError(_why_nothing(running.sampler))
    ended = "interrupted" if running.interrupted else "space exhausted" if running.exhausted else "budget spent"
    print_text(
        console,
        f"Done ({ended}): {progress.recorded} candidate{'s' * (progress.recorded != 1)} in {progress.seconds:.1f} s, "
        f"{progress.candidates_per_second:.2f} per second; {progress.starting_seconds:.1f} s to start"
        + (f"; {_workers(progress)} busy {progress.busy_share:.0%} of the time." if wanted.device else "."),
    )
    if running.interrupted:
        print_text(console, "To go on with it:")
        _print_resume(prepared, prepared.study, console)
    if progress.speeds:
        print_text(console, _boards(progress))
    if ended == "budget spent" and not progress.measured:
        print_text(
            console,
            f"Note: the budget of {prepared.words.budget} ended before a candidate was measured; give more, for "
            "example --budget 30s.",
        )
    for note in progress.notes:
        print_text(console, f"Note: {note}")
    return running.interrupted
