"""Kernels of all families: digests of what is decided of them before any is compiled, which is constants, launches,
scratch, the work that the cost model counts, refusals and cases of the checks; and faults that the interpreter finds in
them.

    python -m tests.families.decisions            write tests/data/decisions.json anew, after a change that is wanted

A new family's configs are drawn by `tests.mutation.false_alarms`; of the others those are kept that run most lines. A
digest is of the text that `--show FAMILY` prints: compare that of two trees. Faults are mutants of `tests.mutation`, by
their keys; those whose line has changed are left out. `--plant FAMILY` finds others, up to `FAULTS`, in 2 to 20 seconds
each."""

import argparse
import contextlib
import importlib
import inspect
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
from evoattn.model.paths import TEMPLATES
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.records import CompiledKernel, CompileInfo
from evoattn.model.space import KernelConfig
from tests.families.on_interpreter import small_faults
from tests.mutation.false_alarms import draw
from tests.mutation.settings import Setting
from tests.mutation.sources import in_turn, mutants_in, mutants_of
from tests.mutation.verdicts import judge
from tests.support.compiles import ptx_kept
from tests.support.facts import answer, digest, plain

RECORD = Path(__file__).parents[1] / "data" / "decisions.json"
REGISTERS, LEAST, FAULTS, SEED = 96, 8, 12, 1
"""The second and third: configs of each family at least, and faults of one that has few."""


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
    yield (
        "features",
        plain(physics and [physics.terms, physics.memory_us, fixed_features(problem, config, physics, gpu)]),
    )
    yield "refusals", plain(list(_refusals(*asked)))
    yield "resources", plain(list(_resources(problem, config, gpu)))
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
            for edge in _edges(problem, parameter.name, value):
                yield f"{parameter.name}={value} {edge}", family.why_invalid(problem.with_(**edge), other, gpu)
    for name in ("a100", "l4", "h100", "b200"):
        yield name, family.why_unsupported(problem, GPUS[name])
    for field, value in (("head_dim", 40), ("head_dim", 2048), ("lse", True), ("layout", "bshd")):
        if not (field == "head_dim" and (problem.shared_kv or problem.value_dim)):
            yield f"{field}={value}", family.why_unsupported(problem.with_(**{field: value}), gpu)


def _resources(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> Iterator[tuple[str, Any]]:
    """What the family counts of threads, registers and shared memory, also of the configs that differ in one gene."""
    family, told = FAMILIES[config.family], list[tuple[Any, list[str]]]()
    with contextlib.suppress(ModuleNotFoundError):
        for of in vars(importlib.import_module(f"evoattn.families.{family.name}.resources")).values():
            if inspect.isfunction(of) and family.name in of.__module__ and not of.__name__.startswith(("_", "why")):
                told.append((of, list(inspect.signature(of).parameters)))
    for parameter in load_space(family.name, gpu).parameters:
        for value in parameter.values:
            given = {"problem": problem, "genes": family.genes(**config.params | {parameter.name: value})}
            counted = [answer(of, *map(given.get, takes)) for of, takes in told if given.keys() >= {*takes}]
            yield f"{parameter.name}={value}", counted


def _edges(problem: AttentionProblem, gene: str, tile: Any) -> Iterator[dict[str, int]]:
    """Lengths at which a tile is half full, and full, and one more."""
    length = {"M": "seqlen_q", "N": "seqlen_k"}.get(gene.rpartition("_")[2])
    if length and not problem.varlen:
        yield from ({length: of} for of in (max(1, tile // 2), tile // 2 + 1, tile, tile + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--show", metavar="FAMILY", choices=sorted(FAMILIES), help="print what is decided, write nothing"
    )
    parser.add_argument("--plant", metavar="FAMILY", choices=sorted(FAMILIES), help="find faults, if they are few")
    words = parser.parse_args()
    if shown := words.show:
        for row in (row for row in rows() if row["family"] == shown):
            print(json.dumps({name: row[name] for name in ("gpu", "problem", "params")}))
            print(*(f"    {name}: {text}" for name, text in _texts(row)), sep="\n")
        return
    found = [row for row in map(_of_today, rows()) if row]
    found += [row for family in FAMILIES for row in _drawn(family, LEAST - sum(r["family"] == family for r in found))]
    for family in FAMILIES:
        _plant([row for row in found if row["family"] == family], FAULTS if family == words.plant else 0)
    write([row | {"decided": decided(row)} for row in found])


def setting(row: dict[str, Any]) -> Setting:
    return Setting(
        row["family"], AttentionProblem(**row["problem"]), KernelConfig(row["family"], row["params"]), row["gpu"]
    )


def faults_of(row: dict[str, Any], key: str = "", cases: slice | int = slice(None)) -> list[str] | None:
    """What the interpreter's cases, or these of them, find in the row's kernel, with the mutant of this key if one is
    named: nothing in a right one. None if its source has no such place any more."""
    of, gpu = setting(row), GPUS[row["gpu"]]
    source = _changed(of.source, key) if key else of.source
    if source is None:
        return None
    kernel = BuiltKernel(FAMILIES[of.family], of.config, gpu, ptx_kept(source, gpu.arch))
    return small_faults(kernel, of.problem, cases)


def _changed(source: str, key: str) -> str | None:
    file = key.partition(" | ")[0]
    mutant = mutants_in(file).get(key) if (TEMPLATES / file).exists() else None
    return mutant.applied(source) if mutant else None


def _plant(found: list[dict[str, Any]], most: int) -> None:
    """Write into a family's rows the faults that they still have, and others up to so many."""
    settings = [setting(row) for row in found]
    for row, kernel in zip(found, settings):
        row["faults"] = [key for key in row.get("faults", ()) if _changed(kernel.source, key)]
    have = {key for row in found for key in row["faults"]}
    family = found[0]["family"]
    for mutant in in_turn(mutants_of(family), family) if len(have) < most else ():
        if len(have) >= most:
            return
        verdict = judge(mutant, settings, SEED) if mutant.key not in have else None
        if verdict and verdict.killed:
            row = next(row for row, one in zip(found, settings) if one.row() == verdict.setting)
            row["faults"].append(mutant.key)
            have.add(mutant.key)


def _drawn(family: str, count: int) -> list[dict[str, Any]]:
    """Rows of a family that has fewer."""
    rng = random.Random(family)
    return [row_of(family, *draw(family, rng)) for _ in range(count)]


def _of_today(row: dict[str, Any]) -> dict[str, Any] | None:
    """The row without genes that its space no longer has; None if there is no such problem, or no such config of it."""
    try:
        problem = AttentionProblem(**row["problem"])
    except ProblemError:
        return None
    gpu, family = GPUS[row["gpu"]], FAMILIES[row["family"]]
    space = load_space(family.name, gpu)
    params = space.completed({name: value for name, value in row["params"].items() if name in space.names()})
    if not space.has(params) or family.why_impossible(problem, KernelConfig(family.name, params), gpu):
        return None
    return row | {"params": params}


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
