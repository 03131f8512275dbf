"""`evoattn calibrate`: measures on the card that is here what its picks need, within a budget.

Problems as people have them, and the user's own, are searched together; each time is kept as it comes. Of them are
made a correction of the cost model and the card's list of kernels, and both are judged on problems left out."""

import json
import math
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat, zip_longest
from statistics import fmean, median
from typing import Any

from evoattn.cost import correction
from evoattn.cost.correction import NONE
from evoattn.cost.correction_fit import Timed, fit
from evoattn.engine.group_search import GroupSearch
from evoattn.engine.groups import Group, Kernel
from evoattn.engine.tools import Tools
from evoattn.evaluation.process import die_with_parent
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.fleet.base import LocalFleet
from evoattn.model.errors import FailedRun
from evoattn.model.gpu import GpuSpec
from evoattn.model.gpu_table import is_played
from evoattn.model.paths import calibration_folder
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.space import KernelConfig
from evoattn.portfolio import calibrations, campaign, pick
from evoattn.portfolio.calibrations import Calibration, Journal, card_of, model_digest, short, times_of, versions_here
from evoattn.portfolio.pick import shipped_for
from evoattn.portfolio.proposals import ClimbingBreeder
from evoattn.portfolio.select import Checked, Judging, check_all, select_of
from evoattn.portfolio.workload import BUILD_SEEDS, DRAWS, PLAIN

KINDS = (PLAIN, "scores", "packed", "cached", "paged", "biased")
"""Of `workload.DRAWS`: those that most calls are of. Half of the problems are plain."""
JUDGED_SEEDS = range(80, 100)
"""Of problems left out."""
JUDGE_SHARE, MAKE_SHARE = 0.24, 0.06
"""Of the budget: for judging, and for making the list; the search has the rest."""
LEARN_SECONDS, LEARN_TIMES = 200.0, 16
"""Beside a search of so many seconds it learns twice: the correction and the list are made of what is timed, and what
these choose is timed next. Where so many times a problem are known the first begins with the search. Of the picks for
80 problems left out half had not been timed there. Where a half of the kernels is hidden from a fit, first choices take
1.048 in place of 1.033 times the best; where a half of the problems is, 1.030 in place of 1.027."""
FIRST, ENDS = 3, 2
"""What is timed then of each problem: kernels of the list, the pick before all others, and ends of climbs."""
MOST_OF_A_KIND = 24
"""Kernels of a list. With 12 picks score 0.5 % worse on problems left out; 40 gain nothing."""
PER_SECOND, LEAST, MOST = 0.6, 24, 800
"""Problems by seconds of search."""
SEARCH_EACH, FINAL_EACH, LEAST_JUDGED, MOST_JUDGED = 4.0, 1.5, 4, 40
"""Seconds of a problem that is judged: to search it, and to time the pick, the best and SDPA in turns."""
EACH_SEED = 20
LONGEST_US = 3000.0
"""By the card's peak: longer problems are many waves of the same tiles."""
MEMORY_SHARE = 8
"""Of a card's memory the tensors of a problem take one of so many parts at most."""
SAVE_SECONDS, SAY_SECONDS = 1.0, 10.0
RETIMED = 6
"""Kernels of each group that were best under another driver, NVRTC or template, and are timed first."""
PAIRS, AGREE, MOSTLY = 30, 0.04, 0.8
"""Times under other versions count where so many of their family were taken again, and so large a part of these differs
from what the family's times have changed by in all by so much at most (natural logarithm)."""
SDPA = ("flash", "efficient", "cudnn")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """What a calibration is to do."""

    seconds: float = 1200.0
    kinds: Sequence[str] = KINDS
    own: Sequence[tuple[AttentionProblem, float]] = ()
    """The user's problems and their weights: together they have half of the time."""
    jobs: int | None = None
    """Compile processes."""
    judge_share: float = JUDGE_SHARE
    """Of the budget; 0 judges nothing."""


