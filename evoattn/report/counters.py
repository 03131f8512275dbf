"""Hardware counters as a table: the trial's kernels beside those of a peer."""

from evoattn.model.records import KernelCounters, Profile, Study, Trial
from evoattn.peers.labels import peer_label
from evoattn.profiling.ncu import COUNTERS, STALLED
from evoattn.report.data import CountersTable
from evoattn.report.winner import fastest_peer
from evoattn.storage import Storage

STALLS_SHOWN = 4
"""Of the reasons for which warps wait, those that are largest in any column."""
KERNELS_SHOWN = 2
"""Of each contestant, the longest: SDPA's math backend launches many."""


def counters_table(storage: Storage, study: Study, trial: Trial) -> CountersTable | None:
    """The counters of a trial beside those of the fastest peer that has some; None if the trial has none.

    Raises `StorageError` where the database fails."""
    ours = storage.profile(trial.number)
    if ours is None:
        return None
    theirs = _best_peer(storage, study, trial)
    columns = [(f"trial {trial.number}", kernel) for kernel in _longest(ours)]
    columns += [(peer_label(theirs.peer), kernel) for kernel in _longest(theirs)] if theirs else []
    names = [name for name in COUNTERS if any(name in kernel.counters for _, kernel in columns)]
    rows: list[tuple[str, tuple[float | None, ...]]] = [("time, µs", tuple(kernel.us for _, kernel in columns))]
    rows += [
        (name, tuple(kernel.counters.get(name) for _, kernel in columns))
        for name in (*names, *_stalls([kernel for _, kernel in columns]))
    ]
    note = (
        f"{ours.tool}, {ours.cache} L2; stalled: warps that wait for that reason, per issued instruction. "
        "The profiler runs each kernel alone, so its times are not those of a final."
    )
    return CountersTable(tuple(name for name, _ in columns), tuple(k.kernel for _, k in columns), tuple(rows), note)


def _best_peer(storage: Storage, study: Study, trial: Trial) -> Profile | None:
    profiles = storage.peer_profiles(study)
    measured = {name: timings for name, timings in storage.peers(study).items() if name in profiles}
    if fastest := fastest_peer(trial.timing, measured):
        return profiles[fastest.backend]
    return min(profiles.values(), key=lambda profile: sum(kernel.us for kernel in profile.kernels), default=None)


def _longest(profile: Profile) -> list[KernelCounters]:
    return sorted(profile.kernels, key=lambda kernel: -kernel.us)[:KERNELS_SHOWN]


def _stalls(kernels: list[KernelCounters]) -> list[str]:
    largest: dict[str, float] = {}
    for kernel in kernels:
        for name, value in kernel.counters.items():
            if name.startswith(STALLED):
                largest[name] = max(value, largest.get(name, 0.0))
    return sorted(largest, key=lambda name: -largest[name])[:STALLS_SHOWN]
