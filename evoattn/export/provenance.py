"""Where an exported kernel comes from, as comments that nothing in a database can break out of."""

from __future__ import annotations

import re
import textwrap

from evoattn.export.recorded import Recorded
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Timing
from evoattn.storage import Storage
from evoattn.timing.peers.labels import peer_label

COMMENT_WIDTH = 117
MASK_OF_NO_KEY = "A query that sees no key has the output 0."


def comment(lines: list[str]) -> str:
    """`lines` as `//` comments.

    What they quote comes from a database, and nothing in it can end a comment or go on into the next line: only
    printable ASCII is kept, without backslashes, comment signs or the `??/` that old compilers read as a backslash.
    """
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
        f"family: {trial.family}; config: " + " ".join(f"{k}={v}" for k, v in trial.config.items()),
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
