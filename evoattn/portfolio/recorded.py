"""Where campaigns may begin beside their own kernels: the fastest of recorded landscapes (`evoattn/samplers`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evoattn.portfolio.strata import group_of
from evoattn.samplers import landscape


def fastest(paths: Iterable[Path], each: int) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """By bits: the `each` fastest configs of every problem, (family, params), once. Raises `OSError`."""
    found: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {}
    for recorded in landscape.load(*paths):
        timed = [(us, config) for config in recorded.configs if (us := config.best_us) and not config.rough]
        of_bits = found.setdefault(group_of(recorded.problem).split()[0], {})
        for _, config in sorted(timed, key=lambda entry: entry[0])[:each]:
            of_bits[f"{config.family} {config.params}"] = config.family, config.params
    return {bits: list(configs.values()) for bits, configs in found.items()}
