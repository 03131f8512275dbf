"""What a study found, for calls from PyTorch: its leader is kept as one of the user's own finds."""

from evoattn.model.records import Timing, TrialState
from evoattn.model.space import KernelConfig
from evoattn.peers.labels import SDPA
from evoattn.portfolio.pick import pick
from evoattn.portfolio.wins import CLEARLY, Win, Wins
from evoattn.search.setup import PreparedSearch


def keep_leader(prepared: PreparedSearch, wins: Wins | None = None) -> str:
    """Keep the leader of a study for `evoattn.attention`, if its final showed it clearly ahead of what the op runs
    today and of SDPA. Gives a sentence about what the op runs from now on; an empty one where no final was held.

    `wins`: the user's own file unless given. Raises `StorageError`."""
    storage, study, gpu = prepared.storage, prepared.study, prepared.plan.gpu
    leaders = storage.leaderboard(study, 1)
    timing = leaders[0].timing if leaders else None
    if study.offline or timing is None or timing.protocol.get("stage") != "final":
        return ""
    if timing.protocol.get("cache") == "cold":
        return "evoattn.attention does not take it: it was timed with a cold cache."
    leader, wins, problem = leaders[0], wins or Wins(), prepared.plan.problem.canonical()
    today = wins.find(problem, gpu) or pick(problem, gpu)
    if today and today.config.id == leader.config_id:
        return "evoattn.attention runs this kernel already."
    peers = {name: timings[-1] for name, timings in storage.peers(study).items() if name in SDPA}
    times = {f"SDPA {name}": p.median_us for name, p in peers.items() if _same_run(p, timing)}
    if today and not today.estimated:
        us = _time_of(today.config, prepared)
        if us is None:
            return "evoattn.attention does not take it: what runs today was not timed in this study; `tune` compares."
        times = {f"{today.family} {today.config.id[:8]}": us} | times
    best = min(times, key=lambda name: times[name], default="")
    if best and timing.median_us > CLEARLY * times[best]:
        return f"evoattn.attention does not take it: it is not clearly ahead of {best}, {times[best]:.2f} µs."
    before = next(iter(times), "")
    win = Win(gpu.name, gpu.sm_count, problem, leader.family, dict(leader.config), timing.median_us, times.get(before))
    wins.add([win])
    instead = f", in place of {before}, {times[before]:.2f} µs" if before else ""
    return f"evoattn.attention runs it from now on{instead}."


def _time_of(config: KernelConfig, prepared: PreparedSearch) -> float | None:
    """µs of a config in the study; None where it has no time there."""
    trials = prepared.storage.iter_trials(prepared.study)
    timed = (t.timing for t in trials if t.config_id == config.id and t.state is TrialState.COMPLETE)
    return next((timing.median_us for timing in timed if timing), None)


def _same_run(one: Timing, other: Timing) -> bool:
    return one.protocol.get("run") == other.protocol.get("run")
