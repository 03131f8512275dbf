"""Lengths of the sequences of a batch, as a problem records them: a distribution, and the numbers that it gives."""

import re
from dataclasses import dataclass

_TEXT = re.compile(r"(log:)?(\d{1,9}):(\d{1,9})", re.ASCII)
_SHUFFLE = 0x9E3779B1
"""An odd number near 2^32 over the golden ratio: multiples of it lie evenly spread (Knuth, The Art of Computer
Programming, volume 3, 6.4)."""


@dataclass(frozen=True)
class Lengths:
    """Whole numbers from `lowest` to `highest`, uniform, or uniform in their logarithm with `log`."""

    lowest: int
    highest: int
    log: bool = False

    def draw(self, count: int) -> tuple[int, ...]:
        """`count` lengths, always the same: at equal distances from the lowest to the highest, both among them, in an
        order that mixes short and long; one alone is the highest."""
        if count == 1 or self.lowest == self.highest:
            return (self.highest,) * count
        order = sorted(range(count), key=lambda i: i * _SHUFFLE % 2**32)
        drawn = [0] * count
        for rank, place in enumerate(order):
            share = rank / (count - 1)
            at = self.lowest * (self.highest / self.lowest) ** share if self.log else self._at(share)
            drawn[place] = round(at)
        return tuple(drawn)

    def _at(self, share: float) -> float:
        return self.lowest + (self.highest - self.lowest) * share


def parse_lengths(text: str) -> Lengths:
    """`512:4096`, uniform, or `log:16:4096`. Raises `ValueError` on anything else."""
    if match := _TEXT.fullmatch(text):
        log, lowest, highest = bool(match[1]), int(match[2]), int(match[3])
        if lowest <= highest and not (log and lowest == 0):
            return Lengths(lowest, highest, log)
    raise ValueError(f"{text!r} is no range of lengths, lowest:highest.")
