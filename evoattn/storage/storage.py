"""The database as the rest of evoattn sees it: records in, records out, sentences for what goes wrong."""

from typing import Any

from sqlalchemy import select

from evoattn.model.records import KernelCounters, Profile, Study, Timing
from evoattn.storage.course import Courses
from evoattn.storage.database import Database, now
from evoattn.storage.rows import Row, checked, each, plain_text, timing_from_row
from evoattn.storage.schema import baselines, profiles
from evoattn.storage.studies import Studies
from evoattn.storage.trials import Trials


class Peers(Database):
    """Adding and reading the times and refusals of peers."""

    def add_peer(self, study: Study, peer: str, timing: Timing | None, refusal: str = "") -> None:
        """Add a peer's timing, or (timing None) the sentence with which it refused the study's problem."""
        row: dict[str, Any] = {
            "study_id": study.id,
            "backend": peer,
            "refusal": refusal,
            "environment_id": self._environment_id,
        }
        if timing:
            row |= {"protocol": timing.protocol, "samples_us": list(timing.samples_us)}
        self._insert(baselines, row)

    def peers(self, study: Study) -> dict[str, list[Timing]]:
        """The peers measured in the study by name, each with its timings in the order recorded."""
        found: dict[str, list[Timing]] = {}
        query = (
            select(baselines)
            .where(baselines.c.study_id == study.id, baselines.c.refusal == "")
            .order_by(baselines.c.id)
        )
        for row in self._read(lambda c: c.execute(query).mappings().all()):
            found.setdefault(plain_text(row["backend"]), []).append(timing_from_row(row))
        return found

    def refusals(self, study: Study) -> dict[str, str]:
        """The peers that refused the study's problem: the last sentence of each, by name."""
        query = (
            select(baselines.c.backend, baselines.c.refusal)
            .where(baselines.c.study_id == study.id, baselines.c.refusal != "")
            .order_by(baselines.c.id)
        )
        rows = self._read(lambda c: c.execute(query).all())
        return {plain_text(peer): plain_text(sentence) for peer, sentence in rows}


class Profiles(Database):
    """Adding and reading what hardware counters said."""

    def add_profile(self, study: Study, profile: Profile, trial_number: int | None) -> None:
        """Add the counters of a trial of the study, or (`trial_number` None) those of `profile.peer`."""
        row = {
            "study_id": study.id,
            "trial_number": trial_number,
            "peer": profile.peer,
            "tool": profile.tool,
            "cache": profile.cache,
            "kernels": [{"kernel": k.kernel, "us": k.us, "counters": k.counters} for k in profile.kernels],
            "environment_id": self._environment_id,
            "created_at": now(),
        }
        self._insert(profiles, row)

    def profile(self, trial_number: int) -> Profile | None:
        """The latest counters of the trial; None without any."""
        query = select(profiles).where(profiles.c.trial_number == trial_number).order_by(profiles.c.id.desc()).limit(1)
        row = self._read(lambda c: c.execute(query).mappings().first())
        return None if row is None else _from_row(row)

    def peer_profiles(self, study: Study) -> dict[str, Profile]:
        """The latest counters of each peer on the study's problem, by its name."""
        query = select(profiles).where(profiles.c.study_id == study.id, profiles.c.trial_number.is_(None))
        rows = self._read(lambda c: c.execute(query.order_by(profiles.c.id)).mappings().all())
        return {profile.peer: profile for profile in map(_from_row, rows)}


def _from_row(row: Row) -> Profile:
    """Raises `StorageError` if a value is not of its kind."""

    def build() -> Profile:
        kernels = tuple(_kernel_from_json(kernel) for kernel in each(dict, row["kernels"], list))
        return Profile(
            plain_text(row["peer"]),
            plain_text(row["tool"]),
            plain_text(row["cache"]),
            kernels,
            plain_text(row["created_at"]),
        )

    return checked(f"Profile {row['id']}", build)


def _kernel_from_json(kernel: dict[str, Any]) -> KernelCounters:
    counters = each((int, float), kernel["counters"], dict)
    return KernelCounters(
        plain_text(kernel["kernel"]),
        float(kernel["us"]),
        {plain_text(name): float(value) for name, value in counters.items()},
    )


class Storage(Studies, Trials, Courses, Peers, Profiles):
    """An open database: `Storage.open(url)`.

    Rows are only ever added. Every method raises `StorageError` where the database fails it."""
