"""Which of several contestants is faster, and whether that stands outside the noise: paired rounds, no assumption on
the noise's form.

In a round every contestant is timed once, in shuffled order, so that drift multiplies all of a round alike and cancels
in ratios within it. The median of those ratios has an exact confidence interval between two of them in order of size,
by the sign test: the number of ratios under the true median is binomial with p = 1/2 (Conover, Practical Nonparametric
Statistics, 3rd ed., section 3.2). Outliers and heavy tails move it no more than their count does."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb
from statistics import median

from evoattn.model.records import Timing

CONFIDENCE = 0.95
"""That no rival as fast as the leader is called slower, over all comparisons of one final together."""
RESOLUTION = 0.002
"""Differences that are none: one kernel in two CUDA graphs keeps a gap of its own through all rounds of a final, by
where its code and buffers lie. One kernel against itself differed by up to 0.08 % at 155 µs on an H100 (2026-11-22),
which the sign test alone called a win in 4 of 20 finals."""


@dataclass(frozen=True)
class Ratio:
    """A rival's time over the leader's: the median of the rounds' ratios, and its confidence interval."""

    median: float
    low: float
    high: float

    @property
    def tie(self) -> bool:
        """Whether neither is shown to be faster by more than `RESOLUTION`."""
        return self.low <= 1.0 + RESOLUTION and self.high >= 1.0 - RESOLUTION


def interval_ranks(rounds: int, confidence: float) -> tuple[int, int] | None:
    """(lower, upper) ranks from 0 of the sorted values between which the median lies with at least `confidence`; None:
    too few rounds."""
    tail, allowed = 0.0, (1.0 - confidence) / 2
    lower = -1
    for k in range(rounds // 2):
        tail += comb(rounds, k) / 2**rounds
        if tail > allowed:
            break
        lower = k
    return None if lower < 0 else (lower, rounds - 1 - lower)


def compare(rival: Timing, leader: Timing, confidence: float = CONFIDENCE) -> Ratio | None:
    """`rival` over `leader` in the rounds that both ran; None unless they ran in turns and often enough."""
    if not rival.interleaved_with(leader) or len(rival.samples_us) != len(leader.samples_us):
        return None
    if min(leader.samples_us) <= 0:  # a damaged database may hold anything
        return None
    ratios = sorted(mine / its for mine, its in zip(rival.samples_us, leader.samples_us, strict=True))
    ranks = interval_ranks(len(ratios), confidence)
    return ranks and Ratio(median(ratios), ratios[ranks[0]], ratios[ranks[1]])


def against_leader(timings: Mapping[int, Timing], leader: int) -> dict[int, Ratio]:
    """The ratio of every other timing of the leader's final to it, the confidence shared among them (Bonferroni's
    inequality)."""
    rivals = {n: t for n, t in timings.items() if n != leader and t.interleaved_with(timings[leader])}
    confidence = 1.0 - (1.0 - CONFIDENCE) / max(1, len(rivals))
    ratios = {n: compare(t, timings[leader], confidence) for n, t in rivals.items()}
    return {n: ratio for n, ratio in ratios.items() if ratio}
