"""Before a recorded trial runs again: whether its source may be trusted and fits today's launches, and its device is
here."""

from dataclasses import dataclass

from evoattn.families import registry
from evoattn.families.render import render
from evoattn.model import gpu as gpus
from evoattn.model import space as configs
from evoattn.model.errors import FailedRun
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Trial
from evoattn.model.space import KernelConfig


class ReproduceError(FailedRun):
    """The trial cannot be run again here: its message is one sentence."""


@dataclass(frozen=True)
class Finding:
    """One comparison with the record. `agrees` None: said for information, not part of the verdict."""

    what: str
    sentence: str
    agrees: bool | None


def require_trusted(trial: Trial, problem: AttentionProblem, spec: gpus.GpuSpec, trust_source: bool) -> Finding:
    """What `source_finding` says.

    A recorded source is code of whoever wrote the database: raises `ReproduceError` where the template renders another
    one, unless `trust_source`."""
    rendered = source_finding(trial, problem, spec)
    if not (rendered.agrees or trust_source):
        raise ReproduceError(
            f"{rendered.sentence} Trial {trial.number} was not run: its record is code of whoever wrote the database. "
            f"Read it with `evoattn show {trial.number} --source`, then use --trust-source, or run the commit that "
            "recorded it."
        )
    return rendered


def require_fitting(trial: Trial, source: str) -> None:
    """Raises `ReproduceError` where today's launches do not fit the recorded source."""
    if outdated := registry.lookup(trial.family).why_outdated(KernelConfig(trial.family, trial.config), source):
        raise ReproduceError(f"{outdated} Trial {trial.number} was not run; run the commit that recorded it.")


def source_finding(trial: Trial, problem: AttentionProblem, spec: gpus.GpuSpec) -> Finding:
    """Whether today's template renders the recorded source from the recorded config (`agrees` None where it does
    not)."""
    config = KernelConfig(trial.family, trial.config)
    try:
        family = registry.lookup(trial.family)
        registry.load_space(trial.family, spec).make_config(trial.config)
        same = render(family, problem, config, spec).source_hash == trial.source_hash
    except (registry.FamilyError, configs.ConfigError) as error:
        return Finding("source", f"Today's checkout cannot render this config: {error}", None)
    if same:
        return Finding("source", "Today's template renders the recorded text, byte for byte.", True)
    return Finding("source", "Today's template renders another text than the recorded one.", None)


def require_device(trial: Trial, spec: gpus.GpuSpec) -> None:
    """Raises `ReproduceError` unless the first CUDA device here is like the one that the trial was timed on."""
    devices = gpus.detect_devices()
    if not devices or not spec.is_like(devices[0].spec):
        here = f"this machine has a {devices[0].describe()}" if devices else "this machine has no CUDA device"
        raise ReproduceError(
            f"Trial {trial.number} was timed on the GPU {spec.name} with {spec.sm_count} SMs, but {here}; "
            f"run it there, or `evoattn export {trial.number}`."
        )
