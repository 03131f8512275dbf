"""The configs that a family's mutants are tried in: few, and between them most lines of the templates."""

from __future__ import annotations

import random
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from tests.mutation.false_alarms import draw_config, draw_problem
from tests.support.compiles import compile_ptx

DRAWN = 4
"""Random configs of which one setting is chosen."""


@dataclass(frozen=True)
class Setting:
    """A config, and what its search is for."""

    family: str
    problem: AttentionProblem
    config: KernelConfig
    gpu: str

    @cached_property
    def source(self) -> str:
        return render(FAMILIES[self.family], self.problem, self.config, GPUS[self.gpu]).source

    @cached_property
    def kernels(self) -> frozenset[str]:
        """Names of those that are launched."""
        launches = FAMILIES[self.family].launches(self.problem, self.config, GPUS[self.gpu])
        return frozenset(launch.kernel for launch in launches)

    @cached_property
    def ptx(self) -> str:
        return compile_ptx(self.source, GPUS[self.gpu].arch)

    @cached_property
    def lines(self) -> frozenset[int]:
        """Lines of the source that have code."""
        text = compile_ptx(self.source, GPUS[self.gpu].arch, "--generate-line-info")
        return frozenset(int(line) for line in re.findall(r"\.loc\s+\d+\s+(\d+)", text))

    def covers(self, place: tuple[int, int]) -> bool:
        """Whether a line at these characters of the source has code."""
        first = self.source.count("\n", 0, place[0]) + 1
        last = self.source.count("\n", 0, place[1]) + 1
        return any(line in self.lines for line in range(first, last + 1))

    def launched(self, ptx: str) -> str:
        """What PTX says of the kernels that are launched."""
        return "".join(self.by_kernel(ptx).values())

    def by_kernel(self, ptx: str) -> dict[str, str]:
        """The same by their names."""
        parts = re.split(r"(?=\.visible \.entry )", ptx)
        names = [re.match(r"\.visible \.entry (\w+)", part) for part in parts]
        return {name[1]: part for part, name in zip(parts, names) if name and name[1] in self.kernels}

    def row(self) -> dict[str, Any]:
        """As JSON; `from_row` reads it."""
        row = {"family": self.family, "params": self.config.params, "gpu": self.gpu}
        return row | {"problem": asdict(self.problem)}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Setting:
        config = load_space(row["family"], GPUS[row["gpu"]]).make_config(row["params"])
        return cls(row["family"], AttentionProblem(**row["problem"]), config, row["gpu"])

    def __str__(self) -> str:
        return f"{self.config.describe()} on {self.gpu}, {self.problem.describe()}"


def drawn_settings(family: str, count: int, seed: int) -> list[Setting]:
    """DRAWN · `count` of them at random, for an H100 or an L4."""
    rng, drawn = random.Random(f"{family} {seed}"), []
    for _ in range(20 * DRAWN * count):
        gpu = rng.choice(("h100", "l4"))
        problem, gpu = draw_problem(family, rng), "h100" if family == "flash_wgmma" else gpu
        config = draw_config(family, problem, gpu, rng)
        if config is not None:
            drawn.append(Setting(family, problem, config, gpu))
        if len(drawn) == DRAWN * count:
            break
    return drawn


def with_lines(setting: Setting) -> Setting:
    """The same, which has looked for its lines: a compile."""
    assert setting.lines
    return setting


def with_most_lines(drawn: list[Setting], count: int) -> list[Setting]:
    """`count` of them, each of which has the most lines that those before it lack."""
    chosen: list[Setting] = []
    texts = {id(s): _lines_of_text(s) for s in drawn}
    seen: dict[str, int] = {}
    while drawn and len(chosen) < count:
        best = max(drawn, key=lambda s: sum(0.25 ** seen.get(text, 0) for text in texts[id(s)]))
        drawn = [s for s in drawn if s is not best]
        chosen.append(best)
        for text in texts[id(best)]:
            seen[text] = seen.get(text, 0) + 1
    return chosen


def _lines_of_text(setting: Setting) -> frozenset[str]:
    lines = setting.source.splitlines()
    return frozenset(lines[n - 1].strip() for n in setting.lines if n <= len(lines))
