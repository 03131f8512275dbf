"""What the offline path says of a mutant. The table of mutants by family, and the survivors with their reasons."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from evoattn.backends.base import LaunchError
from evoattn.backends.compiler import CompileError, compile_source, machine_code_hash
from evoattn.backends.interpreter import InterpreterBackend, NotInterpreted
from evoattn.correctness.cases import proof_of
from evoattn.correctness.validate import check_small_cases
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import GPUS
from evoattn.model.records import CompiledKernel, CompileInfo
from tests.mutation.settings import Setting
from tests.mutation.sources import Mutant
from tests.support.compiles import compile_ptx

STEPS = 1_000_000
"""Ten times what the interpreter's cases take of a right kernel."""
LIVE_CONFIGS = 4
"""Configs that a mutant may survive; of the others, only those are tried in which it is the first to lengthen, to
shorten or to keep the code for a dtype: a condition that it turns round may never hold where it adds one, and what is
as coarse as bf16 shows in fp16 and fp32."""
BLIND_CONFIGS = 2
"""Configs that are tried where no line of the change has code of its own: a condition that holds where it did not."""

ANSWER, FAULT, DEADLOCK, REFUSED, SURVIVED = "answer", "fault", "deadlock", "refused", "survived"
DEAD, STILLBORN = "same PTX", "does not compile"
COMPILES = 4
"""Of a source and of its mutant that survived, before their PTX counts as different: of some sources NVRTC makes other
PTX in one of six compiles."""
NEEDED = {
    "if (blockIdx.x == 0) ": ("grid", 0, 2),
    "if (blockIdx.x != 2) ": ("grid", 0, 3),
    "if (blockIdx.y == 0) ": ("grid", 1, 2),
    "if (threadIdx.x / 32 != 1) ": ("block", 0, 33),
}
"""By guards of `statements.partly` and `substitutes.rarely`: of a launch, the extent from which on one fails."""
_ANSWERS = ("largest error", "root-mean-square", "are NaN", "never written", "log-sum-exp", "on average")
_ENDLESS = ("deadlocked", "waits forever", "was stopped after")


@dataclass(frozen=True)
class Verdict:
    """Of one mutant: `setting` and `reason` are those of the config that killed it, else of the last one tried."""

    family: str
    key: str
    place: str
    verdict: str
    reason: str = ""
    setting: dict[str, Any] = field(default_factory=dict)
    variant: str = ""
    """On whose lines it is; empty: on any."""

    @property
    def live(self) -> bool:
        return self.verdict not in (DEAD, STILLBORN)

    @property
    def killed(self) -> bool:
        return self.live and self.verdict != SURVIVED

    def row(self) -> dict[str, str]:
        return asdict(self)


def run_ptx(setting: Setting, ptx: str, seed: int) -> tuple[str, str]:
    """(verdict, reason) of a kernel in the offline path."""
    kernel = CompiledKernel(b"", ptx, CompileInfo())
    built = BuiltKernel(FAMILIES[setting.family], setting.config, GPUS[setting.gpu], kernel)
    try:
        results = check_small_cases(InterpreterBackend(STEPS), built, setting.problem, seed)
    except (NotInterpreted, LaunchError) as error:
        return REFUSED, str(error)
    if results[-1].passed:
        return SURVIVED, ""
    reason = results[-1].reason
    if any(word in reason for word in _ANSWERS):
        return ANSWER, reason
    return DEADLOCK if any(word in reason for word in _ENDLESS) else FAULT, reason


def judge(mutant: Mutant, settings: list[Setting], seed: int) -> Verdict:
    """The mutant in LIVE_CONFIGS configs in which its PTX differs, and some in which it does so in another way, until
    one kills it."""
    family = settings[0].family
    places = [(setting, place) for setting in settings if (place := mutant.place(setting.source))]
    covered = [setting for setting, place in places if setting.covers(place)]
    rng = random.Random(f"{mutant.key} {seed}")
    rng.shuffle(covered)
    blind = [setting for setting, _ in places if setting not in covered]
    tried = covered[: LIVE_CONFIGS - 1] + blind[:BLIND_CONFIGS] + covered[LIVE_CONFIGS - 1 :]
    found, live = Verdict(family, mutant.key, str(mutant), DEAD), 0
    sides: set[tuple[int, str]] = set()
    for setting in tried:
        source = mutant.applied(setting.source)
        assert source is not None
        try:
            ptx = compile_ptx(source, GPUS[setting.gpu].arch)
        except CompileError as error:
            if not live:
                found = Verdict(family, mutant.key, str(mutant), STILLBORN, str(error), setting.row())
            break
        old, new = setting.launched(setting.ptx), setting.launched(ptx)
        side = (new.count(";") > old.count(";")) - (new.count(";") < old.count(";")), setting.problem.dtype
        if new == old or (live >= LIVE_CONFIGS and side in sides):
            continue
        verdict, reason = run_ptx(setting, ptx, seed)
        if verdict == SURVIVED and (_may_be_the_same(setting, source) or _all_pass(mutant.change.new, setting, ptx)):
            continue
        live += 1
        sides.add(side)
        found = Verdict(family, mutant.key, str(mutant), verdict, reason, setting.row())
        if found.killed:
            break
    return found


