"""How many seconds after Enter a search is within 2 % of the best known, on problems that no prior has seen.

    python scripts/time_to_best.py [--count 6] [--seconds 15] [--random-seconds 30] [--after 0] [--sampler NAME]
                                   [--known rows.json] [-o rows.json]

The problems are drawn from seeds beyond those of portfolios, landscapes and priors. Each is searched by
`evoattn search`, each time in a new database and without the final: begun at the portfolio's kernels, begun at random
configs (`--no-starting-configs`), and, with --after, for so many seconds more from the portfolio with another seed; 0
seconds leave a search out. Best known is the least time of all three, and of the searches in the file of an earlier run
that --known names. The seconds are those between the start of the command and the record of the trial, the start of all
processes and the peers' first times included.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from search_speed import FINAL, Event, run

from evoattn.model.named_problems import lookup, short_name
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Trial
from evoattn.portfolio.workload import draw
from evoattn.search.budget import RESERVE_LEAST

SEEDS = range(400, 500)
BEGUN = ("portfolio", "random")
NEAR = 1.02
LEAST_FLOPS, MOST_FLOPS = 1e8, 2e11
"""Of a problem: beneath, launches take the time; above, candidates take longer than compiles."""


@dataclass(frozen=True)
class Found:
    """One search: best so far in µs after so many seconds from Enter, at each improvement."""

    problem: str
    begun: str
    seconds: list[float]
    us: list[float]
    candidates: int

    def until(self, us: float) -> float | None:
        """Seconds until the best so far is at most `us`; None if never."""
        return next((s for s, t in zip(self.seconds, self.us, strict=True) if t <= us), None)


def problems(count: int) -> list[AttentionProblem]:
    """The first problem of each of the first seeds, within the bounds on operations."""
    able = [[p for p in draw(seed, 20) if LEAST_FLOPS <= p.flops <= MOST_FLOPS] for seed in SEEDS]
    return [found[0] for found in able if found][:count]


def shape(problem: AttentionProblem) -> str:
    """The problem as `--shape` takes it."""
    p = problem
    text = f"B={p.batch},H={p.heads},Hkv={p.kv_heads},Sq={p.seqlen_q},Sk={p.seqlen_k},D={p.head_dim}"
    return f"{text},dtype={p.dtype},mask={p.mask},layout={p.layout}"


def course(events: list[Event], trials: list[Trial]) -> tuple[list[float], list[float]]:
    """(seconds from Enter, µs) of each improvement of the search's own times; a final's are left out."""
    times = {t.number: t.timing.median_us for t in trials if t.timing and t.timing.protocol.get("stage") != "final"}
    seconds, us, best = [], [], math.inf
    for event in events:
        words = event.what.split()
        if words[0] == "trial" and times.get(int(words[1]), math.inf) < best:
            best = times[int(words[1])]
            seconds.append(event.seconds)
            us.append(best)
    return seconds, us


def search(problem: AttentionProblem, begun: str, seconds: float, more: list[str]) -> Found:
    """One search by the command, of so many seconds before its final, which is left out. Raises
    `CalledProcessError`."""
    words = ["--shape", shape(problem), "--budget", f"{seconds + RESERVE_LEAST:g}s", *more]
    with TemporaryDirectory() as folder:
        events, trials, _ = run(words, Path(folder), until=FINAL)
    when, us = course(events, trials)
    return Found(short_name(problem), begun, [round(s, 2) for s in when], us, len(trials))


def best_known(found: list[Found]) -> float:
    """The least time of these searches, in µs; infinite where nothing was right."""
    return min((us for f in found for us in f.us), default=math.inf)


def row(problem: AttentionProblem, found: dict[str, Found], best: float) -> str:
    """A line of the table."""
    cells = [problem.describe()]
    for begun in BEGUN:
        one = found.get(begun)
        seconds = one.until(NEAR * best) if one else None
        if one is None:
            cells += ["-", "-"]
        elif seconds is None:
            cells += [str(one.candidates), f"{min(one.us) / best - 1:+.1%} at the end" if one.us else "none was right"]
        else:
            cells += [str(one.candidates), f"{seconds:.1f}"]
    return f"| {' | '.join(cells)} | {best:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=15, help="of the first search; 0 for none")
    parser.add_argument("--random-seconds", type=float, default=30, help="of the one from random configs; 0 for none")
    parser.add_argument("--after", type=float, default=0, help="of the third; 0 for none")
    parser.add_argument("--problems", nargs="*", default=[], help="named problems in place of drawn ones")
    parser.add_argument("--sampler")
    parser.add_argument("--known", type=Path, help="what an earlier run wrote by -o")
    parser.add_argument("-o", "--output", type=Path)
    words = parser.parse_args()
    chosen = [lookup(name) for name in words.problems] or problems(words.count)
    more = ["--sampler", words.sampler] if words.sampler else []
    known = [Found(**fields) for fields in json.loads(words.known.read_text())] if words.known else []
    searches = {
        "portfolio": (words.seconds, more),
        "random": (words.random_seconds, [*more, "--no-starting-configs"]),
        "portfolio again": (words.after, [*more, "--seed", "1"]),
    }
    rows: list[Found] = []
    needed: dict[str, list[float]] = {begun: [] for begun in BEGUN}
    print("| problem | candidates, portfolio | s to 2 % | candidates, random | s to 2 % | best, µs |\n|" + "---|" * 6)
    for problem in chosen:
        found = {begun: search(problem, begun, *how) for begun, how in searches.items() if how[0]}
        best = best_known([*found.values(), *(f for f in known if f.problem == short_name(problem))])
        for begun in filter(found.get, BEGUN):
            needed[begun].append(found[begun].until(NEAR * best) or math.inf)
        print(row(problem, found, best), flush=True)
        rows += found.values()
        if words.output:
            words.output.write_text(json.dumps([asdict(row) for row in rows]))
    for begun, seconds in needed.items():
        if seconds:
            print(f"median from the {begun} configs: {median(seconds):.1f} s")


if __name__ == "__main__":
    main()
