"""Are picks on cards that nobody measured as good as the best known-good config, by the cost model?

For problems as people have them, on each card, the score of the pick over the least score of all configs that are known
to be good for the card's families that may win: the starting configs of their search spaces, and kernels of shipped
portfolios that the card can run. With `--compile` NVRTC compiles each different pick for the card, and it is counted of
how many the registers leave room for fewer blocks on an SM than the family's estimate said. Scores are no times: this
says that the choice does what the cost model can, and nothing of the model itself."""

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from evoattn.backends.compiler import CompileError, compile_source
from evoattn.cost.cost import scores
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.families.render import render
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio.kernels import DATA, load
from evoattn.portfolio.pick import canonical, pick
from evoattn.portfolio.workload import draw

CARDS = ("a100", "a100-80gb", "a10", "l4", "l40s", "rtx3090", "rtx4090", "rtx5090", "rtxpro6000", "b200")
MOST = 1.02
"""A pick's score over that of the best known-good config."""
SEEDS = range(8000, 8005)


@dataclass(frozen=True)
class Judged:
    """A pick beside the best known-good config of its problem."""

    problem: AttentionProblem
    picked: KernelConfig | None
    best: KernelConfig
    ratio: float
    """Of their scores; infinite where there is no pick."""
    failure: str = ""
    """What the compiler said against the pick."""
    fewer: bool = False
    """By the compiler's registers fewer of its blocks fit on an SM than by the estimate."""

    @property
    def misses(self) -> bool:
        return self.ratio > MOST or bool(self.failure)


def known_good(problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """Configs that are known to be good and that can serve the problem on the card."""
    able = registry.contenders(problem, gpu)
    found = [c for name in able for c in load_space(name, gpu).starting_configs()]
    for path in DATA.glob("*.json"):
        listed = load(path.stem)
        found += [c for c in listed.kernels if c.family in able] if listed else []
    return [c for c in found if not registry.lookup(c.family).why_impossible(problem, c, gpu)]


def judged(problem: AttentionProblem, gpu: GpuSpec) -> Judged | None:
    """None where no known-good config can serve the problem. Both are scored on the lengths that picks are made for."""
    about = canonical(problem)
    known = list({c.id: c for c in known_good(about, gpu)}.values())
    if not known:
        return None
    found = scores(about, known, gpu)
    least = min(range(len(known)), key=lambda i: found[i])
    picked = pick(problem, gpu)
    if picked is None:
        return Judged(problem, None, known[least], math.inf)
    return Judged(problem, picked.config, known[least], scores(about, [picked.config], gpu)[0] / found[least])


def compiled(rows: Iterable[Judged], gpu: GpuSpec) -> Iterator[Judged]:
    """The rows, with what NVRTC says of their picks."""
    known: dict[str, tuple[str, int]] = {}
    for row in rows:
        if row.picked is None:
            yield row
            continue
        family = registry.lookup(row.picked.family)
        source = render(family, row.problem, row.picked, gpu).source
        if source not in known:
            try:
                known[source] = "", compile_source(source, gpu.arch).info.registers
            except CompileError as error:
                known[source] = str(error).splitlines()[0], 0
        failure, registers = known[source]
        expected, found = (family.work(row.problem, row.picked, n)[0] for n in (0, registers))
        fits, fit = (gpu.blocks_resident(w.registers, w.threads, w.smem_bytes) for w in (found, expected))
        yield replace(row, failure=failure, fewer=fits < fit)


def of_card(name: str, problems: list[AttentionProblem], compiles: bool) -> list[Judged]:
    """The rows of a card."""
    gpu = GPUS[name]
    rows = [row for problem in problems if (row := judged(problem, gpu))]
    return list(compiled(rows, gpu)) if compiles else rows


def summary(name: str, rows: list[Judged]) -> str:
    """A row of the table."""
    able = [row.ratio for row in rows if math.isfinite(row.ratio)] or [math.nan]
    families = Counter(row.picked.family for row in rows if row.picked)
    words = ", ".join(f"{family} {count}" for family, count in families.most_common())
    failed = sum(bool(row.failure) for row in rows)
    return (
        f"| {name} | {len(rows)} | {math.exp(fmean(map(math.log, able))):.3f} | {max(able):.3f} "
        f"| {sum(row.ratio > MOST for row in rows)} | {failed} | {sum(row.fewer for row in rows)} | {words} |"
    )


def main() -> int:
    """0 if every pick of every card is near enough and compiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", default=",".join(CARDS), metavar="NAME,…")
    parser.add_argument("--count", type=int, default=100, metavar="N", help="problems of each card")
    parser.add_argument("--compile", action="store_true", help="compile each different pick by NVRTC")
    parser.add_argument("--jobs", type=int, default=1, metavar="N")
    parser.add_argument("--misses", type=int, default=5, metavar="N", help="of each card that are printed")
    words = parser.parse_args()
    each = math.ceil(words.count / len(SEEDS))
    problems = [p for seed in SEEDS for p in draw(seed, each)][: words.count]
    names, started = words.cards.split(","), time.monotonic()
    columns = "card", "problems", "geomean", "worst", "over 1.02", "do not compile", "fewer blocks an SM", "families"
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    missed = 0
    work = partial(of_card, problems=problems, compiles=words.compile)
    with ProcessPoolExecutor(words.jobs) as workers:
        for name, rows in zip(names, workers.map(work, names), strict=True):
            print(summary(name, rows), flush=True)
            bad = sorted((row for row in rows if row.misses), key=lambda row: -row.ratio)
            missed += len(bad)
            for row in bad[: words.misses]:
                mine = f"{row.picked.family} {row.picked.describe()}" if row.picked else "no pick"
                print(f"  {row.ratio:.3f} {row.problem.describe()}: {mine} {row.failure}")
                print(f"        best: {row.best.family} {row.best.describe()}")
    print(f"{missed} misses; {time.monotonic() - started:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
