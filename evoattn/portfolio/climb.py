"""From the kernels of a list to one that should be faster on a problem: tiles that fit its lengths, stages, schedules
and so on, step by step by the cost model, which was fitted to all kernels that were ever timed.

What climbs came to is kept in memory and in a file, so that a process need not climb where an earlier one has: a climb,
and reading the cost model before the first, take longer than all else of a first call. A file is of one state of what
decides a climb. Its lines are appended, each by one write, so that processes share it; a line that is not whole has no
right checksum. What cannot be read or written costs a climb, nothing else."""

import hashlib
import math
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from operator import ne
from pathlib import Path

from evoattn.backends import appended
from evoattn.backends.cache_folder import mark_used
from evoattn.cost.correction import correction_of, name_of
from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.paths import FILE, SEARCH_SPACES, calibrations_folder
from evoattn.model.problem import AttentionProblem
from evoattn.model.remembered import remember
from evoattn.model.space import KernelConfig, SearchSpace, Value
from evoattn.portfolio.kernels import Genes

TOGETHER = (
    ("BLOCK_N", "STAGES"),
    ("BLOCK_M", "BLOCKS_PER_SM"),
    ("BLOCK_N", "WARPS"),
    ("GROUP_ROWS", "BLOCK_M"),
    ("BLOCK_M", "STORE"),
    ("KEY_SPLIT", "STORE"),
    ("KEY_SPLIT", "STAGES"),
    ("KEY_SPLIT", "PARTS_MERGE"),
    ("KEY_SPLIT", "BLOCKS_PER_SM"),
    ("GROUP_ROWS", "STORE"),
    ("QUERY_SPLIT", "SPLIT"),
)
"""Genes that are changed both at once, too: what one takes of shared memory or registers the other must leave; blocks
that share keys, and heads that are rows of packed sequences, store by rows."""
SAME = 0.001
"""Costs that differ by no more are the same."""
LEAST_GAIN = 0.01
"""Part of a listed kernel's cost that a climb must save, or that kernel stays. On the problems of A_GENE first choices
lose 1.033 so and without it, 1.035 with twice as much."""
A_GENE = 0.005
"""Part of its cost that a config must save for each gene that no kernel which was fast on such problems has beside its
others. On 286 problems left out of the fit first choices lose 1.033 with nothing, half, as much and half as much again,
1.035 with twice as much (95 % are 1.114 to 1.130)."""
OF_GRADIENTS = 2
"""So many times A_GENE and LEAST_GAIN count for a backward pass. Of 81 problems, each with some 19 kernels timed on an
H100, picks are among the timed ones at 69 so, at 41 with 1, and ahead of FlashAttention 4 at 57 of 66 and 33 of 39."""
OTHER_FAMILY = 12
"""As so many genes a family counts of which no kernel was fast on such problems."""
LIKELY = 2.5
"""Times the least physical part of a family's in a list or a step's neighbours: trees are not asked of those beyond it,
which takes two fifths of a pick. Of 144 drawn problems the best of a list had 2.2 at most, the best of a step 1.7."""
STEPS, STARTS = 5, 3
"""Steps of a climb, and climbs of a pick."""
FAR = 1.25
"""Times the least cost of all starts: a climb from a family's first start has saved a fifth, seldom more."""
ENOUGH = 90
"""Costs that were computed for a pick, from which on no further climb begins: the first call of a shape waits. The list
of plain problems alone has more, so these have one climb. With all climbs the ends cost 0.3 % less at 60 plain problems
and 0.2 % less at 65 with variants, in 38 ms of CPU time for 24 (seeds 4999 and 4998, 2026-11-28). A card that its owner
has calibrated has all climbs."""
UNLIKE = ("BLOCK_M", "BLOCKS_PER_SM", "SPLITS", "KEY_SPLIT"), ("BLOCK_M", "BLOCK_N", "DQ_SUM"), ()
"""For each kernel that a pick races (`Race` of `evoattn/ops/choice.py`) genes in one of which, or in the family, it
differs from those before it, all genes where none are named: those that are alike in them are mostly slow for one
reason. First choices among the kernels timed on 225 plain problems left out of the fit lose 1.032 (95 %: 1.114), the
best of two, three and four so 1.026 (1.089), 1.022 (1.068) and 1.020 (1.067), the best of the first four 1.020 (1.075);
on 239 with variants 1.062 (1.224), 1.045 (1.131), 1.029 (1.098), 1.025 (1.092) and 1.034 (1.116)."""
MOST_RIVAL = 1.25
"""Times the least score: a rival. With 1.1 the best of three tiles loses 1.036 (1.116) on those with variants, with
1.25 1.033 (1.115)."""
MOST_FILLED, LOOKED_AT = 1.6, 16
"""The same where the device alone knows how many keys are in use, and so many kernels: the last rival is then what
costs least with all keys in use, of the best of each share of the work and tile. First choices among the kernels timed
on 28 such problems that no fit has seen lose 1.044 so (two above 1.15) with three rivals, with all kernels alike, with
1.4 1.045, with 1.25 1.051, and 1.063 (four) where the last comes next by the same guess; on 41 others 1.023 so, and
1.033."""
AT_ONCE = 6
"""Changes that a step may make together: ends of 90 drawn problems score 0.4 % less so in the same CPU time."""