@dataclass
class Plan:
    """What will be done."""

    gpu: GpuSpec
    groups: list[Group]
    judged: list[AttentionProblem]
    search_seconds: float
    judge_seconds: float
    recalled: int = 0
    """Times that earlier runs took."""
    old: int = 0
    """Times under another driver, NVRTC or template, of which the best kernels are timed again."""
    before: dict[str, Group] = field(default_factory=dict)
    """These times by the name of their group, whose problems they have."""
    lines: list[str] = field(default_factory=list)

    @property
    def problems(self) -> int:
        return sum(len(group.problems) for group in self.groups)

    def describe(self) -> str:
        """For people, in several lines."""
        families = sorted({name for group in self.groups for name in group.families})
        kinds = Counter(" ".join(("plain", *p.variants)[bool(p.variants) :]) for g in self.groups for p in g.problems)
        rows = [
            f"Card: {self.gpu.product} ({self.gpu.name}, {self.gpu.sm_count} SMs, {self.gpu.arch}).",
            f"{self.problems} problems in {len(self.groups)} groups, searched for {self.search_seconds:.0f} s;",
            f"then {len(self.judged)} problems left out are judged, {self.judge_seconds:.0f} s.",
            f"Families: {', '.join(families)}.",
            "Problems: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) + ".",
            f"Kept so far: {self.recalled} times.",
        ]
        if self.old:
            rows.append(f"{self.old} more are of another driver, NVRTC or template: the best kernels are timed again.")
        return "\n".join(rows)


def fits(problem: AttentionProblem, gpu: GpuSpec) -> bool:
    """Whether it is short enough to be measured, and small enough for the card."""
    floor = gpu.floor_us(problem.flops, problem.bytes, problem.dtype)
    return floor <= LONGEST_US and problem.bytes * MEMORY_SHARE <= gpu.dram_bytes


def drawn(kinds: Sequence[str], seeds: Sequence[int], count: int, gpu: GpuSpec) -> list[AttentionProblem]:
    """`count` different problems, half of them plain where other kinds are asked for, too."""
    others = [kind for kind in kinds if kind != PLAIN]
    plain = 0 if PLAIN not in kinds else count - count // 2 * bool(others)
    shares = {PLAIN: plain} | {kind: math.ceil((count - plain) / len(others)) for kind in others}
    found: dict[AttentionProblem, None] = {}
    for kind, share in shares.items():
        able = (p for seed in seeds for p in DRAWS[kind](seed, EACH_SEED) if share and fits(p, gpu))
        mine = dict.fromkeys(campaign.stand_in(p) for p, _ in zip(able, range(share)))
        found |= mine
    return list(found)[:count]


def plan(wanted: Wanted, gpu: GpuSpec) -> Plan:
    """What a calibration of the card would do now, with what earlier ones have measured."""
    judge = wanted.judge_share * wanted.seconds
    search = wanted.seconds * (1 - MAKE_SHARE) - judge
    count = min(MOST, max(LEAST, round(search * PER_SECOND)))
    problems = drawn(wanted.kinds, BUILD_SEEDS, count, gpu)
    each = min(MOST_JUDGED, max(LEAST_JUDGED, int(judge / (SEARCH_EACH + FINAL_EACH))))
    judged = drawn(wanted.kinds, JUDGED_SEEDS, each, gpu) if judge else []
    today, before = _journal(gpu)
    timed = (p for groups in (today, before) for group in groups.values() for p in group.problems)
    weights = dict.fromkeys([*problems, *timed], 1.0)  # a short run after a long one has all that the long one had
    own = [(without_lse(p), weight) for p, weight in wanted.own]
    whole = sum(weight for _, weight in own) or 1.0
    for problem, weight in own:
        weights[problem] = weights.get(problem, 0.0) + len(problems) * weight / whole
    made = Plan(gpu, list(_groups(weights, gpu)), judged, search, judge)
    _recall(made, today, before)
    return made


def without_lse(problem: AttentionProblem) -> AttentionProblem:
    """As searches have it: canonical, and with the causal mask that all lengths have."""
    try:
        return campaign.stand_in(problem.canonical().with_(lse=False))
    except ProblemError:
        return problem


def _groups(weights: Mapping[AttentionProblem, float], gpu: GpuSpec) -> Iterator[Group]:
    for name, problems in sorted(campaign.by_group(weights).items()):
        if families := campaign.families_of(problems, gpu):
            yield Group(name, problems, families, sum(weights[p] for p in problems))