def _may_be_the_same(setting: Setting, source: str) -> bool:
    """Whether some compile of the source launches the same code as some compile of the setting's own: PTX, or what
    becomes of it on the card, where an unused argument or the order of its registers does not count."""
    arch = GPUS[setting.gpu].arch
    own, others = (
        {setting.launched(compile_ptx(text, arch)) for _ in range(COMPILES)} for text in (setting.source, source)
    )
    if own & others or setting.launched(setting.ptx) in others:
        return True
    codes = {machine_code_hash(compile_source(text, arch).cubin) for text in (setting.source, source)}
    return len(codes) == 1


def _all_pass(guard: str, setting: Setting, ptx: str) -> bool:
    """Whether all threads of all launches of the setting's cases pass what a mutant asks before a statement: those of
    kernels that it changes."""
    if guard not in NEEDED:
        return False
    own, others = setting.by_kernel(setting.ptx), setting.by_kernel(ptx)
    changed = {name for name in own.keys() | others.keys() if own.get(name) != others.get(name)}
    of, axis, least = NEEDED[guard]
    empty = CompiledKernel(b"", "", CompileInfo())
    kernel = BuiltKernel(FAMILIES[setting.family], setting.config, GPUS[setting.gpu], empty)
    for case in proof_of(setting.problem).interpreter_cases(setting.problem, setting.config):
        launches = [one for one in case.placed(kernel).launches(case.problem) if one.kernel in changed]
        if any(getattr(launch, of)[axis] >= least for launch in launches):
            return False
    return True


REASONS = Path(__file__).with_name("reasons.yaml")


@dataclass(frozen=True)
class Reason:
    """Why mutants survive: all changes of a line, or those that `what` names. An equivalent one computes the same,
    whatever the shapes and the order of execution."""

    file: str
    line: str
    what: str
    equivalent: bool
    why: str
    family: str = ""
    """The one of which it is true; empty: all that have the file."""

    def fits(self, family: str, key: str) -> bool:
        file, _, place = key.partition(" | ")
        if file != self.file or self.family not in ("", family):
            return False
        line = re.escape(self.line)
        here = rf"{line}( \(again \d+\))? \| [^|]+ \| "  # this one of like lines, or any
        found = re.match(here, place) or re.match(rf".* \| far move \| (?={line})", place)
        return found is not None and self.what in place[found.end() :]


def load_reasons(path: Path = REASONS) -> list[Reason]:
    """Raises `TypeError` on an entry of other words."""
    entries = yaml.safe_load(path.read_text()) or []
    return [Reason(**{"what": "", "equivalent": True} | entry) for entry in entries]


def reason_for(verdict: Verdict, reasons: Iterable[Reason]) -> Reason | None:
    return next((reason for reason in reasons if reason.fits(verdict.family, verdict.key)), None)


def load_verdicts(paths: Iterable[Path]) -> list[Verdict]:
    """Of several files the last word on each mutant of a family; where it was tried in other configs, that it was
    killed in some, be it on the lines of another variant: a line that several share may do nothing in one of them."""
    found: dict[tuple[str, str, str], Verdict] = {}
    for row in (json.loads(line) for path in paths for line in path.read_text().splitlines()):
        verdict = Verdict(**row)
        key = verdict.family, verdict.variant, verdict.key
        before = found.get(key)
        if before is None or (verdict.live and not before.killed):
            found[key] = verdict
    killed = {(one.family, one.key): one for one in found.values() if one.killed}
    return [
        replace(killed.get((one.family, one.key), one), variant=one.variant) if one.live else one
        for one in found.values()
    ]


def table(verdicts: Iterable[Verdict], reasons: Iterable[Reason]) -> str:
    """Markdown: a row per family, or per variant where mutants are of one, and one of all."""
    reasons = list(reasons)
    counts: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        if not verdict.live:
            continue
        found = reason_for(verdict, reasons) if verdict.verdict == SURVIVED else None
        word = "equivalent" if found and found.equivalent else verdict.verdict
        for name in (verdict.variant or verdict.family, "all"):
            counts.setdefault(name, Counter())[word] += 1
    words = (ANSWER, FAULT, DEADLOCK, REFUSED, "equivalent", SURVIVED)
    rows = ["| family | live | " + " | ".join(words) + " | killed of the rest |", "|---" * (len(words) + 3) + "|"]
    for family in sorted(counts, key=lambda name: (name == "all", name)):
        count = counts[family]
        rest = count.total() - count["equivalent"]
        share = f"{1 - count[SURVIVED] / rest:.1%}" if rest else "–"
        rows.append(f"| {family} | {count.total()} | " + " | ".join(str(count[w]) for w in words) + f" | {share} |")
    return "\n".join(rows)


def survivors(verdicts: Iterable[Verdict], reasons: Iterable[Reason]) -> list[tuple[Verdict, Reason | None]]:
    """Those that survived, with what is known of them."""
    reasons = list(reasons)
    return [(v, reason_for(v, reasons)) for v in verdicts if v.verdict == SURVIVED]
