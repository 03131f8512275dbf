"""Are kernels near a portfolio's that the cost model expects to be faster (`evoattn/portfolio/refine.py`) faster?

    python scripts/portfolio_refined.py --checked CHECK.json… --seeds 101,102,103 --count 60 -o OUT.json

For each problem of checks (`scripts/portfolio_check.py -o`): the kernel of the class that its rule puts first, the one
that the cost model puts first, the steps of the climbs from these and from other shapes, today's pick, the check's pick
and the best that its search found, all timed in turns on the GPU that is here; and what each way to choose loses
against the fastest of them. --no-device GPU: the configs alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import geometric_mean, quantiles
from typing import Any

from evoattn.families.registry import completed
from evoattn.model.gpu import GpuSpec, detect_devices, lookup
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio.campaign import card, families_for
from evoattn.portfolio.draws import PLAIN, draw_all
from evoattn.portfolio.engine.engine import Engine
from evoattn.portfolio.engine.kernel import Group, Kernel
from evoattn.portfolio.pick import class_kernels, climbing_genes, pick
from evoattn.portfolio.refine import A_GENE, LEAST_GAIN, ROUNDS, Costs, Scored, beginnings, climb, genes_from

RULE, CLASS, SHAPE = "rule", "class", "shape"
"""Where a climb begins: the class's kernel by its rule, its others, and other tiles of rows or shares of the keys."""


def contestants(problem: AttentionProblem, row: dict[str, Any], gpu: GpuSpec) -> dict[str, dict[str, Any]]:
    """By label: family and genes, cost, and genes that no kernel of the class has beside its others. `rule 0` is the
    class's kernel by its rule, `rule 2` the second step from there; so for each start."""
    kernels, costs, genes = class_kernels(problem, gpu), Costs(problem, gpu), climbing_genes(gpu)
    found: dict[str, Scored] = {}
    for label, config in (("checked pick", row.get("pick")), ("checked winner", row.get("winner"))):
        if config:
            (found[label],) = costs.of([KernelConfig(config[0], completed(*config))])
    first, *others = beginnings(kernels, problem, gpu, genes, costs)
    starts = {RULE: first}
    of_class = {c.id for c in kernels}
    for number, start in enumerate(others):
        starts[f"{CLASS if start.config.id in of_class else SHAPE}{number}"] = start
    for label, start in starts.items():
        steps = climb(start.config, problem, gpu, ROUNDS, genes.get(start.config.family, {}), costs)
        found |= {f"{label} {step}": scored for step, scored in enumerate(steps)}
    if picked := pick(problem, gpu):
        (found["pick"],) = costs.of([picked.config])
    return {
        label: {
            "config": [one.config.family, one.config.params],
            "cost": one.score,
            "genes": genes_from(kernels, one.config),
        }
        for label, one in found.items()
    }


def chosen(kernels: dict[str, Any], starts: tuple[str, ...], steps: int, a_gene: float) -> dict[str, Any]:
    """The step of least cost of climbs of so many steps that begin at one of `starts`, where a gene that no kernel of
    the class has costs `a_gene` more; the rule's kernel where that one does not save LEAST_GAIN."""
    rule: dict[str, Any] = kernels[f"{RULE} 0"]
    able = [
        one
        for label, one in kernels.items()
        if one["us"] and label.startswith(starts) and int(label.rpartition(" ")[2]) <= steps
    ]
    best: dict[str, Any] = min(able, key=lambda one: one["cost"] * (1 + a_gene * one["genes"]), default=rule)
    return best if best["cost"] < rule["cost"] * (1 - LEAST_GAIN) else rule


RULES: dict[str, tuple[tuple[str, ...], int, float]] = {
    "the class's kernel by its rule": ((RULE,), 0, 0.0),
    "the class's best by the cost model": ((RULE, CLASS), 0, 0.0),
    "a climb from the rule's": ((RULE,), ROUNDS, 0.0),
    "climbs from others of the class, too": ((RULE, CLASS), ROUNDS, 0.0),
    "from other shapes, too": ((RULE, CLASS, SHAPE), ROUNDS, 0.0),
    "the same, few steps": ((RULE, CLASS, SHAPE), 2, 0.0),
    "the same, and few changed genes": ((RULE, CLASS, SHAPE), ROUNDS, A_GENE),
    "and fewer": ((RULE, CLASS, SHAPE), ROUNDS, 2 * A_GENE),
}


def summary(rows: list[dict[str, Any]]) -> str:
    """A row of a table for each rule: what its choice loses against the fastest of all that were timed."""
    timed = [row["kernels"] for row in rows if row["kernels"][f"{RULE} 0"]["us"]]
    least = [min(k["us"] for k in kernels.values() if k["us"]) for kernels in timed]
    lines = ["| choice | problems | geomean | 95th percentile | worst |", "|---|---|---|---|---|"]
    choices = {name: [chosen(kernels, *rule) for kernels in timed] for name, rule in RULES.items()}
    for label in ("pick", "checked pick"):
        if all(kernels.get(label, {}).get("us") for kernels in timed):
            choices[f"the {label}"] = [kernels[label] for kernels in timed]
    for name, kernels in choices.items():
        lost = [one["us"] / us for one, us in zip(kernels, least, strict=True)]
        percentile = quantiles(lost, n=20)[-1] if len(lost) > 1 else lost[0]
        lines.append(f"| {name} | {len(lost)} | {geometric_mean(lost):.3f} | {percentile:.3f} | {max(lost):.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checked", type=Path, nargs="+", required=True)
    parser.add_argument("--seeds", required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--no-device", metavar="GPU")
    parser.add_argument("-o", "--output", type=Path, required=True)
    words = parser.parse_args()
    gpu = lookup(words.no_device) if words.no_device else card(detect_devices()[0].product)
    checked = {row["problem"]: row for path in words.checked for row in json.loads(path.read_text())["rows"]}
    drawn = draw_all([PLAIN], [int(seed) for seed in words.seeds.split(",")], words.count)
    problems = [p for p in drawn if p.describe() in checked]
    started = time.monotonic()
    found = [contestants(p, checked[p.describe()], gpu) for p in problems]
    kernels = [{k.id: k for k in (Kernel(*one["config"]) for one in f.values())} for f in found]
    print(f"{time.monotonic() - started:.1f} s: {sum(map(len, kernels))} configs", flush=True)
    groups = [Group(f"{i} {p.describe()}", [p], families_for(p, gpu)) for i, p in enumerate(problems)]
    rows: list[dict[str, Any]] = []

    def keep(group: Group, times: dict[str, float | None]) -> None:
        row = {n: one | {"us": times.get(Kernel(*one["config"]).id)} for n, one in found[len(rows)].items()}
        rows.append({"problem": group.problems[0].describe(), "kernels": row})
        words.output.write_text(json.dumps(rows))

    if words.no_device:
        for group in groups:
            keep(group, {})
        return
    with Engine(groups, gpu, words.jobs, most=1) as engine:
        engine.run(0)
        engine.compile_all([(g, k) for g, of_group in zip(groups, kernels, strict=True) for k in of_group.values()])
        print(f"{time.monotonic() - started:.1f} s: compiled", flush=True)
        for group, of_group in zip(groups, kernels, strict=True):
            times, _, _ = engine.final(group, 0, list(of_group.values()), words.rounds)
            keep(group, dict(zip(of_group, times, strict=True)))
            print(f"{time.monotonic() - started:.1f} s: {group.name}", flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