def _journal(gpu: GpuSpec) -> tuple[dict[str, Group], dict[str, Group]]:
    """What the card's journal has, by name of group: times of today's versions, and of others."""
    today: dict[str, Group] = {}
    before: dict[str, Group] = {}
    here, problems = _Versions(), dict[str, AttentionProblem]()
    places: dict[tuple[str, str], int] = {}
    for row in times_of(calibration_folder(gpu)):
        try:
            text, family, us = json.dumps(row["problem"]), str(row["family"]), float(row["us"])
            problem = problems.setdefault(text, problems.get(text) or AttentionProblem(**row["problem"]))
            params = registry.completed(family, row["params"])
            named = today if row["with"] == here.of(family) else before
            group = named.setdefault(row["group"], Group(row["group"], [], ()))
            if not (us > 0 and math.isfinite(us)):
                continue
        except (KeyError, TypeError, ValueError, ProblemError):
            continue
        index = places.setdefault((f"{named is today} {group.name}", text), len(group.problems))
        if index == len(group.problems):
            group.problems.append(problem)
        made_here = Kernel(family, params, state="right")
        kernel = group.kernels.setdefault(made_here.id, made_here)
        kernel.times[index] = us
        if row.get("rough"):
            kernel.rough.add(index)
    return today, before


def _recall(made: Plan, today: dict[str, Group], before: dict[str, Group]) -> None:
    """Put into the groups what a journal has: times of today's versions, and of others the best kernels."""
    for group in made.groups:
        spaces = {name: load_space(name, made.gpu) for name in group.families}
        if known := today.get(group.name):
            campaign.recall(group, known, spaces)
            made.recalled += sum(len(kernel.times) for kernel in group.kernels.values())
        if old := before.get(group.name):
            best = [k for k in campaign.contenders(old, RETIMED) if campaign.in_space(k, spaces)]
            group.given += [(k.family, k.params) for k in best if k.id not in group.kernels]
            made.old += sum(len(kernel.times) for kernel in old.kernels.values())
            made.before[group.name] = replace(group, kernels={})
            campaign.recall(made.before[group.name], old, spaces)


class _Versions:
    """What decides the times of a family here, in a word."""

    def __init__(self) -> None:
        self._known = versions_here(registry.FAMILIES)

    def of(self, family: str) -> str:
        return f"{self._known['driver']} {self._known['nvrtc']} {self._known['templates'].get(family, '')}"


class Keeper:
    """Writes each new time of the groups to a journal, and says now and then where the search is."""

    def __init__(self, engine: GroupSearch, journal: Journal, say: Say, seconds: float) -> None:
        self._engine, self._journal, self._say, self._seconds = engine, journal, say, seconds
        self._versions = _Versions()
        self._kept = {(g.name, k.id): set(k.times) for g in engine.groups for k in g.kernels.values()}
        self._started = self._saved = self._said = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._saved >= SAVE_SECONDS:
            self._saved = now
            self.save()
        if now - self._said >= SAY_SECONDS:
            self._said = now
            self._say(self.progress())

    def progress(self) -> str:
        """What is done and what is left."""
        engine, done = self._engine, time.monotonic() - self._started
        timed = sum(group.best(i) < math.inf for group in engine.groups for i in range(len(group.problems)))
        problems = sum(len(group.problems) for group in engine.groups)
        busy = engine.busy_seconds / max(done, SAVE_SECONDS)
        return (
            f"searching, {max(0.0, self._seconds - done):.0f} s left: {engine.compiled} kernels compiled, "
            f"{engine.measured} times, {timed} of {problems} problems, GPU busy {busy:.0%}"
        )

    def save(self) -> None:
        """Append what is new. Raises `OSError`."""
        self._journal.add(self._new())

    def _new(self) -> Iterator[dict[str, Any]]:
        for group in self._engine.groups:
            for kernel in list(group.kernels.values()):
                known = self._kept.setdefault((group.name, kernel.id), set())
                if kernel.state != "right" or len(known) == len(kernel.times):
                    continue
                about = {"group": group.name, "family": kernel.family, "params": kernel.params}
                about |= {"with": self._versions.of(kernel.family)}
                times = []
                for index in [i for i in kernel.times if i not in known]:
                    known.add(index)
                    row = {"problem": short(group.problems[index]), "us": round(kernel.times[index], 4)}
                    times.append(row | ({"rough": True} if index in kernel.rough else {}))
                yield about | {"times": times}


