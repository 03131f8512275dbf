"""What `evoattn search` was asked for, checked before anything slow is imported: no torch, no optuna, no database."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from evoattn.engine.budget import Budget, parse_budget
from evoattn.families import registry
from evoattn.model import gpu as gpus
from evoattn.model import shape_text as problems
from evoattn.model.errors import require_printable, require_text, require_whole
from evoattn.model.gpu import DetectedDevice, GpuError, GpuSpec
from evoattn.model.paths import default_database
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import ConfigError, SearchSpace, parse_choices
from evoattn.samplers.registry import require_sampler
from evoattn.search.spaces import choose_spaces

DEFAULT_SHAPE, DEFAULT_SAMPLER, DEFAULT_CACHE = "B=1,H=16,S=1024,D=64", "guided", "warm"


@dataclass(frozen=True)
class SearchWords:
    """The options of `evoattn search` as text and numbers; None stands for what was left out."""

    gpu: str = "auto"
    budget: str = "10m"
    problem: str | None = None
    """A name of `problems.yaml`; at most one of `problem` and `shape` is given."""
    shape: str | None = None
    """Such as `B=1,H=16,S=1024,D=64,mask=causal`."""
    families: tuple[str, ...] = ()
    """Empty: all that serve the problem."""
    choices: tuple[str, ...] = ()
    """`NAME=V1,V2` each."""
    starting_configs: bool = True
    sampler: str | None = None
    study: str | None = None
    seed: int | None = None
    db: str | None = None
    """URL or path; None: the usual one."""
    jobs: int | None = None
    """Compile processes; None: as many as the machine has cores."""
    cache: str | None = None
    resume: bool = False
    sanitize: bool = False
    devices: str | None = None
    """Numbers of the GPUs to time on, such as `0,1`, or `all`; None: the first, of a Ray cluster all."""
    ray: str | None = None
    """A Ray cluster to run on: its address, `auto`, or `local` for one of this machine; None: no Ray."""
    offline: bool = False
    """Compile, check on the interpreter and rank, whatever device is here."""
    keep: bool = True
    """Have `evoattn.attention` run what wins clearly."""

    @property
    def database(self) -> str:
        return self.db or default_database()

    @property
    def processes(self) -> int:
        return self.jobs or os.cpu_count() or 1


@dataclass(frozen=True)
class SearchRequest:
    """Words whose spelling is right. `problem` is None for a resumed study, which has its own."""

    words: SearchWords
    budget: Budget
    problem: AttentionProblem | None


@dataclass(frozen=True)
class SearchPlan:
    """What a new study searches, for which GPU, and the device to time on: None makes it an offline search."""

    problem: AttentionProblem
    gpu: GpuSpec
    device: DetectedDevice | None
    spaces: dict[str, SearchSpace]
    boards: tuple[DetectedDevice, ...] = ()
    """The GPUs to time on where they were named, `device` first."""


def read_words(words: SearchWords) -> SearchRequest:
    """Check every word by itself. Raises `WrongUse` or one of its kinds."""
    require_text(gpu=words.gpu, sampler=words.sampler, study=words.study, devices=words.devices, ray=words.ray)
    require_whole(0, seed=words.seed)
    require_whole(1, jobs=words.jobs)
    budget = parse_budget(words.budget)
    if words.gpu != "auto":
        gpus.lookup(words.gpu)
    if words.cache not in (None, "warm", "cold"):
        raise ConfigError(f"The cache mode is warm or cold, not {words.cache!r}.")
    if words.sampler is not None:
        require_sampler(words.sampler)
    if words.problem is not None and words.shape is not None:
        raise ProblemError("Give --problem or --shape, not both.")
    if words.study == "":
        raise ConfigError("The name of a study is not empty: leave --study out, or give a name.")
    if words.study is not None and not words.resume:
        require_printable("The name of a study", words.study)
    if words.devices is not None:
        read_numbers(words.devices)
        if words.offline or words.ray is not None:
            raise GpuError("--devices names GPUs of this machine: leave it out with --offline and with --ray.")
    for name in words.families:
        registry.lookup(name)
    parse_choices(list(words.choices))
    if words.problem is not None:
        problem = problems.lookup(words.problem)
    else:
        problem = parse_shape(DEFAULT_SHAPE if words.shape is None else words.shape)
    if not words.resume:
        return SearchRequest(words, budget, problem)
    kept = (words.problem, words.shape, words.families, words.choices, words.sampler, words.cache)
    if any(kept) or not words.starting_configs or words.seed is not None:
        raise ProblemError(
            "A resumed study keeps its problem, search space, sampler, seed and cache mode; leave --problem, --shape, "
            "--family, --set, --no-starting-configs, --sampler, --seed and --cache out."
        )
    return SearchRequest(words, budget, None)


def plan(words: SearchWords, problem: AttentionProblem, devices: list[DetectedDevice]) -> SearchPlan:
    """What the words ask for on a machine with these devices.

    Raises `GpuError` as `choose_device` does, `ConfigError` or `ProblemError` where nothing would be left to search."""
    boards = choose_boards(words.devices, devices)
    gpu, device = choose_device(words.gpu, list(boards) or devices, words.offline)
    spaces = choose_spaces(words.families, words.choices, words.starting_configs, problem, gpu)
    return SearchPlan(problem, gpu, device, spaces, boards)


def read_numbers(text: str) -> list[int] | None:
    """`0,1` as numbers; None for `all`. Raises `GpuError`."""
    if text == "all":
        return None
    numbers = text.split(",")
    if not all(n.isdecimal() and len(n) < 4 for n in numbers) or len(set(map(int, numbers))) < len(numbers):
        raise GpuError(f"--devices takes numbers of GPUs, such as 0,1, or all; not {text!r}.")
    return [int(n) for n in numbers]


def choose_boards(text: str | None, devices: list[DetectedDevice]) -> tuple[DetectedDevice, ...]:
    """The devices that `--devices` names, in its order; empty where it was left out.

    Raises `GpuError` on one that is not here, and on devices of which the times or the launches would differ."""
    if text is None:
        return ()
    numbers = read_numbers(text)
    if not devices:
        raise GpuError("There is no CUDA device here; leave --devices out, and search offline by --gpu l4 or the like.")
    here = {device.index: device for device in devices}
    for number in numbers or ():
        if number not in here:
            raise GpuError(f"There is no CUDA device {number} here; --devices may name {', '.join(map(str, here))}.")
    boards = tuple(here[n] for n in (sorted(here) if numbers is None else numbers))
    require_alike(boards)
    return boards


def require_alike(boards: Sequence[DetectedDevice]) -> None:
    """Raises `GpuError` unless all are the same model with as many SMs under the same driver."""
    for other in boards[1:]:
        first = boards[0]
        if first.spec is None or not first.spec.is_like(other.spec) or other.driver != first.driver:
            raise GpuError(
                f"The GPUs of one search are of one kind: here are a {first.describe()} and a {other.describe()}, "
                f"drivers for CUDA {first.driver} and {other.driver}."
            )


def choose_device(
    name: str, devices: list[DetectedDevice], offline: bool = False
) -> tuple[GpuSpec, DetectedDevice | None]:
    """(GPU to search for, device to time on). The device is None where no GPU is, or where the search is to be
    `offline`.

    Raises `GpuError` on an unknown GPU, on `auto` without a known device, and where the device is another GPU than the
    named one and the search is not to be offline."""
    if name == "auto":
        if not devices:
            raise GpuError(
                "There is no CUDA device here; name a GPU, for example --gpu l4, and nothing is timed (evoattn knows "
                f"{', '.join(gpus.GPUS)})."
            )
        if devices[0].spec is None:
            raise GpuError(
                f"The device here, {devices[0].product}, is older than sm_80 or says too little of itself; search "
                "offline for another GPU by --offline --gpu l4 or the like (see `evoattn gpus`)."
            )
        return devices[0].spec, None if offline else devices[0]
    here = devices[0].spec if devices else None
    if here is not None and here.name == name.lower():
        return here, None if offline else devices[0]
    spec = gpus.lookup(name)
    if here is not None and here.name == spec.name:
        return here, None if offline else devices[0]
    if offline or not devices:
        return spec, None
    raise GpuError(
        f"The device here is a {devices[0].product}, not {spec.name}: use --gpu auto to search on it, "
        "or --offline to search without timing."
    )
