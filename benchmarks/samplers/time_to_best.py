"""How many seconds after Enter a search is within 2 % of the best known, on problems that no prior has seen.

    python -m benchmarks.samplers.time_to_best [--count 6] [--seconds 15] [--random-seconds 30] [--after 0] [--skip 0]
                                   [--sampler NAME] [--known rows.json] [-o rows.json]

The problems are drawn from seeds beyond those of portfolios, landscapes and priors; --skip leaves the first ones out.
Each is searched by `evoattn search`, each time in a new database, with an empty cache of kernels and without the final:
begun at the portfolio's kernels, begun at random configs (`--no-starting-configs`), and, with --after, for so many
seconds more from the portfolio with another seed; 0 seconds leave a search out.

One final of all of them then times each kernel that was the best so far of its search, where its own time is within 6 %
of the least, and the last of each search of that problem in the file that --known names (an earlier run's). The least
time in that final is the best known. The seconds are those between the start of the command and the record of the first
trial that is within 2 % of it there, the start of all processes and the peers' first times included.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from subprocess import CalledProcessError
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.samplers.search_speed import CUBINS, FINAL, Event, run
from evoattn.backends.compiler import compile_candidate, version
from evoattn.backends.kernel_files import KernelFiles
from evoattn.engine.budget import RESERVE_LEAST
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.families.render import render
from evoattn.model.gpu import detect_devices
from evoattn.model.named_problems import by_name_or_shape
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Trial
from evoattn.model.space import KernelConfig, config_id
from evoattn.portfolio.workload import draw
from evoattn.timing.protocol import Protocol

SEEDS = range(2000, 2100)
BEGUN = ("portfolio", "random")
NEAR = 1.02
LEAST_FLOPS, MOST_FLOPS = 1e8, 2e11
"""Of a problem: beneath, launches take the time; above, candidates take longer than compiles."""
ENTERS = 1.06
"""A kernel enters the final up to this many times the least of the searches' own times, which err by 1 to 2 %."""
ROUNDS = Protocol("repeat", 25, 1000.0)
"""As many as in a search's final, without the energy of a call."""


@dataclass(frozen=True)
class Step:
    """A kernel that was its search's best so far, `seconds` after Enter; `us` by the search's own time."""

    seconds: float
    us: float
    family: str
    params: dict[str, Any]
    final_us: float | None = None
    """In the final of all searches; None where it took no part."""

    @property
    def identity(self) -> str:
        return config_id(self.family, self.params)


@dataclass(frozen=True)
class Found:
    """One search."""

    problem: str
    begun: str
    steps: list[Step]
    candidates: int

    def until(self, us: float) -> float | None:
        """Seconds until a kernel had at most `us` in the final; None if none did."""
        return next((s.seconds for s in self.steps if s.final_us is not None and s.final_us <= us), None)

    def judged(self, times: dict[str, float]) -> Found:
        """With the final's µs, by config id."""
        return replace(self, steps=[replace(s, final_us=times.get(s.identity)) for s in self.steps])

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Found:
        return cls(**fields | {"steps": [Step(**step) for step in fields["steps"]]})


def problems(count: int, skipped: int = 0) -> list[AttentionProblem]:
    """The first problem of each of the first seeds, within the bounds on operations; the first `skipped` left out."""
    able = [[p for p in draw(seed, 20) if LEAST_FLOPS <= p.flops <= MOST_FLOPS] for seed in SEEDS]
    return [found[0] for found in able if found][skipped : skipped + count]


def shape(problem: AttentionProblem) -> str:
    """The problem as `--shape` takes it."""
    p = problem
    text = f"B={p.batch},H={p.heads},Hkv={p.kv_heads},Sq={p.seqlen_q},Sk={p.seqlen_k},D={p.head_dim}"
    return f"{text},dtype={p.dtype},mask={p.mask},layout={p.layout},op={p.op}"


def course(events: list[Event], trials: list[Trial]) -> list[Step]:
    """Each improvement of the search's own times; a final's are left out."""
    timed = {t.number: t for t in trials if t.timing and t.timing.protocol.get("stage") != "final"}
    steps: list[Step] = []
    for event in events:
        words = event.what.split()
        trial = timed.get(int(words[1])) if words[0] == "trial" else None
        if trial and trial.timing and (not steps or trial.timing.median_us < steps[-1].us):
            steps.append(Step(round(event.seconds, 2), trial.timing.median_us, trial.family, trial.config))
    return steps


def search(problem: AttentionProblem, begun: str, seconds: float, more: list[str], folder: Path) -> Found:
    """One search by the command, of so many seconds before its final, which is left out. Raises
    `CalledProcessError`."""
    asked = ["--shape", shape(problem), "--budget", f"{seconds + RESERVE_LEAST:g}s", *more]
    events, trials, _ = run(asked, folder, until=FINAL)
    return Found(problem.short_name(), begun, course(events, trials), len(trials))