def timed_rows(groups: Iterable[Group], gpu: GpuSpec, jobs: int | None) -> list[Timed]:
    """Careful times of the groups, what the model without a correction says and what trees may ask, by `jobs`
    processes, all cores unless given."""
    asked = []
    for group in groups:
        for index, problem in enumerate(group.problems):
            kernels = group.leaders(index, len(group.kernels))
            asked.append((problem, [k.config for k in kernels], [k.times[index] for k in kernels]))
    with ProcessPoolExecutor(jobs or os.cpu_count()) as workers:
        found = workers.map(_timed, *zip(*asked, strict=True), repeat(gpu), chunksize=4) if asked else ()
        return [row for rows in found for row in rows]


def _timed(problem: AttentionProblem, configs: list[KernelConfig], us: list[float], gpu: GpuSpec) -> list[Timed]:
    from evoattn.cost.cost import Model, physical_part, scores
    from evoattn.cost.fitted import load

    fitted, found = load(), list[Timed]()
    costs = scores(problem, configs, gpu, fitted, NONE)
    parts = [physical_part(problem, config, gpu, 0, fitted) for config in configs]
    able = [i for i, part in enumerate(parts) if part]
    asked, _ = Model(gpu, fitted, NONE).asked(problem, [configs[i] for i in able], [part for part in parts if part])
    for i, features in zip(able, asked, strict=True):
        found.append(Timed(problem, configs[i].family, configs[i].id, us[i], costs[i], features))
    return found


@dataclass(frozen=True)
class Done:
    """What came of a calibration."""

    calibration: Calibration
    rows: Sequence[Checked]

    def table(self) -> str:
        """Regret and SDPA, by kinds of problems and for all, on problems left out."""
        kinds = Counter(_kind(row) for row in self.rows)
        lines = ["| problems left out | number | regret, geomean | worst | ahead of SDPA | SDPA / ours, geomean |"]
        lines.append("|---" * 6 + "|")
        for kind in (*kinds, "all"):
            lines.append(_line(kind, [row for row in self.rows if kind in ("all", _kind(row))]))
        lines.append(f"{first_choice(self.calibration)}.")
        return "\n".join(lines)


def first_choice(found: Calibration) -> str:
    """How good the cost model chooses on measured problems left out, in words."""
    if not found.correction.left_out:
        return "No two kernels of a problem were timed, so that the cost model was not judged"
    _, before, after = found.correction.left_out["all"]
    return f"The cost model's first choice takes {before:.3f} times the best, corrected {after:.3f}"


def _kind(row: Checked) -> str:
    return " ".join(row.group.split()[2].split("+")[1:]) or "plain"


def _line(kind: str, rows: Sequence[Checked]) -> str:
    found = summary(rows)
    gains = [math.log(min(row.sdpa.values()) / row.pick_us) for row in rows if row.sdpa and row.pick_us]
    mean = f"{found['regret']:.3f} | {found['worst']:.3f}" if found["regret"] else "none | none"
    gain = f"{math.exp(fmean(gains)):.2f}" if gains else "none"
    return f"| {kind} | {len(rows)} | {mean} | {found['ahead']} of {found['beside']} | {gain} |"


def summary(rows: Sequence[Checked]) -> dict[str, Any]:
    """What a calibration's file says of what it was judged on."""
    regrets = [row.regret for row in rows if not math.isnan(row.regret)]
    beside = [row for row in rows if row.sdpa and row.pick_us]
    return {
        "problems": len(rows),
        "regret": round(math.exp(fmean(map(math.log, regrets))), 4) if regrets else None,
        "worst": round(max(regrets), 3) if regrets else None,
        "ahead": sum(row.ahead_of(row.sdpa) for row in beside),
        "beside": len(beside),
    }


def _regrets(rows: Sequence[Checked]) -> dict[str, float]:
    """As `KernelList.regret`."""
    plain, others = ([row for row in rows if (_kind(row) == "plain") == is_plain] for is_plain in (True, False))
    named = {"plain": summary(plain)["regret"], "variants": summary(others)["regret"]}
    return {name: regret for name, regret in named.items() if regret is not None}