@dataclass(frozen=True)
class Scored:
    """A config and its cost on the problem (`evoattn.cost.cost.scores`)."""

    config: KernelConfig
    score: float


@dataclass(frozen=True)
class Climbed:
    """Where climbs ended, its cost, and by what factor it should be faster than the best kernel of the list."""

    config: KernelConfig
    score: float
    gain: float
    asked: int
    """Costs that were computed."""
    rivals: tuple[KernelConfig, ...] = ()
    """Other kernels that may be faster."""


def all_genes(space: SearchSpace) -> Genes:
    """The values of a whole space."""
    return {p.name: p.values for p in space.parameters}


def neighbours(config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec, genes: Genes) -> list[KernelConfig]:
    """The valid configs that differ from `config` in one gene, or in two of TOGETHER where one alone cannot be, for a
    reason that names the other. If something of `config` is redundant on the problem, it may be of the others."""
    family = registry.lookup(config.family)
    why_not = family.why_impossible if family.why_invalid(problem, config, gpu) else family.why_invalid
    reasons: dict[tuple[str, Value], str] = {}
    found = list[KernelConfig]()

    def refused(change: dict[str, Value]) -> str:
        other = KernelConfig(config.family, config.params | change)
        if (reason := why_not(problem, other, gpu)) is None:
            found.append(other)
        return reason or ""

    others = {name: [v for v in values if v != config[name]] for name, values in genes.items()}
    for name, values in others.items():
        reasons |= {(name, value): refused({name: value}) for value in values}
    for one, two in TOGETHER:
        for a, b in product(others.get(one, ()), others.get(two, ())):
            if two in reasons[one, a] or one in reasons[two, b]:
                refused({one: a, two: b})
    return found


class Costs:
    """Scores on one problem; each config's is computed once, as neighbours of successive steps are the same in part."""

    def __init__(self, problem: AttentionProblem, gpu: GpuSpec) -> None:
        self._problem, self._gpu = problem, gpu
        self._known: dict[tuple[Value, ...], Scored] = {}

    def __len__(self) -> int:
        """Scores that were computed."""
        return len(self._known)

    def of(self, configs: Sequence[KernelConfig]) -> list[Scored]:
        """The configs and their scores, in the same order."""
        from evoattn.cost.cost import scores  # here: it imports NumPy and reads a file of weights

        keys = [(config.family, *config.params.values()) for config in configs]
        if new := {key: config for key, config in zip(keys, configs, strict=True) if key not in self._known}:
            found = scores(self._problem, list(new.values()), self._gpu, within=LIKELY)
            self._known |= {key: Scored(new[key], score) for key, score in zip(new, found, strict=True)}
        return [self._known[key] for key in keys]

    def within(self, factor: float) -> list[Scored]:
        """All whose score is at most `factor` times the least."""
        least = min((one.score for one in self._known.values()), default=0.0)
        return [one for one in self._known.values() if one.score <= factor * least]


def climb(
    start: KernelConfig, problem: AttentionProblem, gpu: GpuSpec, steps: int, genes: Genes, costs: Costs | None = None
) -> list[Scored]:
    """`start`, then after each step what costs least of its neighbours and of several of their changes `at_once`, for
    as long as the cost falls. If something of `start` is redundant, a neighbour of which nothing is comes before the
    steps, if one costs no more.

    `costs`: those of the problem, where some are known."""
    costs = Costs(problem, gpu) if costs is None else costs
    found = costs.of([start])
    family = registry.lookup(start.family)
    if family.why_invalid(problem, start, gpu):
        near = [c for c in neighbours(start, problem, gpu, genes) if not family.why_invalid(problem, c, gpu)]
        _step(found, costs.of(near), found[0].score * (1 + SAME))
    for _ in range(steps):
        scored = costs.of(neighbours(found[-1].config, problem, gpu, genes))
        if not _step(found, scored + costs.of(at_once(found[-1], scored, problem, gpu)), found[-1].score):
            break
    return found


