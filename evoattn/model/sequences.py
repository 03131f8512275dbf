"""Packed sequences: how long each is, as a problem records it, and where each begins.

A text gives the lengths of the queries and those of the keys, with a slash between them where they are not the same:
- `16:4096` or `log:16:4096`, a range (`Lengths`); lengths beyond the problem's longest are cut to it;
- `3+0+17`, each length;
- `sum:1000`, lengths as equal as can be with that sum: for a caller whose lengths are on the device alone."""

import re
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

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


_LIST = re.compile(r"\d{1,9}(\+\d{1,9})*", re.ASCII)
_SUM = re.compile(r"sum:(\d{1,12})", re.ASCII)

MOST_ROWS = (1 << 31) - 1
"""Of all sequences together: `cu_seqlens_q` and `cu_seqlens_k` are int32."""
PACKED_PARTS = 8
"""Sequences, their longest and their rows together are rounded to so many numbers between two powers of two: each batch
of packed sequences has lengths of its own."""
Sequences = tuple[tuple[int, int], ...]
"""(queries, keys) of each."""


def _lengths(text: str, count: int, longest: int) -> tuple[int, ...]:
    """`count` lengths up to `longest`. Raises `ValueError`, one reason without a full stop."""
    if match := _SUM.fullmatch(text):
        each, more = divmod(int(match[1]), count)
        lengths = tuple(each + (i < more) for i in range(count))
    elif _LIST.fullmatch(text):
        lengths = tuple(map(int, text.split("+")))
    else:
        try:
            return tuple(min(length, longest) for length in parse_lengths(text).draw(count))
        except ValueError:
            raise ValueError(
                f"varlen takes lengths such as 16:4096, log:16:4096, sum:1000 or 3+0+17, with a slash between those of "
                f"queries and of keys, not {text!r}"
            ) from None
    if len(lengths) != count:
        raise ValueError(f"varlen has {len(lengths)} lengths for {count} sequences (B)")
    if max(lengths) > longest:
        raise ValueError(f"varlen has a length of {max(lengths)}, above the longest of {longest} (S)")
    return lengths


@cache
def parse_sequences(text: str, count: int, most_queries: int, most_keys: int) -> Sequences:
    """(queries, keys) of `count` sequences of at most so many. Raises `ValueError`, one reason without a full stop."""
    queries_text, slash, keys_text = text.partition("/")
    queries = _lengths(queries_text, count, most_queries)
    keys = _lengths(keys_text if slash else queries_text, count, most_keys)
    if not (any(queries) and any(keys)):
        raise ValueError("varlen leaves all queries or all keys empty; give one sequence a length")
    if (total := max(sum(queries), sum(keys))) > MOST_ROWS:
        raise ValueError(f"varlen has {total} rows in all, above the {MOST_ROWS} that an int32 counts")
    return tuple(zip(queries, keys, strict=True))


def starts(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Where each sequence begins, and where the last one ends: `cu_seqlens` of flash-attention."""
    return (0, *accumulate(lengths))


def power_below(length: int) -> int:
    """The greatest power of two that is no more."""
    return 1 << length.bit_length() >> 1


def rounded_up(length: int, fine: int, parts: int) -> int:
    """The next multiple of `fine`, and of the power of two that is a `parts`-th of `length` at most."""
    granule = max(fine, power_below(length) // parts)
    return -(-length // granule) * granule


@cache
def with_room(count: int, longest: int, rows: int) -> tuple[int, int, int]:
    """Packed sequences, the most queries of one and all their rows, each rounded up. The longest is never so short that
    the rows do not fit: those of other sequences may lie in front of them."""
    count, longest, rows = (rounded_up(size, 1, PACKED_PARTS) for size in (count, longest, rows))
    return count, max(longest, -(-rows // max(count, 1))), rows
