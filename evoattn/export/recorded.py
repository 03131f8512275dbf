"""A recorded kernel on its way out of the database: checked against its hash, with what today's family says of it."""

from __future__ import annotations

import hashlib
import math
import re
import textwrap
from dataclasses import dataclass

from evoattn.families import registry
from evoattn.families.base import Family
from evoattn.model.launch import KernelLaunch, TensorMap
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Study, Timing, Trial
from evoattn.model.space import KernelConfig, spelled
from evoattn.peers.labels import peer_label
from evoattn.storage import Storage, StorageError


@dataclass(frozen=True)
class Recorded:
    """A trial of whatever state that has a source, and its launches for the problem of its study."""

    study: Study
    trial: Trial
    source: str
    problem: AttentionProblem
    family: Family
    config: KernelConfig
    launches: tuple[KernelLaunch, ...]
    workspace: dict[str, int]

    @classmethod
    def read(cls, storage: Storage, trial: Trial) -> Recorded:
        """Raises `StorageError` if the trial has no source, if its source or its record is not what this version wrote,
        or if today's launches do not fit the source, and `FamilyError` if its family is not here any more."""
        if trial.source_hash is None:
            raise StorageError(
                f"Trial {trial.number} ({trial.state}) never became source, and cannot be exported; choose another "
                "trial."
            )
        source = storage.source(trial.source_hash)
        if hashlib.sha256(source.encode()).hexdigest() != trial.source_hash:
            raise StorageError(
                f"The source of trial {trial.number} is not what was recorded; use another copy of the database."
            )
        study = storage.study(trial.study_id)
        problem, family = AttentionProblem(**study.problem), registry.lookup(trial.family)
        config = KernelConfig(trial.family, trial.config)
        if outdated := family.why_outdated(config, source):
            raise StorageError(f"{outdated} Export trial {trial.number} with the evoattn that made it.")
        try:
            gpu = study.spec
            launches, workspace = family.launches(problem, config, gpu), family.workspace(problem, config, gpu)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise StorageError(
                f"Trial {trial.number} is not of this version's {trial.family} ({error!r}); export it with the evoattn "
                "that made it."
            ) from None
        return cls(study, trial, source, problem, family, config, launches, workspace)


COMMENT_WIDTH = 117
MASK_OF_NO_KEY = "A query that sees no key has the output 0."


def comment(lines: list[str]) -> str:
    """`lines` as `//` comments.

    What they quote comes from a database, and nothing in it can end a comment or go on into the next line: only
    printable ASCII is kept, without backslashes, comment signs or the `??/` that old compilers read as a backslash."""
    rows = []
    for line in lines:
        rows += textwrap.wrap(plain(line), COMMENT_WIDTH, subsequent_indent="    ") or [""]
    return "\n".join(f"// {row}".rstrip() for row in rows) + "\n"


def plain(line: str) -> str:
    """The text with what could end a comment, a string or a line taken out."""
    text = re.sub(r"[^ -~]", "?", line.replace("µ", "u")).replace("\\", "|")
    return re.sub(r"\?+", "?", text).replace("*/", "* /").replace("/*", "/ *")


def provenance(storage: Storage, recorded: Recorded) -> list[str]:
    """Trial, problem, config, hash, compiler and times, a line each."""
    study, trial, problem = recorded.study, recorded.trial, recorded.problem
    versions = study.versions | next(iter(storage.environments(trial)), {})
    launches = (
        f"{n.kernel} grid {n.grid} block {n.block}, {n.smem_bytes} bytes of shared memory" for n in recorded.launches
    )
    lines = [
        f"evoattn {versions.get('evoattn', '?')}: trial {trial.number} of study {study.name} ({trial.created_at})",
        f"problem: {problem.describe()}" + (f". {MASK_OF_NO_KEY}" if problem.causal else ""),
        f"state: {trial.state}" + (f": {trial.reason}" if trial.reason else ""),
        f"family: {trial.family}; config: " + spelled(trial.config),
        f"source: sha256 {trial.source_hash}, made by {trial.operator}"
        + (f" of trials {list(trial.parents)}" if trial.parents else ""),
        "launches: " + "; ".join(launches),
    ]
    if info := trial.compile_info:
        lines.append(
            f"compiled by {info.compiler} {' '.join(info.options)}: {info.registers} registers, {info.spill_bytes} "
            f"bytes spilled, {info.static_smem_bytes} bytes of static shared memory"
        )
    if trial.timing and trial.timing.median_us > 0:
        where = f"{versions.get('device', study.gpu)}, {versions.get('driver', 'no driver')}"
        return lines + _times(storage, recorded, trial.timing, where)
    return [*lines, f"never timed: judged for {study.gpu} ({study.arch}) without that GPU"]


