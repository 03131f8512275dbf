"""The times of one candidate, as they are recorded and as they are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """Times of one candidate in µs per call, each sample the mean over one graph replay."""

    samples_us: tuple[float, ...]
    protocol: dict[str, Any]
    """Cache mode, calls per replay, stage (`screen`, `repeat`, `final`), the `run` (timings with the same one were
    taken in turns), the device's `clocks`; in a search on several GPUs the `board` and its `board_factor`; of a final
    also least and most `sm_mhz`, `power_w` and `temperature_c` over its rounds, `energy_mj_per_call` of the whole
    board, `sanitizer`, `disqualified`: the sentence by which a finalist proved wrong, and `out`: the sentence by
    which it left the final, without samples or with one of a probe."""

    @staticmethod
    def out(sentence: str, disqualified: bool) -> Timing:
        """Of a finalist that failed in a final, so that it has no time of it."""
        return Timing(
            (),
            {"stage": "final", "out": sentence}
            | ({"disqualified": f"In the final: {sentence}"} if disqualified else {}),
        )

    @property
    def board_factor(self) -> float:
        """How much longer its board took for the study's reference kernel than the first board that timed it; 1 in a
        search on one GPU."""
        return float(self.protocol.get("board_factor", 1.0))

    @property
    def median_us(self) -> float:
        """Comparable between boards: the samples' median over `board_factor`. Infinite where there are no samples."""
        from statistics import median  # with decimal and fractions: a process that only runs kernels needs none of them

        return median(self.samples_us) / self.board_factor if self.samples_us else math.inf

    def interleaved_with(self, other: Timing) -> bool:
        """Whether both come out of the same rounds, so that their ratio is fair."""
        run = self.protocol.get("run")
        return run is not None and run == other.protocol.get("run")

    @property
    def disqualified(self) -> str:
        """Of a final: how the finalist proved wrong, in one sentence; empty if it did not."""
        return str(self.protocol.get("disqualified", ""))

    def quantile_us(self, share: float) -> float:
        """Sample at `share` (0 to 1) of the sorted samples, by nearest rank; comparable as `median_us` is."""
        ordered = sorted(self.samples_us)
        return ordered[round(share * (len(ordered) - 1))] / self.board_factor
