"""What the peers did in a study; in the database they are called baselines."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from evoattn.model.records import Study, Timing
from evoattn.storage.database import Database
from evoattn.storage.rows import plain_text, timing_from_row
from evoattn.storage.schema import baselines


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
