"""Mutants for the device: those of which the interpreter alone says that they are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.validate import check_small_cases
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import GPUS
from evoattn.model.records import CompiledKernel, CompileInfo
from tests.mutation.settings import Setting
from tests.mutation.sources import Mutant, mutants_of
from tests.mutation.verdicts import FAULT, STEPS, Verdict
from tests.support.compiles import compile_ptx

CHOSEN = Path(__file__).with_name("on_device.json")


class AnswersAlone(InterpreterBackend):
    """The interpreter without its detectors: what a lucky order of execution answers."""

    def run(self, compiled: Any, launches: Any, buffers: dict[str, torch.Tensor]) -> tuple[str, ...]:
        self.profile(compiled, launches, buffers)
        return ()


@dataclass(frozen=True)
class Chosen:
    """A mutant in the config in which the interpreter found it, and what it said."""

    key: str
    reason: str
    setting: Setting

    @property
    def mutant(self) -> Mutant:
        """Raises `LookupError` if the templates have changed since."""
        for mutant in mutants_of(self.setting.family):
            if mutant.key == self.key:
                return mutant
        raise LookupError(f"No mutant {self.key} of {self.setting.family} today.")

    def source(self) -> str:
        """The kernel's source with the change. Raises `LookupError` if the templates have changed since."""
        source = self.mutant.applied(self.setting.source)
        if source is None:
            raise LookupError(f"{self.mutant} is not in the kernel of {self.setting} today.")
        return source


def answers_right(chosen: Chosen, seed: int) -> bool:
    """Whether all cases come out right where nobody looks for faults."""
    setting = chosen.setting
    try:
        ptx = compile_ptx(chosen.source(), GPUS[setting.gpu].arch)
        built = BuiltKernel(
            FAMILIES[setting.family], setting.config, GPUS[setting.gpu], CompiledKernel(b"", ptx, CompileInfo())
        )
        return check_small_cases(AnswersAlone(STEPS), built, setting.problem, seed)[-1].passed
    except Exception:  # whatever stops it, it is no mutant that answers right
        return False


def choose(verdicts: Iterable[Verdict], count: int, seed: int) -> list[Chosen]:
    """Of the families in turn: faults on an H100 with right answers, no change twice."""
    by_family: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.verdict == FAULT and verdict.setting["gpu"] == "h100" and "Race" in verdict.reason + verdict.place:
            by_family.setdefault(verdict.family, []).append(verdict)
    found: list[Chosen] = []
    taken: set[str] = set()
    while len(found) < count and any(by_family.values()):
        for left in by_family.values():
            while left:
                verdict = left.pop(0)
                chosen = Chosen(verdict.key, verdict.reason, Setting.from_row(verdict.setting))
                if verdict.key not in taken and answers_right(chosen, seed):
                    taken.add(verdict.key)
                    found.append(chosen)
                    break
    return found[:count]


def save(chosen: Iterable[Chosen], path: Path = CHOSEN) -> None:
    rows = [{"key": c.key, "reason": c.reason, "setting": c.setting.row()} for c in chosen]
    path.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n")


def load(path: Path = CHOSEN) -> list[Chosen]:
    rows = json.loads(path.read_text())
    return [Chosen(r["key"], r["reason"], Setting.from_row(r["setting"])) for r in rows]
