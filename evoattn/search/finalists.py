"""Who takes part in the final of a search, and what compute-sanitizer says of them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from evoattn.backends.compiler import CompileError
from evoattn.correctness import sanitizer
from evoattn.engine.scale import Reference
from evoattn.engine.tools import Tools
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Study, Timing, Trial
from evoattn.model.space import ConfigError, KernelConfig, SearchSpace
from evoattn.samplers.base import STARTING
from evoattn.storage import Storage
from evoattn.timing.protocol import Finalists

FINALISTS = 8
SANITIZED_AT_ONCE = 4
"""Each is a process that imports torch and makes a CUDA context, 0.5 GB of the device's memory."""
LOOK_SECONDS = 0.1
"""Between two calls of `refresh` while compute-sanitizer runs."""


def config_of(trial: Trial, spaces: dict[str, SearchSpace]) -> KernelConfig | None:
    """The trial's config if it is one of today's space: a database may hold those of another version, or anything."""
    try:
        return spaces[trial.family].make_config(trial.config)
    except (KeyError, ConfigError):
        return None


def choose(
    storage: Storage,
    study: Study,
    problem: AttentionProblem,
    gpu: GpuSpec,
    spaces: dict[str, SearchSpace],
    tools: Tools,
) -> Finalists:
    """By the trial's number: the best `FINALISTS` candidates, and the best starting config if it is none of them.

    So what the search gained over the starting config is measured in one run. A trial that is not rendered today as it
    was recorded, or no longer compiles, is passed over. Raises `StorageError`."""
    finalists: Finalists = {}

    def takes_part(trial: Trial) -> bool:
        if str(trial.number) not in finalists and (built := rebuilt(trial, problem, gpu, spaces, tools)):
            finalists[str(trial.number)] = built
        return str(trial.number) in finalists

    for trial in storage.leaderboard(study, FINALISTS, finalists_first=False):
        takes_part(trial)
    for trial in storage.leaderboard(study, FINALISTS, finalists_first=False, operator=STARTING):
        if takes_part(trial):
            break
    return finalists


def rebuilt(
    trial: Trial, problem: AttentionProblem, gpu: GpuSpec, spaces: dict[str, SearchSpace], tools: Tools
) -> BuiltKernel | None:
    """The trial's kernel, compiled anew; None where it is not rendered today as it was recorded, or does not
    compile."""
    if (config := config_of(trial, spaces)) is None:
        return None
    family = registry.lookup(trial.family)
    candidate = tools.render(family, problem, config, gpu)
    # A source of another version, or of whoever wrote the database, is not run.
    if candidate.source_hash != trial.source_hash:
        return None
    try:
        return BuiltKernel(family, config, gpu, tools.compile(candidate))
    except CompileError:  # by another compiler than the one that recorded it
        return None


def reference(
    storage: Storage,
    study: Study,
    problem: AttentionProblem,
    gpu: GpuSpec,
    spaces: dict[str, SearchSpace],
    tools: Tools,
    several: bool,
) -> Reference | None:
    """The kernel by which a resumed study compares boards: the one that it used before, else its leader.

    None for a study without a timed kernel, and where neither `several` boards are used nor were before. Raises
    `StorageError`."""
    for trial in storage.leaderboard(study, FINALISTS, finalists_first=False):
        earlier = next((t.protocol["reference"] for t in trial.timings if "reference" in t.protocol), None)
        if not several and earlier is None:
            continue
        used = storage.trial(earlier) if isinstance(earlier, int) else trial
        if used.study_id == study.id and used.timing and (built := rebuilt(used, problem, gpu, spaces, tools)):
            return Reference(built, used.number, used.timing.median_us)
    return None


def sanitize(
    problem: AttentionProblem,
    finalists: Finalists,
    timings: dict[str, Timing],
    refresh: Callable[[], None],
    judge: Callable[[AttentionProblem, BuiltKernel], dict[str, str]] = sanitizer.sanitize,
) -> None:
    """Add compute-sanitizer's verdicts to the finalists' timings; one that reads or writes out of bounds is
    disqualified.

    `judge` gives a sentence by tool; several finalists are judged at once. `refresh` is called often meanwhile; where
    it raises, no further finalist is judged."""
    measured = {name: kernel for name, kernel in finalists.items() if timings[name].samples_us}
    pool = ThreadPoolExecutor(SANITIZED_AT_ONCE)
    try:
        judged = {name: pool.submit(judge, problem, kernel) for name, kernel in measured.items()}
        while wait(judged.values(), LOOK_SECONDS).not_done:
            refresh()
    finally:
        pool.shutdown(cancel_futures=True)
    for name, kernel in measured.items():
        verdicts = judged[name].result()
        timings[name].protocol["sanitizer"] = verdicts
        if sanitizer.is_damning(verdicts, kernel.compiled):
            said = "; ".join(f"{tool} {sentence}" for tool, sentence in verdicts.items())
            timings[name].protocol.setdefault("disqualified", f"By compute-sanitizer: {said}")