def at_once(start: Scored, near: Sequence[Scored], problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """Valid configs that make several of the changes which lower the cost each: the best two, three and so on. `near`:
    neighbours of `start`, of which only the best change of the same genes counts."""
    best: dict[frozenset[str], tuple[float, dict[str, Value]]] = {}
    for one in near:
        change = {name: value for name, value in one.config.params.items() if value != start.config[name]}
        genes = frozenset(change)
        if one.score < (best[genes][0] if genes in best else start.score):
            best[genes] = one.score, change
    changes = [change for _, change in sorted(best.values(), key=lambda scored: scored[0])][:AT_ONCE]
    if not changes:
        return []
    family, made, found = registry.lookup(start.config.family), changes[0], []
    for change in changes[1:]:
        config = KernelConfig(start.config.family, start.config.params | made | change)
        if made.keys().isdisjoint(change) and not family.why_invalid(problem, config, gpu):
            made = made | change
            found.append(config)
    return found


def _step(found: list[Scored], near: list[Scored], under: float) -> bool:
    """Whether one of the configs costs less than `under`; the one of least cost is added then."""
    best = min(near, key=lambda one: one.score, default=None)
    if best is None or best.score >= under:
        return False
    found.append(best)
    return True


def climbed(
    kernels: Sequence[KernelConfig],
    problem: AttentionProblem,
    gpu: GpuSpec,
    genes: Mapping[str, Genes],
    timed: Sequence[KernelConfig] = (),
    filled: AttentionProblem | None = None,
) -> Climbed:
    """The best step of short climbs from those of the `kernels`, all of which can serve the problem, that should be
    fast; the best of the kernels where little is saved so. `genes`: by family; `timed`: those that were fast on such
    problems, all unless given; `filled`: the problem with all its keys in use where that is a guess."""
    caution = OF_GRADIENTS if problem.op == "backward" else 1
    own = correction_of(gpu)
    costs, cost = Costs(problem, gpu), penalised(timed or kernels, own.timed(problem), caution * A_GENE)
    ranked = sorted(costs.of(kernels), key=lambda one: one.score)
    steps: list[Scored] = []
    for start in beginnings(ranked):
        if not steps or own.kernels or len(costs) < ENOUGH:
            steps += climb(start.config, problem, gpu, STEPS, genes.get(start.config.family, {}), costs)
    first, end = _cheapest(ranked, cost), _cheapest(steps, cost)
    climbs = cost(end) < cost(first) * (1 - caution * LEAST_GAIN)
    best, gain = (end, first.score / end.score) if climbs else (first, 1.0)
    firsts = dict[tuple[object, ...], KernelConfig]()
    for one in sorted(costs.within(MOST_FILLED), key=lambda one: one.score) if filled else ():
        firsts.setdefault(_said(one, (*UNLIKE[0], *UNLIKE[1])), one.config)
    others = Costs(filled or problem, gpu).of([*firsts.values()][:LOOKED_AT])
    rivals = tuple(one.config for one in rivals_of(best, costs.within(MOST_RIVAL), cost, others))
    return Climbed(best.config, best.score, gain, len(costs), rivals)


def rivals_of(
    best: Scored, near: Sequence[Scored], cost: Callable[[Scored], float], filled: Sequence[Scored] = ()
) -> list[Scored]:
    """For each of UNLIKE the cheapest of `near` that differs in it from the best and from those before, for the last of
    `filled` where there are some."""
    found = [best]
    for names in UNLIKE:
        known = [_said(one, names) for one in found]
        if others := [one for one in (near if names else filled or near) if _said(one, names) not in known]:
            found.append(_cheapest(others, cost))
    return found[1:]


def _said(one: Scored, names: Sequence[str]) -> tuple[object, ...]:
    """Its family and these genes, all where none is named."""
    return one.config.family, *map(one.config.params.get, names or one.config.params)


def _cheapest(found: Iterable[Scored], cost: Callable[[Scored], float]) -> Scored:
    """The one of least cost, the first of equal ones. No cost is below its score, so that few are computed."""
    best, least = None, math.inf
    for one in sorted(found, key=lambda one: one.score):
        if best and one.score >= least:
            break
        if (own := cost(one)) < least or best is None:
            best, least = one, own
    assert best is not None
    return best


def beginnings(ranked: Sequence[Scored]) -> list[Scored]:
    """STARTS of the kernels, the best first: of each family that of least cost, unless it is FAR from the least of all,
    then those of least cost."""
    firsts = {one.config.family: one for one in reversed(ranked)}.values()
    found = sorted((one for one in firsts if one.score <= FAR * ranked[0].score), key=lambda one: one.score)
    found += [one for one in ranked if one not in found]
    return sorted(found[:STARTS], key=lambda one: one.score)


def penalised(
    kernels: Sequence[KernelConfig], timed: Container[str] = (), a_gene: float = A_GENE
) -> Callable[[Scored], float]:
    """A config's score, raised by `a_gene` for each gene that differs from the nearest of the kernels. Those that a
    calibration has timed on such problems, by `name_of`, keep theirs: on 320 problems left out as an A100 first choices
    lose 1.032 so, 1.039 otherwise."""
    alike: dict[tuple[str, tuple[str, ...]], list[Iterable[Value]]] = {}

    def values_of(config: KernelConfig, names: tuple[str, ...]) -> list[Iterable[Value]]:
        """Of the kernels of the family, in the order of `names`; once for each order."""
        if (config.family, names) not in alike:
            same = (kernel.params for kernel in kernels if kernel.family == config.family)
            alike[config.family, names] = [tuple(map(params.__getitem__, names)) for params in same]
        return alike[config.family, names]

    def cost(one: Scored) -> float:
        if timed and name_of(one.config) in timed:
            return one.score
        params = one.config.params
        differ = (sum(map(ne, params.values(), others)) for others in values_of(one.config, tuple(params)))
        return one.score * (1 + a_gene * min(differ, default=OTHER_FAMILY))

    return cost


SUFFIX = ".climbs"
MOST_KEPT = 4096
"""In memory."""
PACKAGE = Path(__file__).resolve().parents[1]
ROOMS = ("model", "families", "portfolio", "cost")
"""Whose source files decide what a climb comes to."""
READ_NS = time.time_ns()
"""When this process had read them, or most of them."""

Key = tuple[AttentionProblem, GpuSpec]
"""The canonical problem (`portfolio/pick.py`), and the GPU."""


def _source_files(folder: str) -> Iterator[tuple[str, int, int]]:
    """Path, size and time of change of each."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir():
                if entry.name not in ("__pycache__", "data"):
                    yield from _source_files(entry.path)
            else:
                about = entry.stat()
                yield entry.path, about.st_size, about.st_mtime_ns


@cache
def what_decides(package: Path = PACKAGE, spaces: Path = SEARCH_SPACES, read_ns: int = READ_NS) -> str:
    """A digest of all that decides what a climb comes to: the portfolios and the cost model's weights, and of source
    files and search spaces path, size and time of change, by which Python, too, knows bytecode that is stale.

    Empty where a source file changed after `read_ns`, since other code runs here than lies on disk. Raises `OSError`.
    """
    sources = [file for room in ROOMS for file in _source_files(str(package / room))]
    if any(changed_ns > read_ns for _, _, changed_ns in sources):
        return ""
    digest = hashlib.sha256(repr(sources).encode())
    digest.update(repr(list(_source_files(str(spaces)))).encode())
    data = *(package / "portfolio" / "data").iterdir(), *(package / "cost" / "data").iterdir()
    for file in (*sorted(data), *sorted(calibrations_folder().glob(f"*/{FILE}"))):
        digest.update(f"{file.parent.name}/{file.name}".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


class ClimbCache:
    """Ends of climbs by what they began with."""

    def __init__(self, folder: Path | None = None, state: Callable[[], str] = what_decides) -> None:
        """`folder`: where the file lies, or is made; None for memory alone. `state`: as `what_decides`."""
        self._state, self._folder = state, folder
        self._memory: dict[Key, Climbed] = {}
        self._kept: appended.Lines | None = None

    @property
    def path(self) -> Path | None:
        """The file of today's state; None for memory alone, and where that state cannot be told."""
        try:
            state = self._state() if self._folder else ""
        except OSError:  # no files, as in an archive, or one that went away while they were looked through
            return None
        return self._folder / f"{state[: appended.NAME]}{SUFFIX}" if self._folder and state else None

    def get(self, key: Key) -> Climbed | None:
        """What this process or an earlier one has added."""
        found, kept = self._memory.get(key), self._lines()
        if found is None and kept and (row := kept.get(key)):
            (config, *rivals), score, gain, asked = row
            found = Climbed(KernelConfig(*config), score, gain, asked, tuple(KernelConfig(*one) for one in rivals))
            remember(self._memory, key, found, MOST_KEPT)
        return found

    def add(self, key: Key, climbed: Climbed) -> None:
        """Keep what a climb came to, on disk too if that can be written."""
        remember(self._memory, key, climbed, MOST_KEPT)
        if kept := self._lines():
            configs = [[one.family, one.params] for one in (climbed.config, *climbed.rivals)]
            kept.add(key, [configs, climbed.score, climbed.gain, climbed.asked])

    def forget(self) -> None:
        """Take nothing of what is in memory, and read the file of the state as it is then."""
        self._memory, self._kept = {}, None

    def _lines(self) -> appended.Lines | None:
        """Of the file of the state; None for memory alone."""
        if self._kept is None and (path := self.path):
            self._kept = appended.Lines(path)
            mark_used(path)
        return self._kept