def finalists(found: Sequence[Found], known: Sequence[Found] = ()) -> list[Step]:
    """Who takes part in the final, each config once."""
    least = min((s.us for f in found for s in f.steps), default=math.inf)
    near = [s for f in found for s in f.steps if s.us <= ENTERS * least]
    last = [f.steps[-1] for f in known if f.steps]
    return list({step.identity: step for step in near + last}.values())


def final(problem: AttentionProblem, steps: Sequence[Step], caches: Sequence[Path]) -> dict[str, float]:
    """µs by config id, in turns. `caches`: of compiled kernels. Needs a CUDA device that evoattn knows."""
    from evoattn.evaluation.device import DeviceEvaluator
    from evoattn.evaluation.tasks import HoldFinal

    gpu = detect_devices()[0].spec
    if gpu is None:
        raise SystemExit("There is no CUDA device that evoattn knows.")
    built = {}
    for step in steps:
        family, config = registry.lookup(step.family), KernelConfig(step.family, step.params)
        source = render(family, problem, config, gpu)
        cache = next((c for c in caches if KernelFiles(c, version()).get(source)), caches[0])
        built[step.identity] = BuiltKernel(family, config, gpu, compile_candidate(source, cache))
    timings = DeviceEvaluator(problem, gpu, peers={}).final(HoldFinal(built, ROUNDS)).timings
    return {name: t.median_us for name, t in timings.items() if t.samples_us and not t.disqualified}


def row(problem: AttentionProblem, found: dict[str, Found], best: float) -> str:
    """A line of the table; `best` in µs."""
    cells = [problem.describe()]
    for begun in BEGUN:
        one = found.get(begun)
        if one is None:
            cells += ["-", "-"]
            continue
        seconds = one.until(NEAR * best)
        least = min((s.final_us for s in one.steps if s.final_us), default=math.inf)
        behind = f"{least / best - 1:+.1%} at the end" if least < math.inf else "far behind at the end"
        cells += [str(one.candidates), behind if seconds is None else f"{seconds:.1f}"]
    return f"| {' | '.join(cells)} | {best:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=15, help="of the first search; 0 for none")
    parser.add_argument("--random-seconds", type=float, default=30, help="of the one from random configs; 0 for none")
    parser.add_argument("--after", type=float, default=0, help="of the third; 0 for none")
    parser.add_argument("--problems", nargs="*", default=[], help="names, or plain shapes, in place of drawn problems")
    parser.add_argument("--skip", type=int, default=0, help="of the drawn problems")
    parser.add_argument("--sampler")
    parser.add_argument("--known", type=Path, help="what an earlier run wrote by -o")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if not (options.seconds or options.random_seconds or options.after):
        parser.error("One of --seconds, --random-seconds and --after is over 0.")
    chosen = [by_name_or_shape(text) for text in options.problems] or problems(options.count, options.skip)
    more = ["--sampler", options.sampler] if options.sampler else []
    known = [Found.read(fields) for fields in json.loads(options.known.read_text())] if options.known else []
    searches = {
        "portfolio": (options.seconds, more),
        "random": (options.random_seconds, [*more, "--no-starting-configs"]),
        "portfolio again": (options.after, [*more, "--seed", "1"]),
    }
    rows: list[Found] = []
    needed: dict[str, list[float]] = {begun: [] for begun in BEGUN}
    print("| problem | candidates, portfolio | s to 2 % | candidates, random | s to 2 % | best, µs |\n|" + "---|" * 6)
    for problem in chosen:
        with TemporaryDirectory() as name:
            folders = {begun: Path(name) / begun for begun, (seconds, _) in searches.items() if seconds}
            found = {}
            for begun, folder in folders.items():
                folder.mkdir()
                try:
                    found[begun] = search(problem, begun, *searches[begun], folder)
                except CalledProcessError as error:  # the others go on
                    print(f"{problem.describe()}, {begun}: {error.stderr[-300:]}", file=sys.stderr)
            steps = finalists([*found.values()], [f for f in known if f.problem == problem.short_name()])
            times = final(problem, steps, [folder / CUBINS for folder in folders.values()]) if steps else {}
        found = {begun: one.judged(times) for begun, one in found.items()}
        best = min(times.values(), default=math.inf)
        for begun in filter(folders.get, BEGUN):  # a search that failed never came near
            needed[begun].append((found[begun].until(NEAR * best) if begun in found else None) or math.inf)
        print(row(problem, found, best), flush=True)
        rows += found.values()
        if options.output:
            options.output.write_text(json.dumps([asdict(row) for row in rows]))
    for begun, seconds in needed.items():
        if seconds:
            print(f"median from the {begun} configs: {median(seconds):.1f} s")


if __name__ == "__main__":
    main()
