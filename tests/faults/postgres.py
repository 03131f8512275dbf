"""Several searches on one PostgreSQL database, of which one is killed while the server goes away and comes back."""

import random
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import NullPool, create_engine, text

from evoattn.storage.engine import parse_url
from tests.faults.run import SMALL, Run, finish, require, wait_until
from tests.support.postgres import Server, programs

STUDIES = ("first", "second", "third")
AWAY = "does not answer; waiting up to"
ENDINGS = {signal.SIGINT: "shut down", signal.SIGQUIT: "shut down at once", signal.SIGKILL: "killed"}


class PostgresRun(Run):
    """A `Run` whose database is on a server of its own."""

    def __init__(self, folder: Path, server: Server) -> None:
        super().__init__(folder, "fake")
        self.server = server
        self.address = server.create("faults")
        self._engine = create_engine(parse_url(self.address), poolclass=NullPool)  # the server comes and goes

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        with self._engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(query))]

    def begin(self, study: str, budget: str) -> subprocess.Popen[str]:
        """A search of a new study, else its going on."""
        known = self._rows("SELECT 1 FROM information_schema.tables WHERE table_name = 'studies'")
        if known and (study,) in self._rows("SELECT name FROM studies"):
            return self.start("--budget", budget, "--jobs", "2", "--resume", "--study", study)
        return self.start("--gpu", self.target, "--budget", budget, *SMALL, "--study", study)

    def _check_whole(self) -> None:
        orphans = self._rows(
            "SELECT count(*) FROM trials LEFT JOIN sources ON source_hash = hash "
            "WHERE source_hash IS NOT NULL AND hash IS NULL"
        )
        require(orphans == [(0,)], f"{orphans[0][0]} trials have lost their source.")


def _has(run: Run, trials: int) -> bool:
    return len(run.acknowledged()) >= trials


def postgres_runs(folder: Path, rounds: int, rng: random.Random) -> str:
    """In each round three searches at once: one is killed, the server is ended in one of three ways and started again a
    moment later, and the other two go on to the end of their budgets."""
    if programs() is None:
        return "skipped: PostgreSQL is not installed"
    server, said, ended = Server(), 0, []
    try:
        server.start()
        run = PostgresRun(folder, server)
        for _ in range(rounds):
            searches = {study: run.begin(study, "60trials") for study in STUDIES}
            before = len(run.acknowledged())
            enough = before + rng.randint(20, 40)
            wait_until(partial(_has, run, enough))
            victim = rng.choice(STUDIES)
            searches[victim].send_signal(signal.SIGKILL)
            searches.pop(victim).communicate()
            how = rng.choice(list(ENDINGS))
            server.stop(how)
            ended.append(ENDINGS[how])
            time.sleep(rng.uniform(0.1, 2.0))
            server.start()
            for search in searches.values():
                output = finish(search, (0,), "Done (budget spent)")
                said += AWAY in output
            run.check()
        require(said > 0, "No search said that the server was away.")
        return (
            f"{rounds} rounds of 3 searches, server {', '.join(ended)}; {len(run.acknowledged())} trials acknowledged, "
            f"{run.check()} kept, none twice; {said} of {2 * rounds} searches met the server away and said so"
        )
    finally:
        server.remove()
