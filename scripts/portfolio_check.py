"""What the shipped portfolio loses on problems that it was not built from, on the GPU that is here.

    python scripts/portfolio_check.py --seeds 71,72 --count 60 [--seconds 10] [--peers flash,cudnn,efficient,fa3,fa4]
    python scripts/portfolio_check.py --seeds 71 --variants packed,cached,paged,latent,biased --count 20
    python scripts/portfolio_check.py --problem mistral_prefill --problem t5_bias [--seconds 10] [--peers cudnn,flex]

For each problem the pick, the best kernels of a search of so many seconds that starts from it and from the families'
starting configs (`--family NAME`: of these families alone), and every peer are timed in turns. Regret is the pick's
time over the best of ours. All searches run at once in one set of processes, each with its share of the time. -o FILE
keeps all rows as JSON. `--configs FILE` names kernels that take part in the finals too, and `--winners FILE` keeps the
best of each, both as `evoattn bench --configs` takes them. `--table FILE` keeps the times and spreads in the form of
`evoattn bench --format json`, for scripts/results_page.py.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from evoattn.bench.contenders import read_configs
from evoattn.families import registry
from evoattn.model.gpu import GpuSpec, detect_devices
from evoattn.model.named_problems import by_name_or_shape
from evoattn.model.space import ConfigError, load_space
from evoattn.peers.table import PEERS
from evoattn.portfolio.check import Checked, check, make_group, summary
from evoattn.portfolio.draws import DRAWS, PLAIN, draw_all
from evoattn.portfolio.engine.engine import Engine
from evoattn.portfolio.engine.kernel import Group, Kernel
from evoattn.portfolio.pick import pick
from evoattn.search.starting import MOST_OF_A_FAMILY, starting_configs

WINNERS = 3
"""Kernels of each problem that `--winners` keeps."""


def winner_lines(group: Group, row: Checked, gpu: GpuSpec) -> list[str]:
    """The fastest of the final and the next ones of the search, as `read_configs` takes them."""
    problem = group.problems[0]
    best = [row.winner] if row.winner else []
    best += [(kernel.family, kernel.params) for kernel in group.leaders(0, WINNERS)]
    distinct = [kernel for i, kernel in enumerate(best) if kernel not in best[:i]][:WINNERS]
    about = {"problem": problem.to_dict(), "arch": gpu.arch, "median_us": row.best_us}
    return [json.dumps(about | {"family": family, "config": params}) + "\n" for family, params in distinct]


def known_kernels(file: Path, group: Group, gpu: GpuSpec) -> list[Kernel]:
    """Those of the file for the group's problem that today's families and spaces have."""
    problem, found = group.problems[0], []
    for family, params in read_configs(file, problem, gpu.arch):
        try:
            config = load_space(family, gpu).make_config(params)
        except ConfigError:
            continue
        if not registry.lookup(family).why_invalid(problem, config, gpu):
            found.append(Kernel(family, config.params))
    return found


def bench_row(group: Group, row: Checked) -> dict[str, Any]:
    """The row as `evoattn bench` writes it; without a time of ours where it proved wrong."""
    problem = group.problems[0]

    def time_of(name: str, us: float) -> dict[str, float]:
        low, high = row.spreads.get(name, (us, us))
        return {"median_us": us, "p10_us": low, "p90_us": high}

    us, (family, config) = (row.best_us or 0.0, row.winner) if row.winner and not row.fault else (0.0, ("", {}))
    return {
        "problem": problem.to_dict(),
        "describe": problem.describe(),
        "ours": time_of("ours", us) if us else None,
        "tflops": problem.flops / us / 1e6 if us else None,
        "family": family,
        "config": config,
        "peers": {name: time_of(name, us) for name, us in row.peers.items()},
        "versions": {name: PEERS[name].version(problem) for name in row.peers},
        "refusals": row.refusals,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="71")
    parser.add_argument("--count", type=int, default=60, help="problems in all")
    parser.add_argument("--variants", default=PLAIN, help=f"kinds by commas, of {', '.join(DRAWS)}")
    parser.add_argument("--problem", action="append", default=[], help="a name or a shape, in place of drawn ones")
    parser.add_argument("--family", action="append", default=[], help="that the searches look at; may be repeated")
    parser.add_argument("--seconds", type=float, default=10, help="of search per problem")
    parser.add_argument("--peers", default="flash,cudnn,efficient,fa3,fa4")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--jobs", type=int, help="compile processes")
    parser.add_argument("--configs", type=Path, help="kernels that take part in the finals")
    parser.add_argument("--winners", type=Path, help="where the best kernels go")
    parser.add_argument("--table", type=Path, help="where the bench's form of the rows goes")
    parser.add_argument("-o", "--output", type=Path)
    words = parser.parse_args()
    device = detect_devices()[0]
    gpu, seeds = device.spec, [int(seed) for seed in words.seeds.split(",")]
    drawn = draw_all(words.variants.split(","), seeds, words.count)
    problems = [by_name_or_shape(text) for text in words.problem] or drawn
    picks = [pick(p, gpu) for p in problems]
    groups = [make_group(i, p, picks[i], gpu) for i, p in enumerate(problems)]
    for group in groups:
        group.families = tuple(words.family) or group.families
        group.given += [
            (family, config.params)
            for family in group.families
            for config in starting_configs(load_space(family, gpu), group.problems[0], gpu)[:MOST_OF_A_FAMILY]
        ]
    rows: list[Checked] = []
    table: list[dict[str, Any]] = []
    started = time.monotonic()
    with Engine(groups, gpu, words.jobs, most=1) as engine:
        engine.run(words.seconds * len(groups))
        took = time.monotonic() - started
        print(f"searched for {took:.0f} s: {engine.compiled} compiles, {engine.measured} times", flush=True)
        known_of = [known_kernels(words.configs, group, gpu) if words.configs else [] for group in groups]
        engine.compile_all([(group, kernel) for group, known in zip(groups, known_of, strict=True) for kernel in known])
        for group, chosen, known in zip(groups, picks, known_of, strict=True):
            rows.append(check(engine, group, chosen, words.rounds, tuple(words.peers.split(",")), known))
            print(rows[-1].line(), flush=True)
            if words.problem:
                print(f"   {rows[-1].winner}; {rows[-1].peers}; {rows[-1].refusals}", flush=True)
            if words.winners:
                with words.winners.open("a") as file:
                    file.writelines(winner_lines(group, rows[-1], gpu))
            if words.table:
                table.append(bench_row(group, rows[-1]))
                words.table.write_text(json.dumps(table, indent=1))
            if words.output:
                kept = {"device": device.product, "seeds": seeds, "rows": [r.to_dict() for r in rows]}
                words.output.write_text(json.dumps(kept))
    print(summary(rows))


if __name__ == "__main__":
    main()
