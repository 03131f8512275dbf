"""Measure what a portfolio is made from, on the GPU that is here.

    python scripts/portfolio_campaign.py OUT.jsonl.gz [--seconds 360] [--most 24] [--rounds 3] [--after EARLIER…]

All groups of the drawn problems (`evoattn/portfolio/workload.py`, seeds 0 to 49) are searched at once for the time
given; then the best kernels of each are timed in turns on all of its problems. With --after, what earlier campaigns
found is tried first, and their best kernels are among those that are timed at the end (--seconds 0: those alone;
--final-seconds 0: no kernel is timed at the end, and the cost model alone can use the times).

With --variants the problems are those of `evoattn/portfolio/variant_workload.py`, with --variants KIND,KIND… those of
`evoattn/portfolio/kind_workload.py`, e.g. packed,cached,paged,latent,biased, and the searches begin at the kernels that
cover the plain class of each. --variants wide has the problems of `evoattn/portfolio/wide_workload.py`, which no plain
class is near; --landscapes are recorded times, whose fastest kernels are tried first.

With --again the problems are few of each class that no final table of those after --after has; the searches begin at
the shipped kernels and what earlier ones found for them (`evoattn/portfolio/again.py`), and aim at each problem
(`evoattn/portfolio/engine/climbing.py` and `aimed.py`). With --again --count N there are N problems in all, as they are
drawn, or with --emphasis more of the kinds on which picks lose most (`evoattn/portfolio/emphasis.py`). --draw FIRST:END
draws from other seeds than 0 to 49.

With --ahead the problems are those that `portfolio_ahead.py` chose; its compiled kernels are timed while no other waits
for the GPU. Nothing is drawn then.

A host with several GPUs shares the groups out, one process per GPU, e.g. for the second of four:
    CUDA_VISIBLE_DEVICES=1 python scripts/portfolio_campaign.py OUT1.jsonl.gz --share 1/4 --jobs 15
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evoattn.backends.compiler import version
from evoattn.backends.kernel_files import KernelFiles
from evoattn.evaluation.process import Handler
from evoattn.model.gpu import DetectedDevice, GpuSpec, detect_devices
from evoattn.model.problem import AttentionProblem
from evoattn.portfolio import campaign, plan
from evoattn.portfolio.again import groups_again
from evoattn.portfolio.draws import DRAWS, PLAIN, SCORES, drawn
from evoattn.portfolio.engine.ahead import Ahead
from evoattn.portfolio.engine.aimed import AimedBreeder
from evoattn.portfolio.engine.breeding import Breeder
from evoattn.portfolio.engine.climbing import ClimbingBreeder
from evoattn.portfolio.engine.engine import Engine
from evoattn.portfolio.engine.kernel import Group, Kernel
from evoattn.portfolio.engine.stage import Stage
from evoattn.portfolio.final_table import final_tables, timed_problems, with_peers
from evoattn.portfolio.recorded import fastest
from evoattn.portfolio.workload import BUILD_SEEDS

RECORDED_EACH = 3
"""Fastest kernels of each problem of --landscapes."""
SAVE_SECONDS = 30.0
"""Between two saves."""
SAY_SECONDS = 20.0


def earlier(
    paths: list[Path], each: int
) -> tuple[dict[str, list[Any]], dict[str, list[Kernel]], set[AttentionProblem]]:
    """By group: the fastest configs of earlier campaigns' problems, and the `each` kernels of each campaign that cover
    them best, by its final table where it has one. Then the problems of the final tables."""
    given: dict[str, list[Any]] = {}
    timed: set[AttentionProblem] = set()
    best: dict[str, list[Kernel]] = {}
    for path in paths:
        _, groups, tables = campaign.load(path)
        timed |= {g.problems[i] for g in groups if g.name in tables for i in timed_problems(tables[g.name])}
        for group in groups:
            given.setdefault(group.name, []).extend((k.family, k.params) for k in campaign.leaders(group, 3))
            table = tables.get(group.name)
            chosen = campaign.covering(group, table, each) if table else campaign.contenders(group, each)
            best.setdefault(group.name, []).extend(chosen)
    for kernels in best.values():
        for kernel in kernels:  # their times are of other problems
            kernel.times, kernel.rough = {}, set()
    return given, best, timed


def seeds(text: str) -> range:
    """`400:450`."""
    first, _, end = text.partition(":")
    return range(int(first), int(end))


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The words of the command line, unless `given`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument("--most", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--final-seconds", type=float, default=300)
    parser.add_argument("--peers", default="", help="by commas; timed beside the best kernels at last")
    parser.add_argument("--peers-seconds", type=float, default=30)
    parser.add_argument("--each", type=int, default=400)
    parser.add_argument("--problems", type=float, default=1, help="times as many problems as usual")
    parser.add_argument("--new", action="store_true", help="leave out the problems of the earlier final tables")
    parser.add_argument(
        "--variants", nargs="?", const=SCORES, default=PLAIN, help=f"kinds by commas, of {', '.join(DRAWS)}"
    )
    parser.add_argument("--again", action="store_true", help="go on where the campaigns after --after ended")
    parser.add_argument("--count", type=int, default=0, help="problems in all, as they are drawn; with --again")
    parser.add_argument("--emphasis", action="store_true", help="more of the problems that lose most; with --count")
    parser.add_argument("--draw", type=seeds, default=BUILD_SEEDS, metavar="FIRST:END", help="seeds of the problems")
    parser.add_argument("--only", default="", help="groups whose names begin so")
    parser.add_argument("--search", default="", help="words by commas; groups with none in their names are only timed")
    parser.add_argument("--share", default="0/1", help="I/N: the I-th of N shares of the groups")
    parser.add_argument("--jobs", type=int, help="compile processes")
    parser.add_argument("--after", type=Path, nargs="*", default=[])
    parser.add_argument("--ahead", type=Path, metavar="FOLDER", help="what portfolio_ahead.py chose and compiled")
    parser.add_argument("--near", type=int, default=12, help="problems at most that a promising kernel is timed on")
    parser.add_argument("--landscapes", type=Path, nargs="*", default=[])
    words = parser.parse_args(given)
    if (words.count and not words.again) or (words.emphasis and not words.count):
        parser.error("--count needs --again, and --emphasis needs --count.")
    return words


def make_groups(words: argparse.Namespace, gpu: GpuSpec) -> tuple[list[Group], dict[str, list[Kernel]]]:
    """The groups to search, and by group the kernels of earlier campaigns that its final table is to have."""
    problems = drawn(words.variants.split(","), words.draw, words.each)
    if words.again:
        groups, best = groups_again(problems, words.after, gpu, words.count, words.emphasis)
    else:
        given, best, timed = earlier(words.after, words.most)
        without = timed if words.new else set()
        if words.variants != PLAIN:  # the kernels that cover plain classes come first, and must prove themselves
            given = {name: [(k.family, k.params) for k in kernels] for name, kernels in best.items()}
        groups = campaign.make_groups(problems, gpu, given, words.problems, without)
    recorded = fastest(words.landscapes, RECORDED_EACH) if words.landscapes else {}
    for group in groups:
        known = [made for made in recorded.get(group.name.split()[0], ()) if made[0] in group.families]
        group.given = known + group.given
    part, parts = map(int, words.share.split("/"))
    return campaign.shares([g for g in groups if g.name.startswith(words.only)], parts)[part], best


def breeder_of(words: argparse.Namespace) -> type[Breeder]:
    """What proposes kernels."""
    if words.again or words.ahead:
        return ClimbingBreeder
    return Breeder if words.variants == PLAIN else AimedBreeder


class Progress:
    """Says what the search has done, each SAY_SECONDS at most, and saves it, each SAVE_SECONDS."""

    def __init__(self, engine: Engine, groups: list[Group], started: float, save: Callable[[], None]) -> None:
        self._engine, self._groups, self._started, self._save = engine, groups, started, save
        self._said = self._saved = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._saved > SAVE_SECONDS:
            self._saved = now
            self._save()
        if now - self._said <= SAY_SECONDS:
            return
        self._said = now
        kernels = [k for g in self._groups for k in g.kernels.values()]
        states = Counter(k.state.split(":")[0] for k in kernels)
        print(
            f"{now - self._started:5.0f} s: {len(kernels)} kernels {dict(states)}, {self._engine.compiled} compiled, "
            f"{self._engine.measured} times, GPU busy {self._engine.busy_seconds:.0f} s, "
            f"queue {len(self._engine._ready)}",
            flush=True,
        )


def timed_at_last(
    words: argparse.Namespace, engine: Engine, best: dict[str, list[Kernel]], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """The final tables, saved each SAVE_SECONDS at most while they grow."""
    saved, table = time.monotonic(), dict[str, Any]()
    finals = final_tables(engine, words.most, words.rounds, best, words.final_seconds)
    for table in finals if words.final_seconds > 0 else ():
        if time.monotonic() - saved > SAVE_SECONDS:
            saved = time.monotonic()
            save(table)
    save(table)
    return table


def measure(words: argparse.Namespace, device: DetectedDevice, stage: Callable[..., Handler] = Stage) -> None:
    """Search, time at last, and save. `stage`: what the GPU process runs."""
    gpu = device.spec
    assert gpu is not None  # or there would be no device
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s: {text}", flush=True)

    ahead: Ahead | None = None
    if words.ahead:
        groups, planned = plan.load(words.ahead / plan.PLAN)
        best: dict[str, list[Kernel]] = {}
        ahead = Ahead(planned, KernelFiles(words.ahead / plan.KERNELS, version()), gpu)
        say(f"{ahead.left} of {len(planned)} planned kernels are compiled")
    else:
        groups, best = make_groups(words, gpu)
    say(f"{len(groups)} classes, {sum(len(g.problems) for g in groups)} problems")
    breeder = breeder_of(words)
    with Engine(groups, gpu, words.jobs, most=words.near, stage=stage, breeder=breeder, ahead=ahead) as engine:

        def save(table: dict[str, Any]) -> None:
            about = {
                "device": device.product,
                "driver": device.driver,
                "host": platform.node(),
                "seconds": words.seconds,
                "measured": engine.measured,
                "compiled": engine.compiled,
            }
            campaign.save(words.output, groups, about, table)

        searched = [g for g in groups if any(word in g.name for word in words.search.split(","))]
        progress = Progress(engine, groups, started, lambda: save({}))
        engine.run(words.seconds if searched else 0, progress, searched)
        save({})
        left = f", {ahead.left} ahead were not timed" if ahead else ""
        say(f"searched; {engine.measured} times, {engine.compiled} compiled{left}")
        table = timed_at_last(words, engine, best, save)
        say("final tables")
        if words.peers:
            table = with_peers(engine, table, tuple(words.peers.split(",")), words.rounds, words.peers_seconds)
            save(table)
            say("peers")
    for group in groups:
        bad = Counter(k.state[:60] for k in group.kernels.values() if k.state != "right")
        final = len((table.get(group.name) or {}).get("kernels", []))
        print(group.name, len(group.kernels), json.dumps(bad.most_common(3)), final)


def main() -> None:
    measure(parse(), detect_devices()[0])


if __name__ == "__main__":
    main()
