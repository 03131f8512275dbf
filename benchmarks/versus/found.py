"""What one tool tried on one problem, and when."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Tried:
    """One candidate."""

    at_s: float
    """Seconds since the tool's process was started: imports and the making of a search space count."""
    us: float | None
    """What the tool itself measured; None where the candidate failed. Tools measure differently: only a common final
    compares them."""
    config: dict[str, Any]


@dataclass
class Found:
    """A tool's whole run."""

    tool: str
    """Name and version."""
    kind: str
    """`evoattn`: configs are a `family` and its `params`; `helion`: they are Helion's own."""
    problem: str
    tried: list[Tried] = field(default_factory=list)

    def best_within(self, seconds: float) -> Tried | None:
        """The best by the tool's own time among those tried within `seconds` of its start; the one a user would get."""
        right = [tried for tried in self.tried if tried.us is not None and tried.at_s <= seconds]
        return min(right, key=lambda tried: tried.us or 0.0, default=None)

    @property
    def per_second(self) -> float | None:
        """Candidates per second from the first to the last; None below two."""
        times = sorted(tried.at_s for tried in self.tried)
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def read(path: Path) -> Found:
    """What `Found.write` wrote."""
    fields = json.loads(path.read_text())
    return Found(**fields | {"tried": [Tried(**tried) for tried in fields["tried"]]})
