"""From the words of `evoattn search` to a running study: what to search, for which device, in which study."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evoattn.families import registry
from evoattn.model import gpu as gpus
from evoattn.model import named_problems as problems
from evoattn.model.gpu import DetectedDevice, GpuError, GpuSpec
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.records import Study
from evoattn.model.space import ConfigError, KernelConfig, SearchSpace, load_space, parse_choices
from evoattn.samplers.base import Sampler
from evoattn.samplers.registry import make_sampler
from evoattn.search.budget import Budget, parse_budget
from evoattn.storage import Storage
from evoattn.storage.versions import collect

DEFAULT_PROBLEM, DEFAULT_SAMPLER, DEFAULT_CACHE = "seed_h100", "genetic", "warm"


@dataclass(frozen=True)
class PreparedSearch:
    """A study that is ready to run."""

    storage: Storage
    study: Study
    problem: AttentionProblem
    gpu: GpuSpec
    device: DetectedDevice | None
    spaces: dict[str, SearchSpace]
    budget: Budget
    budget_text: str
    jobs: int
    sanitize: bool


def choose_device(name: str, devices: list[DetectedDevice]) -> tuple[GpuSpec, DetectedDevice | None]:
    """(GPU to search for, device to time on). The device is None where no GPU is: the search is then offline.

    Raises `GpuError` on an unknown GPU, on `auto` without a known device, and where the device is another GPU than the named one.
    """
    if name == "auto":
        if not devices:
            raise GpuError("There is no CUDA device here; name the GPU to search for offline, for example --gpu l4.")
        if devices[0].spec is None:
            raise GpuError(
                f"The device here, {devices[0].product}, is not in evoattn's table (see `evoattn gpus`); add a row to evoattn/gpu.py, or "
                "hide it (CUDA_VISIBLE_DEVICES=) to search offline."
            )
        return devices[0].spec, devices[0]
    spec = gpus.lookup(name)
    if not devices:
        return spec, None
    for device in devices[:1]:
        if device.spec is spec:
            return spec, device
    raise GpuError(
        f"The device here is a {devices[0].product}, not {spec.name}: use --gpu auto to search on it, "
        "or hide it (CUDA_VISIBLE_DEVICES=) to search offline."
    )


def choose_families(names: list[str], problem: AttentionProblem, gpu: GpuSpec) -> dict[str, SearchSpace]:
    """The spaces to search: the named families, or all that can serve the problem. Raises `FamilyError` or `ProblemError`."""
    spaces, reasons = {}, []
    for name in dict.fromkeys(names or registry.FAMILIES):
        if reason := registry.lookup(name).why_unsupported(problem, gpu):
            reasons.append(reason)
        else:
            spaces[name] = load_space(name, gpu)
    if not spaces or (names and reasons):
        raise ProblemError(f"No kernel for this problem: {' '.join(reasons)}")
    return spaces


def restrict(spaces: dict[str, SearchSpace], words: list[str], starting_configs: bool) -> dict[str, SearchSpace]:
    """The spaces as `--set NAME=V1,V2` words leave them, without their starting configs if those are not wanted. Raises `ConfigError`."""
    choices = parse_choices(words)
    known = {name for space in spaces.values() for name in space.names()}
    if unknown := sorted(set(choices) - known):
        raise ConfigError(f"No searched family has a parameter {unknown[0]}; they have {', '.join(sorted(known))}.")
    spaces = {name: space.restricted(choices) for name, space in spaces.items()}
    return spaces if starting_configs else {name: replace(space, starting=()) for name, space in spaces.items()}


def prepare_search(
    *,
    gpu: str,
    budget: str,
    problem: str | None,
    shape: str | None,
    families: list[str],
    sampler: str | None,
    study: str | None,
    seed: int | None,
    db: str,
    jobs: int,
    cache: str | None,
    resume: bool,
    sanitize: bool,
    choices: list[str],
    starting_configs: bool,
) -> PreparedSearch:
    """Check every word before anything starts, open the database, and find or make the study."""
    parsed = parse_budget(budget)
    if cache not in (None, "warm", "cold"):
        raise ConfigError(f"The cache mode is warm or cold, not {cache!r}.")
    if problem and shape:
        raise ProblemError("Give --problem or --shape, not both.")
    wanted = problems.parse_shape(shape) if shape else problems.lookup(problem or DEFAULT_PROBLEM)
    devices = gpus.detect_devices()
    if resume:
        if problem or shape or families or choices or not starting_configs or sampler or cache or seed is not None:
            raise ProblemError(
                "A resumed study keeps its problem, search space, sampler, seed and cache mode; leave --problem, --shape, --family, --set, "
                "--no-starting-configs, --sampler, --seed and --cache out."
            )
        return _resume(db, study, devices, gpu, parsed, budget, jobs, sanitize)
    spec, device = choose_device(gpu, devices)
    spaces = restrict(choose_families(families, wanted, spec), choices, starting_configs)
    sampler, seed = sampler or DEFAULT_SAMPLER, seed or 0
    sampler_of(sampler, spaces, wanted, spec, seed)
    storage = Storage.open(db)
    name = study or _free_name(storage, f"{wanted.name or 'shape'}_{spec.name}{'' if device else '_offline'}")
    options = {"cache": cache or DEFAULT_CACHE, "jobs": jobs, "set": choices, "starting_configs": starting_configs}
    made = storage.create_study(
        name, wanted, spec, device is None, sampler, seed, tuple(spaces), collect(device), options
    )
    return PreparedSearch(storage, made, wanted, spec, device, spaces, parsed, budget, jobs, sanitize)


def _resume(
    db: str,
    name: str | None,
    devices: list[DetectedDevice],
    gpu: str,
    budget: Budget,
    budget_text: str,
    jobs: int,
    sanitize: bool,
) -> PreparedSearch:
    storage = Storage.open(db, create=False)
    study = storage.chosen_study(name)
    if gpu != "auto" and gpus.lookup(gpu).name != study.gpu:
        raise GpuError(
            f"Study {study.name} is for the GPU {study.gpu}, not {gpu}; leave --gpu out, or start another study."
        )
    problem = AttentionProblem(**study.problem)
    if study.offline:
        spec, device = gpus.lookup(study.gpu), None
    else:
        if not devices:
            raise GpuError(
                f"Study {study.name} was timed on {study.gpu}, and there is no CUDA device here; resume it there, or start an offline study."
            )
        spec, device = choose_device(study.gpu, devices)
    spaces = choose_families(list(study.families), problem, spec)
    spaces = restrict(spaces, study.options.get("set", []), study.options.get("starting_configs", True))
    return PreparedSearch(storage, study, problem, spec, device, spaces, budget, budget_text, jobs, sanitize)


def sampler_of(
    name: str, spaces: dict[str, SearchSpace], problem: AttentionProblem, gpu: GpuSpec, seed: int
) -> Sampler:
    def why_invalid(family: str, params: dict) -> str | None:
        return registry.lookup(family).why_invalid(problem, KernelConfig(family, params), gpu)

    return make_sampler(name, spaces, problem, seed, why_invalid)


def _free_name(storage: Storage, stem: str) -> str:
    taken = {s.name for s in storage.studies()}
    return next(n for n in (stem, *(f"{stem}_{i}" for i in range(2, len(taken) + 3))) if n not in taken)
