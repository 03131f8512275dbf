"""What the shipped portfolio loses on problems that it was not built from, on the GPU that is here.

    python scripts/portfolio_check.py --seeds 71,72 --count 60 [--seconds 10] [--peers flash,cudnn,efficient,fa3,fa4] [-o OUT.json]

For each problem the pick, and the best kernels of a search of so many seconds that starts from it, are timed in turns with every peer.
Regret is the pick's time over the best of them. All searches run at once in one set of processes, each with its share of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from statistics import fmean, quantiles

from evoattn.model.gpu import detect_devices
from evoattn.portfolio.campaign import FAMILIES
from evoattn.portfolio.engine.engine import Engine
from evoattn.portfolio.engine.kernel import Group, Kernel
from evoattn.portfolio.features import class_of
from evoattn.portfolio.pick import pick, portfolio_kernels
from evoattn.portfolio.workload import draw

FINALISTS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="71")
    parser.add_argument("--count", type=int, default=60, help="problems in all")
    parser.add_argument("--seconds", type=float, default=10, help="of search per problem")
    parser.add_argument("--peers", default="flash,cudnn,efficient,fa3,fa4")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("-o", "--output", type=Path)
    words = parser.parse_args()
    device = detect_devices()[0]
    gpu, seeds = device.spec, [int(s) for s in words.seeds.split(",")]
    problems = [p for seed in seeds for p in draw(seed, math.ceil(words.count / len(seeds)))][: words.count]
    picks = [pick(p, gpu) for p in problems]
    groups = []
    for i, (problem, chosen) in enumerate(zip(problems, picks, strict=True)):
        group = Group(f"{i} {problem.describe()}", [problem], FAMILIES[class_of(problem).split()[0]])
        first = [(chosen.family, chosen.config.params)] if chosen else []
        group.given = first + [(c.family, c.params) for c in portfolio_kernels(problem, gpu)]
        groups.append(group)
    rows, started = [], time.monotonic()
    with Engine(groups, gpu, most=1) as engine:
        engine.run(words.seconds * len(groups))
        print(
            f"searched for {time.monotonic() - started:.0f} s: {engine.compiled} compiles, {engine.measured} times",
            flush=True,
        )
        for group, problem, chosen in zip(groups, problems, picks, strict=True):
            rows.append(_row(engine, group, problem, chosen, words))
            print(_line(rows[-1]), flush=True)
            if words.output:
                words.output.write_text(json.dumps({"device": device.product, "seeds": seeds, "rows": rows}))
    print(summary(rows))


def _row(engine, group, problem, chosen, words) -> dict:
    ours = Kernel(chosen.family, chosen.config.params) if chosen else None
    wrong = engine.prove(group, 0, ours) if ours else "no pick"
    finalists = [k for k in group.leaders(0, FINALISTS + 1) if ours is None or k.id != ours.id][:FINALISTS]
    contestants = ([ours] if ours else []) + finalists
    times, peers, refusals = engine.final(group, 0, contestants, words.rounds, tuple(words.peers.split(",")))
    known = [t for t in times if t]
    best = min(known) if known else None
    winner = contestants[times.index(best)] if best else None
    return {
        "problem": problem.describe(),
        "class": class_of(problem),
        "pick": ours and [ours.family, ours.params],
        "wrong": wrong,
        "pick_us": times[0] if ours else None,
        "best_us": best,
        "winner": winner and [winner.family, winner.params],
        "candidates": len(group.kernels),
        "peers": peers,
        "refusals": refusals,
        "regret": times[0] / best if ours and times[0] and best else None,
    }


def _line(row: dict) -> str:
    peers = min(row["peers"].items(), key=lambda p: p[1], default=("-", math.nan))
    regret = f"{row['regret']:.3f}" if row["regret"] else "-"
    ours = row["pick_us"] or math.nan
    return (
        f"{regret:>6} {ours:9.2f} µs, best of {row['candidates']:4} {row['best_us'] or math.nan:9.2f}, {peers[0]:>9} {peers[1]:9.2f} "
        f"({ours / peers[1]:.2f}) {row['problem']} {row['wrong'][:60]}"
    )


def summary(rows: list[dict]) -> str:
    regrets = [r["regret"] for r in rows if r["regret"]]
    sdpa = [
        (r["pick_us"], min(us for n, us in r["peers"].items() if n not in ("fa3", "fa4")))
        for r in rows
        if r["pick_us"] and any(n not in ("fa3", "fa4") for n in r["peers"])
    ]
    every = [(r["pick_us"], min(r["peers"].values())) for r in rows if r["pick_us"] and r["peers"]]
    worst = sorted((r for r in rows if r["regret"]), key=lambda r: -r["regret"])[:10]
    lines = [
        f"{len(rows)} problems, {len(regrets)} with a pick, {sum(bool(r['wrong']) for r in rows)} wrong or without",
        f"regret: geomean {math.exp(fmean(map(math.log, regrets))):.4f}, 95th percentile {quantiles(regrets, n=20)[-1]:.3f}, worst {max(regrets):.3f}",
        f"ahead of the best SDPA backend on {sum(a < b for a, b in sdpa)} of {len(sdpa)}, of every peer on {sum(a < b for a, b in every)} of {len(every)}",
        "worst:",
        *(f"  {r['regret']:.3f} {r['problem']}: {r['pick'][0]} -> {r['winner'][0]}" for r in worst),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
