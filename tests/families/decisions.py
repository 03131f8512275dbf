"""What is decided of kernels before any is compiled, as digests: constants, launches, scratch, the work that the cost
model counts, refusals and cases of the checks.

    python -m tests.families.decisions            write tests/data/decisions.json anew, after a change that is wanted

A new family's configs are drawn by `tests.mutation.false_alarms`; of the others those are kept that run most lines. A
digest is of the text that `--show FAMILY` prints: compare that of two trees.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from evoattn.correctness.cases import proof_of
from evoattn.correctness.interpreter_cases import far_places
from evoattn.cost.cost import physical_part
from evoattn.cost.features import fixed_features
from evoattn.cost.fitted import load
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.records import CompiledKernel, CompileInfo
from evoattn.model.space import KernelConfig
from tests.support.facts import digest, plain

RECORD = Path(__file__).parents[1] / "data" / "decisions.json"
REGISTERS, LEAST = 96, 8
"""The latter: configs of each family."""


def rows() -> list[dict[str, Any]]:
    """Family, GPU, problem and config, and the digests of what is decided of them."""
    found: list[dict[str, Any]] = json.loads(RECORD.read_text())
    return found


def decided(row: dict[str, Any]) -> dict[str, str]:
    """By kind of decision its digest. Raises `ConfigError` where the space no longer has the config."""
    return {name: digest(text) for name, text in _texts(row)}


def _texts(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(kind of decision, what is decided)."""
    family, gpu, problem = FAMILIES[row["family"]], GPUS[row["gpu"]], AttentionProblem(**row["problem"])
    config = load_space(family.name, gpu).make_config(row["params"])
    asked = problem, config, gpu
    yield "tensors", plain([*problem.inputs, *problem.outputs, problem.flops, problem.bytes, problem.describe()])
    yield "constants", plain(family.all_constants(*asked))
    yield "launches", plain(family.launches(*asked))
    yield "scratch", plain([family.workspace(*asked), family.unordered(problem, config)])
    yield "work", plain([family.work(problem, config), family.work(problem, config, REGISTERS)])
    physics = physical_part(*asked, REGISTERS, load())
    yield "features", plain(physics and [physics.terms, fixed_features(problem, config, physics, gpu)])
    yield "refusals", plain(list(_refusals(*asked)))
    yield (
        "device cases",
        plain([(name, p.describe(), kind) for name, p, kind in proof_of(problem).device_cases(problem)]),
    )
    cases = proof_of(problem).interpreter_cases(problem, config)
    yield "interpreter cases", plain([_case(case) for case in cases])
    far = [far_places(case.problem) for case in cases if case.far]
    yield "far places", plain([{name: [len(of), int(of.sum())] for name, of in places.items()} for places in far])
    kernel = BuiltKernel(family, config, gpu, CompiledKernel(b"", "", CompileInfo()))
    placed = [(case.placed(kernel), case.problem) for case in cases]
    yield "launches of cases", plain([[k.launches(small), k.workspace(small)] for k, small in placed])


def _case(case: Any) -> dict[str, Any]:
    said = {f.name: value for f in fields(case) if (value := getattr(case, f.name)) != ""}
    return said | {"problem": case.problem.describe()}


def _refusals(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> Iterator[tuple[str, str | None]]:
    """What is said of the configs that differ in one gene, and of the problem with another dtype, head_dim or card."""
    family, space = FAMILIES[config.family], load_space(config.family, gpu)
    for parameter in space.parameters:
        for value in parameter.values:
            other = KernelConfig(config.family, config.params | {parameter.name: value})
            yield f"{parameter.name}={value}", family.why_invalid(problem, other, gpu)
            yield "at all", family.why_impossible(problem, other, gpu)
    for name in ("a100", "l4", "h100", "b200"):
        yield name, family.why_unsupported(problem, GPUS[name])
    for field, value in (("head_dim", 40), ("head_dim", 2048), ("lse", True), ("layout", "bshd")):
        if not (field == "head_dim" and (problem.shared_kv or problem.value_dim)):
            yield f"{field}={value}", family.why_unsupported(problem.with_(**{field: value}), gpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--show", metavar="FAMILY", choices=sorted(FAMILIES), help="print what is decided, write nothing"
    )
    shown = parser.parse_args().show
    if shown:
        for row in (row for row in rows() if row["family"] == shown):
            print(json.dumps({name: row[name] for name in ("gpu", "problem", "params")}))
            print(*(f"    {name}: {text}" for name, text in _texts(row)), sep="\n")
        return
    found = [row for row in map(_of_today, rows()) if row]
    found += [row for family in FAMILIES for row in _drawn(family, LEAST - sum(r["family"] == family for r in found))]
    write([row | {"decided": decided(row)} for row in found])


def _drawn(family: str, count: int) -> list[dict[str, Any]]:
    """Rows of a family that has fewer."""
    from tests.mutation.false_alarms import draw  # here: the test needs none

    rng = random.Random(family)
    return [row_of(family, *draw(family, rng)) for _ in range(count)]


def _of_today(row: dict[str, Any]) -> dict[str, Any] | None:
    """The row without genes that its space no longer has; None if it lacks one of its values, or there is no such
    problem."""
    try:
        AttentionProblem(**row["problem"])
    except ProblemError:
        return None
    space = load_space(row["family"], GPUS[row["gpu"]])
    known = {name: value for name, value in row["params"].items() if name in space.names()}
    return row | {"params": space.completed(known)} if space.has(space.completed(known)) else None


def write(found: list[dict[str, Any]]) -> None:
    """One row a line."""
    RECORD.write_text("[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n")


def row_of(family: str, gpu: str, problem: AttentionProblem, config: KernelConfig) -> dict[str, Any]:
    """A row without digests; of the problem what is not as usual."""
    usual = {f.name: f.default for f in fields(AttentionProblem)}
    said = {name: value for name, value in asdict(problem).items() if value != usual[name]}
    return {"family": family, "gpu": gpu, "problem": said, "params": config.params}


if __name__ == "__main__":
    main()
