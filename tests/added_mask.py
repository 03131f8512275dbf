"""A row of the table of masks for the time of a test."""

from collections.abc import Iterator
from contextlib import contextmanager

from evoattn.model.mask import MASKS, Mask


@contextmanager
def added(mask: Mask) -> Iterator[None]:
    """`MASKS` with one row more, of a name that it has not."""
    assert mask.name not in MASKS
    MASKS[mask.name] = mask
    try:
        yield
    finally:
        del MASKS[mask.name]
