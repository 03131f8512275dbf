"""What was won and by which genes: the improvements of a study in order, and the paired effect of each gene's values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import median

from evoattn.model.records import Trial
from evoattn.report.analysis import ancestor, value_of
from evoattn.report.data import GeneValue, Improvement, Progress

MIN_PAIRS = 3
TOP_SHARE = 0.05


def improvements(progress: Progress, trials: dict[int, Trial], offline: bool) -> tuple[Improvement, ...]:
    """Each new best in the order found, with its gain over the best before it and its genes against its best parent."""
    found, before = [], None
    for index in progress.improvements:
        value = progress.value[index]
        gain = None if before is None else 1 - value / before
        found.append(
            Improvement(progress.elapsed_s[index], gain, ancestor(trials[progress.trial[index]], trials, offline))
        )
        before = value
    return tuple(found)


def gene_values(trials: Iterable[Trial], offline: bool) -> tuple[GeneValue, ...]:
    """For each gene's value: its share among the best twentieth of its family's right trials and among all of them, and its paired effect.

    The effect is the median, over pairs of trials that differ in this gene alone, of the time with the value over the best time with
    any other value; None below `MIN_PAIRS` pairs. Genes with one value are left out.
    """
    families: dict[str, list[tuple[dict, float, int]]] = defaultdict(list)
    for trial in trials:
        value = value_of(trial, offline)
        if value is not None:
            families[trial.family].append((trial.config, value, sum(map(hash, trial.config.items()))))
    rows = []
    for family, results in families.items():
        results.sort(key=lambda result: result[1])
        top = results[: max(1, round(TOP_SHARE * len(results)))]
        for name in results[0][0]:
            having = [entry for entry in results if name in entry[0]]
            everywhere = Counter(config[name] for config, _, _ in having)
            if len(everywhere) < 2:
                continue
            best = Counter(config[name] for config, _, _ in top if name in config)
            effects = _effects(name, having)
            rows += [
                GeneValue(
                    family,
                    name,
                    gene,
                    best[gene] / len(top),
                    count / len(results),
                    median(effects[gene]) if len(effects[gene]) >= MIN_PAIRS else None,
                    len(effects[gene]),
                )
                for gene, count in sorted(everywhere.items(), key=lambda item: -best[item[0]])
            ]
    return tuple(rows)


def _effects(name: str, results: list[tuple[dict, float, int]]) -> dict:
    """Gene value → ratios to the best other value of the same background; `results` best first, so that the first of each is its best.

    `results` are (config, value, sum of the hashes of its genes): the sum without this gene's stands for the background, for speed.
    """
    backgrounds: dict[int, dict] = defaultdict(dict)
    for config, value, whole in results:
        backgrounds[whole - hash((name, config[name]))].setdefault(config[name], value)
    ratios = defaultdict(list)
    for times in backgrounds.values():
        if len(times) > 1:
            for gene, value in times.items():
                ratios[gene].append(value / min(other for key, other in times.items() if key != gene))
    return ratios
