"""The one table of masks, and all that Python knows of a mask; a window is one (`Mask.windowed`).

A mask is a band of keys along a diagonal, as in FlashAttention's `window_size`: query i sees keys from
i + offset - past to i + offset + ahead, where either side may be open. The offset is 0 (the diagonal starts in the
upper left corner) or seqlen_k - seqlen_q (it ends in the lower right one). A new mask is a row of `MASKS`; each family
refuses it until it takes its name into `Family.masks`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal


class MaskKind(StrEnum):
    """What others call a mask."""

    FULL = "full"
    CAUSAL = "causal"
    BAND = "band"
    """Neither of the above."""


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees. `past` and `ahead` count keys beside the diagonal; None leaves that side open."""

    name: str
    past: int | None = None
    ahead: int | None = None
    corner: Literal["upper_left", "lower_right"] = "upper_left"
    """Where the diagonal is fixed if seqlen_q and seqlen_k differ."""
    spellings: tuple[str, ...] = ()
    """How else a user may write it, in any case."""
    short: str = ""
    """For the names of files and studies; `name` where empty."""

    @property
    def kind(self) -> MaskKind:
        """Peers know two kinds: all keys, and those up to the diagonal."""
        if self.past is None and self.ahead is None:
            return MaskKind.FULL
        return MaskKind.CAUSAL if self.past is None and self.ahead == 0 else MaskKind.BAND

    @property
    def causal(self) -> bool:
        """Whether keys behind the diagonal are hidden, so that blocks of early queries pass over them."""
        return self.ahead is not None

    @property
    def ends_lower_right(self) -> bool:
        """Whether distances count from the last key: by the diagonal, or, without one, as FlashAttention has it."""
        return self.kind is MaskKind.FULL or self.corner == "lower_right"

    def offset(self, seqlen_q: int, seqlen_k: int) -> int:
        """The diagonal's key of query 0; 0 without a diagonal."""
        return seqlen_k - seqlen_q if self.kind is not MaskKind.FULL and self.ends_lower_right else 0

    def band(self, seqlen_q: int, seqlen_k: int) -> Band:
        """What it shows of so many queries and keys."""
        offset = self.offset(seqlen_q, seqlen_k)
        lowest = None if self.past is None else offset - self.past
        return Band(seqlen_q, seqlen_k, lowest, None if self.ahead is None else offset + self.ahead)

    def windowed(self, past: int, ahead: int) -> Mask:
        """The keys of this mask from `past` before the diagonal to `ahead` behind it.

        Without a diagonal of its own it gets the one that ends in the lower right corner, as FlashAttention's
        `window_size` has it."""
        corner: Literal["lower_right", "upper_left"] = "lower_right" if self.ends_lower_right else "upper_left"
        return replace(self, past=past, ahead=ahead, corner=corner)

    def queries_to_see_all(self, seqlen_k: int) -> int:
        """Fewest queries of which one sees the last of `seqlen_k` keys."""
        if self.ahead is None or self.corner == "lower_right":
            return 1
        return max(1, seqlen_k - self.ahead)

    def constants(self) -> dict[str, bool]:
        """What every template gets to know of it (`templates/device/mask.cuh` reads them)."""
        has_diagonal = self.kind is not MaskKind.FULL
        return {"CAUSAL": self.causal, "CAUSAL_LOWER_RIGHT": has_diagonal and self.ends_lower_right}


@dataclass(frozen=True)
class Band:
    """A mask of known lengths: query i sees the keys from i + lowest to i + highest; None leaves that side open.

    Kernels know the same by `templates/device/mask.cuh`."""

    seqlen_q: int
    seqlen_k: int
    lowest: int | None
    highest: int | None

    def keys(self, first: int, last: int) -> range:
        """The keys that any of the queries `first` to `last` - 1 sees; empty if they see none."""
        begin = 0 if self.lowest is None else max(0, first + self.lowest)
        end = self.seqlen_k if self.highest is None else min(self.seqlen_k, last + self.highest)
        return range(begin, max(begin, end))

    def queries(self, first: int, last: int) -> range:
        """The queries that see any of the keys `first` to `last` - 1; empty if none does."""
        begin = 0 if self.highest is None else max(0, first - self.highest)
        end = self.seqlen_q if self.lowest is None else min(self.seqlen_q, last - self.lowest)
        return range(begin, max(begin, end) if begin < self.seqlen_q else begin)

    @property
    def pairs(self) -> int:
        """Query-key pairs of one head that it lets through."""
        rows, keys = self.seqlen_q, self.seqlen_k
        below = 0 if self.lowest is None else _clamped_sum(self.lowest, rows, keys)
        return (rows * keys if self.highest is None else _clamped_sum(self.highest + 1, rows, keys)) - below

    def sees(self, query: Any, key: Any) -> Any:
        """Whether a query sees a key that there is: of whole numbers, or of tensors that broadcast, a bool or Bool
        tensor; True for all where both sides are open."""
        seen = True if self.highest is None else key <= query + self.highest
        return seen if self.lowest is None else (key >= query + self.lowest) & seen


def _clamped_sum(start: int, rows: int, most: int) -> int:
    """The sum over rows i of i + start, each term kept within 0 and `most`."""
    first = min(rows, max(0, -start))  # the first row whose term is not below 0
    full = min(rows, max(first, most - start))  # the first row whose term is `most` or more
    rising = full - first
    return rising * (first + start) + rising * (rising - 1) // 2 + (rows - full) * most


FULL, CAUSAL_UPPER_LEFT, CAUSAL_LOWER_RIGHT = "full", "causal_upper_left", "causal_lower_right"
FULL_AND_CAUSAL = (FULL, CAUSAL_UPPER_LEFT, CAUSAL_LOWER_RIGHT)
"""The masks of a family whose template knows CAUSAL and CAUSAL_LOWER_RIGHT."""

MASKS: dict[str, Mask] = {
    mask.name: mask
    for mask in (
        Mask(FULL, spellings=("none",)),
        Mask(CAUSAL_UPPER_LEFT, ahead=0, spellings=("causal", "is_causal", "upper_left"), short="causal"),
        Mask(CAUSAL_LOWER_RIGHT, ahead=0, corner="lower_right", spellings=("lower_right",), short="lower_right"),
    )
}
"""By name, as in `torch.nn.attention.bias`."""
