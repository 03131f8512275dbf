"""The hardware counters of a recorded trial, and of the best peer beside it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from evoattn.backends.compiler import CompileError, compile_source
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Profile, Study, Trial, TrialState
from evoattn.model.space import KernelConfig
from evoattn.profiling.ncu import Counted, ProfileError, count, parse
from evoattn.report.winner import fastest_peer
from evoattn.search.recorded import ReproduceError, require_device, require_fitting, require_trusted
from evoattn.storage import Storage
from evoattn.timing.protocol import CacheMode

Count = Callable[[AttentionProblem, BuiltKernel | str, CacheMode], Counted]


@dataclass(frozen=True)
class Profiled:
    """One contestant's counters, and the table of ncu out of which they were read."""

    profile: Profile
    csv: str


def profile_trial(
    storage: Storage,
    trial: Trial,
    study: Study,
    peer: str | None = None,
    trust_source: bool = False,
    count: Count = count,
    require_device: Callable[..., None] = require_device,
) -> Iterator[Profiled | str]:
    """Read the counters of `trial`, then those of `peer` (None: the fastest one of the trial's final), and record both.

    Gives a sentence in place of a peer's counters where there are none. Raises `ProfileError` where there are none of
    the trial, and `ReproduceError` where the trial cannot run here."""
    if trial.state is not TrialState.COMPLETE or trial.source_hash is None:
        raise ReproduceError(f"Trial {trial.number} is {trial.state}: counters are read of kernels that were timed.")
    problem, spec = AttentionProblem(**study.problem), study.spec
    cache: CacheMode = "cold" if study.options.get("cache") == "cold" else "warm"
    source = storage.source(trial.source_hash)
    require_trusted(trial, problem, spec, trust_source)
    require_fitting(trial, source)
    require_device(trial, spec)
    try:
        compiled = compile_source(source, spec.arch)
    except CompileError as error:
        raise ReproduceError(f"The recorded source no longer compiles: {error}.") from None
    config = KernelConfig(trial.family, trial.config)
    kernel = BuiltKernel(registry.lookup(trial.family), config, spec, compiled)
    ours = _profiled("", count(problem, kernel, cache), cache)
    storage.add_profile(study, ours.profile, trial.number)
    yield ours
    fastest = None if peer else fastest_peer(trial.timing, storage.peers(study))
    if name := peer or (fastest.backend if fastest else None):
        try:
            theirs = _profiled(name, count(problem, name, cache), cache)
        except ProfileError as error:
            yield f"Peer {name}: {error}"
        else:
            storage.add_profile(study, theirs.profile, None)
            yield theirs


def _profiled(peer: str, counted: Counted, cache: str) -> Profiled:
    return Profiled(Profile(peer, counted.tool, cache, parse(counted.csv)), counted.csv)
