"""What another process of this machine takes of a core."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class CoreTime:
    """CPU seconds of a process since this was made."""

    def __init__(self, pid: int) -> None:
        self._stat, self._before, self.seconds = Path(f"/proc/{pid}/stat"), 0.0, 0.0
        self.look()
        self._before, self.seconds = self.seconds, 0.0

    def look(self) -> float:
        """Bring `seconds` up to date; a process that has ended keeps them."""
        with suppress(OSError):
            fields = self._stat.read_text().rpartition(")")[2].split()
            self.seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") - self._before
        return self.seconds
