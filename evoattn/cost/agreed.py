"""What several fits say of a few configs: of many the one of least cost is often one whose score errs most, and fits of
other problems and features err in other places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from evoattn.cost.cost import scores
from evoattn.cost.fitted import BESIDE, load
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig


def agreed(
    problem: AttentionProblem, configs: Sequence[KernelConfig], gpu: GpuSpec, files: Sequence[Path] = BESIDE
) -> list[float]:
    """The geometric means of the configs' scores (`evoattn.cost.cost.scores`) by the cost model's fit and by those of
    `files` that are there and know the config's family."""
    found = [[score] for score in scores(problem, configs, gpu)]
    for fitted in (load(file) for file in files if file.exists()):
        known = [i for i, config in enumerate(configs) if config.family in fitted.trees]
        for i, score in zip(known, scores(problem, [configs[i] for i in known], gpu, fitted), strict=True):
            found[i].append(score)
    return [math.exp(math.fsum(map(math.log, own)) / len(own)) for own in found]