def calibrate(wanted: Wanted, gpu: GpuSpec, say: Say, tools: Tools | None = None) -> Done:
    """Search, make and judge. `tools`: what the processes run, where it is not the usual. Raises `FailedRun` where
    another process is at it, and `OSError`; every time that was taken until then is kept."""
    started = time.monotonic()
    with Journal(calibration_folder(gpu)) as journal:
        made = plan(wanted, gpu)
        parts = turns(made)
        fresh = [group for group in made.groups if not group.given and not parts[0][0]]
        with ProcessPoolExecutor(wanted.jobs or os.cpu_count()) as workers:  # by one process half a minute
            about = ([g.problems for g in fresh], [g.families for g in fresh], repeat(gpu, len(fresh)))
            for group, given in zip(fresh, workers.map(campaign.given, *about), strict=True):
                group.given = given
        say(made.describe())
        end = started + made.search_seconds
        fleet = LocalFleet(wanted.jobs) if wanted.jobs else None
        with GroupSearch(made.groups, gpu, ClimbingBreeder, fleet, tools) as engine:
            keeper = Keeper(engine, journal, say, end - time.monotonic())
            try:
                for learns, share in parts:
                    with learning(made, wanted.jobs, engine, say) if learns else nullcontext(list) as take:
                        left = started + share * made.search_seconds - time.monotonic()
                        engine.run(max(1.0, left), partial(_each, keeper, take))
            finally:
                keeper.save()
        say(f"searched: {engine.compiled} kernels compiled, {engine.measured} times")
    found = make(made, wanted.jobs)
    say(f"{len(found.listed.kernels)} kernels for {len(found.listed.kinds)} kinds of problems are chosen")
    say(first_choice(found))
    left = max(made.judge_seconds / 2, wanted.seconds - (time.monotonic() - started))
    each = left / max(1, len(made.judged)) - FINAL_EACH
    peers = tuple(name for name in SDPA if name != "cudnn" or not is_played(gpu))
    how = Judging(max(0.5, min(SEARCH_EACH, each)), peers, 5, wanted.jobs)
    rows = []
    for _, row in check_all(made.judged, gpu, how, say, tools) if made.judged else ():
        rows.append(row)
        say(f"judged {len(rows)} of {len(made.judged)}: {row.line()}")
    found = replace(found, judged=summary(rows), listed=replace(found.listed, regret=_regrets(rows)))
    calibrations.save(found)
    pick.forget()
    return Done(found, rows)


_HERE: list[Plan] = []
"""In a process that learns, which is forked: what is known by then need not be sent there."""


@contextmanager
def learning(made: Plan, jobs: int | None, engine: GroupSearch, say: Say) -> Iterator[Callable[[], None]]:
    """Learns from what is timed by now, in a process of its own, so that the GPU works on; the function has the search
    take what came of it, once it is there. At the end it is waited for, unless an exception ends the search. Raises
    `FailedRun` where that process is killed."""
    groups, taken = {group.name: group for group in made.groups}, list[str]()
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), _begin, (made,)) as apart:
        own_group, found = apart.submit(os.getpid).result(), apart.submit(_learn, jobs)

        def take(waits: bool = False) -> None:
            if not taken and (waits or found.done()):
                try:
                    words, chosen = found.result()
                except BrokenProcessPool:
                    raise FailedRun(
                        "The process that learns was killed, as for want of memory; what was measured is kept: the "
                        "same command goes on."
                    ) from None
                taken.append(words)
                pick.forget()  # this process reads what that one has saved
                say(f"learnt: {words}")
                engine.ask([(groups[name], kernel, indexes) for name, kernel, indexes in chosen])

        try:
            yield take
            take(waits=True)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(own_group, signal.SIGKILL)
            raise


def _begin(made: Plan) -> None:
    """In the process that learns: it and those that it starts are a group, which Ctrl-C does not reach and which ends
    with this command."""
    os.setpgid(0, 0)
    multiprocessing.set_start_method("fork", force=True)  # a fork server is its parent's alone
    die_with_parent(whole_group=True)
    _HERE.append(made)


def _learn(jobs: int | None) -> tuple[str, list[tuple[str, Kernel, tuple[int, ...]]]]:
    (made,) = _HERE
    words = first_choice(make(made, jobs))
    return words, [(group.name, kernel, indexes) for group, kernel, indexes in asked(made, jobs)]