def _times(storage: Storage, recorded: Recorded, timing: Timing, where: str) -> list[str]:
    """The kernel's time and those of its peers."""
    study, problem = recorded.study, recorded.problem
    lines = [f"measured on {where}: {_timed(timing)}, {_tflops(problem, timing):.2f} TFLOP/s"]
    for name, timings in storage.peers(study).items():
        latest = timings[-1]
        ratio = f", {latest.median_us / timing.median_us:.3f} x its speed in the same rounds"
        lines.append(
            f"against {peer_label(name)}: {_timed(latest)}" + (ratio if latest.interleaved_with(timing) else "")
        )
    for name, sentence in storage.refusals(study).items():
        lines.append(f"against {peer_label(name)}: refused ({sentence})")
    return lines


def _tflops(problem: AttentionProblem, timing: Timing) -> float:
    return problem.flops / timing.median_us / 1e6


def _timed(timing: Timing) -> str:
    stage, cache = timing.protocol.get("stage", "?"), timing.protocol.get("cache", "?")
    return (
        f"{timing.median_us:.3f} us per call (median of {len(timing.samples_us)}, p10 {timing.quantile_us(0.1):.3f}, "
        f"p90 {timing.quantile_us(0.9):.3f}; {stage}, {cache} L2)"
    )


LOWEST_SM = 75
"""What nvcc 13 still builds for: families that run on any GPU ask for no more."""


@dataclass(frozen=True)
class Target:
    """The least compute capability as a number, e.g. 80, and its name, e.g. `sm_80`, or `sm_90a` and no other."""

    number: int
    name: str

    @classmethod
    def of(cls, recorded: Recorded) -> Target:
        """Out of the family's own words, e.g. `sm_80 and newer` or `sm_90a`, and of what this kernel needs beyond them:
        wgmma; or launches that overlap, of clusters, with tensor maps."""
        if "wgmma.mma_async.sync" in recorded.source:
            return cls(90, "sm_90a")
        found = re.search(r"sm_(\d+)a?", recorded.family.devices)
        least = (int(found[1]), found[0]) if found else (LOWEST_SM, f"sm_{LOWEST_SM}")
        return cls(*max(least, (90, "sm_90")) if any(_is_of_hopper(n) for n in recorded.launches) else least)

    @property
    def is_exact(self) -> bool:
        """Whether no newer GPU runs it."""
        return self.name.endswith("a")

    @property
    def words(self) -> str:
        """E.g. `sm_80 or newer`."""
        return self.name if self.is_exact else f"{self.name} or newer"

    @property
    def requirement(self) -> str:
        """An `#error` for an -arch that the kernel's instructions do not exist on."""
        return f"""
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < {self.number}0
#error "this kernel needs {self.name}: build with nvcc -arch={self.words}"
#endif
"""

    @property
    def guard(self) -> tuple[list[str], list[str]]:
        """(lines before, lines after) all device code of an `a` target.

        nvcc 13.0 asked for sm_90a compiles for compute_90 too, which must see none of it."""
        if not self.is_exact:
            return [], []
        return [f"#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM{self.number}_ALL)"], ["#endif"]

    @property
    def nvcc_flags(self) -> list[str]:
        """Flags without which nvcc would not compile for it; none where torch's own choice will do."""
        if not self.is_exact:
            return []
        digits = self.name.removeprefix("sm_")
        return [f"-gencode=arch=compute_{digits},code=sm_{digits}"]


def _is_of_hopper(launch: KernelLaunch) -> bool:
    return launch.overlaps or math.prod(launch.cluster) > 1 or any(isinstance(arg, TensorMap) for arg in launch.args)
