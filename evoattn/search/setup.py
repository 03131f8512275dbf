"""From a checked request to a study that is ready to run: which study, under which name, with which sampler."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from evoattn.engine.budget import Budget
from evoattn.engine.tools import Tools
from evoattn.evaluation.bandwidth import probed
from evoattn.fleet.base import Fleet
from evoattn.model import gpu as gpus
from evoattn.model.gpu import DetectedDevice, GpuError
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Study
from evoattn.samplers.base import Sampler
from evoattn.samplers.for_problem import sampler_of
from evoattn.search.ahead import AheadSampler
from evoattn.search.early_start import EarlyStart
from evoattn.search.machines import Machines
from evoattn.search.request import (
    DEFAULT_CACHE,
    DEFAULT_SAMPLER,
    SearchPlan,
    SearchRequest,
    SearchWords,
    choose_boards,
    choose_device,
)
from evoattn.search.spaces import choose_spaces
from evoattn.search.study import Search
from evoattn.storage import Storage
from evoattn.storage.storage import is_alike
from evoattn.storage.versions import collect


@dataclass(frozen=True)
class PreparedSearch:
    """A study that is ready to run."""

    storage: Storage
    study: Study
    plan: SearchPlan
    budget: Budget
    words: SearchWords
    earlier: Study | None = None
    """The latest study of the same problem and GPU, where a new one was begun beside it."""


def begin_study(request: SearchRequest, wanted: SearchPlan) -> PreparedSearch:
    """Record a new study in the database of the words, which is made if it is not there. Raises `StorageError`."""
    if wanted.device is not None:
        wanted = replace(wanted, gpu=probed(wanted.gpu, wanted.device))
    words, offline = request.words, wanted.device is None
    storage = Storage.open(words.database)
    alike = [study for study in storage.studies() if is_alike(study, wanted.problem, wanted.gpu, offline)]
    tried = [study for study in alike if storage.counts(study)]
    stem = f"{wanted.problem.short_name()}_{wanted.gpu.name}{'_offline' if offline else ''}"
    options: dict[str, Any] = {
        "cache": words.cache or DEFAULT_CACHE,
        "jobs": words.processes,
        "set": list(words.choices),
        "starting_configs": words.starting_configs,
    }
    create = partial(
        storage.create_study,
        problem=wanted.problem,
        gpu=wanted.gpu,
        offline=offline,
        sampler=words.sampler or DEFAULT_SAMPLER,
        seed=words.seed or 0,
        families=tuple(wanted.spaces),
        versions=collect(wanted.device),
        options=options,
    )
    study = create(words.study) if words.study else storage.create_numbered(stem, create)
    return PreparedSearch(storage, study, wanted, request.budget, words, tried[-1] if tried else None)


def resume_study(request: SearchRequest, devices: list[DetectedDevice]) -> PreparedSearch:
    """The study that the words name, else the latest one with a trial.

    Raises `UnknownRecord` where there is none, `GpuError` where its device is not here."""
    words = request.words
    storage = Storage.open(words.database, create=False)
    study = storage.chosen_study(words.study)
    if words.gpu != "auto" and gpus.lookup(words.gpu).name != study.gpu:
        raise GpuError(
            f"Study {study.name} is for the GPU {study.gpu}, not {words.gpu}; leave --gpu out, or start another study."
        )
    problem = AttentionProblem(**study.problem)
    boards: tuple[DetectedDevice, ...] = ()
    if study.offline:
        if words.devices is not None:
            raise GpuError(f"Study {study.name} is offline, so that nothing is timed: leave --devices out.")
        spec, device = study.spec, None
    else:
        if not devices:
            raise GpuError(
                f"Study {study.name} was timed on {study.gpu}, and there is no CUDA device here; resume it there, or "
                "start an offline study."
            )
        boards = choose_boards(words.devices, devices)
        spec, device = choose_device(study.gpu, list(boards) or devices)
        if not spec.is_like(study.spec):
            raise GpuError(
                f"Study {study.name} was timed on a {study.gpu} with {study.spec.sm_count} SMs, and the device here "
                f"has {spec.sm_count}; start another study."
            )
    options = study.options
    starting = options.get("starting_configs", True)
    spaces = choose_spaces(study.families, options.get("set", []), starting, problem, spec)
    return PreparedSearch(storage, study, SearchPlan(problem, spec, device, spaces, boards), request.budget, words)


def make_search(
    prepared: PreparedSearch, machines: Machines, tools: Tools | None = None, early: EarlyStart | None = None
) -> Search:
    """The study, ready to run on these machines, or with the `early` that was begun for it. Where kernels are timed its
    sampler has a process of its own, so that no GPU waits for its proposals; `Search.run` ends that process."""
    study, wanted, words = prepared.study, prepared.plan, prepared.words
    fleet: Fleet
    sampler: Sampler
    if early:
        fleet, sampler = early, early.take_over()
    else:
        fleet = machines.fleet(words, wanted)
        made_of = study.sampler, wanted.spaces, wanted.problem, wanted.gpu, study.seed
        sampler = sampler_of(*made_of) if study.offline else AheadSampler.start(sampler_of, *made_of)
    return Search(prepared.storage, study, wanted, sampler, fleet, words.sanitize, tools)