def _each(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


def turns(made: Plan) -> list[tuple[bool, float]]:
    """Of each part of the search whether it learns beside it, and the share of the search after which it ends."""
    if made.search_seconds < LEARN_SECONDS:
        return [(False, 1.0)]
    if made.recalled >= LEARN_TIMES * made.problems:
        return [(True, 0.5), (True, 1.0)]
    return [(False, 0.4), (True, 0.7), (True, 1.0)]


def asked(made: Plan, jobs: int | None) -> Iterator[tuple[Group, Kernel, tuple[int, ...]]]:
    """What the model and the list choose now, each on the problems for which it was not timed: first choices of all
    problems, then second ones and so on."""
    places = [(group, i) for group in made.groups for i in range(len(group.problems))]
    about = ([group.problems[i] for group, i in places], [group.families for group, _ in places])
    with ProcessPoolExecutor(jobs or os.cpu_count()) as workers:
        chosen = list(workers.map(_choices, *about, repeat(made.gpu), chunksize=2))
    found: dict[tuple[str, str], tuple[Group, Kernel, list[int]]] = {}
    for turn in zip_longest(*chosen):
        for (group, index), config in zip(places, turn, strict=True):
            if config is None:
                continue
            new = Kernel(config.family, config.params, "asked")
            kernel = group.kernels.get(new.id, new)
            if index not in kernel.times and kernel.state in (new.state, "right"):
                found.setdefault((group.name, kernel.id), (group, kernel, []))[2].append(index)
    for group, kernel, indexes in found.values():
        yield group, kernel, tuple(indexes)


def _choices(problem: AttentionProblem, families: tuple[str, ...], gpu: GpuSpec) -> list[KernelConfig]:
    alone = ClimbingBreeder(Group(campaign.group_of(problem), [problem], families), gpu, 0)
    listed = [config for config in pick.portfolio_kernels(problem, gpu) if config.family in alone.spaces]
    ends = [config for config, origin in alone.steps(0) if origin == "climbed"]
    return list({config.id: config for config in (*listed[:FIRST], *ends[:ENDS])}.values())


def with_confirmed(made: Plan) -> list[Group]:
    """The groups, with times under other versions of the families of which today's times say that little has changed:
    a few are taken again in place of all."""
    logs: dict[str, list[float]] = {}
    for group in made.groups:
        old = made.before[group.name].kernels if group.name in made.before else {}
        for kernel in (kernel for kernel in group.kernels.values() if kernel.id in old):
            then = {i: us for i, us in old[kernel.id].times.items() if i not in old[kernel.id].rough | kernel.rough}
            pairs = ((kernel.times[i], us) for i, us in then.items() if i in kernel.times)
            logs.setdefault(kernel.family, []).extend(math.log(now / us) for now, us in pairs)
    factors = {}
    for family, found in logs.items():
        if len(found) >= PAIRS and fmean(abs(log - median(found)) <= AGREE for log in found) >= MOSTLY:
            factors[family] = math.exp(median(found))
    return [_confirmed(group, made.before.get(group.name), factors) for group in made.groups]


def _confirmed(group: Group, before: Group | None, factors: Mapping[str, float]) -> Group:
    """The group, with times of before, by family multiplied by `factors`, where there are none of today and the kernel
    was not found wrong today."""
    kernels = dict(group.kernels)
    for name, old in before.kernels.items() if before else ():
        mine = kernels.get(name, replace(old, times={}, rough=set()))
        if old.family in factors and mine.state in ("new", "right"):
            times = {i: us * factors[old.family] for i, us in old.times.items() if i not in mine.times}
            rough = mine.rough | (old.rough & times.keys())
            kernels[name] = replace(mine, state="right", times=mine.times | times, rough=rough)
    return replace(group, kernels=kernels)


def make(made: Plan, jobs: int | None) -> Calibration:
    """The correction and the list of what was measured; the op takes them from now on."""
    gpu, shipped, groups = made.gpu, shipped_for(made.gpu), with_confirmed(made)
    today = shipped if shipped and gpu.name in shipped.cards else None
    fitted = fit(timed_rows(groups, gpu, jobs), jobs)
    correction.put(gpu, fitted)  # the choice of general kernels is by corrected costs
    listed = select_of(groups, gpu, today, jobs, beside=True, most=MOST_OF_A_KIND)
    found = Calibration(
        card_of(gpu),
        versions_here({kernel.family for kernel in listed.kernels})
        | {"model": model_digest(listed.kernels, card_of(gpu))},
        time.strftime("%Y-%m-%d"),
        replace(listed, skipped=today.skipped if today else ()),
        fitted,
        summary(()),
        sum(len(kernel.times) for group in groups for kernel in group.kernels.values()),
    )
    calibrations.save(found)
    pick.forget()
    return found
