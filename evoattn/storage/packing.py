"""Rendered sources, proved when they are read."""

from __future__ import annotations

import hashlib
import zlib

from evoattn.storage.errors import StorageError

MAX_SOURCE_BYTES = 16 << 20
"""No rendered kernel comes near; a row that unpacks to more is not ours."""


def unpack_source(source_hash: str, packed: bytes) -> str:
    """The text, proved by its hash. Raises `StorageError` if it is not what was recorded."""
    try:
        data = zlib.decompressobj().decompress(packed, MAX_SOURCE_BYTES)
    except (zlib.error, TypeError):
        data = b""
    if hashlib.sha256(data).hexdigest() != source_hash:
        raise StorageError(
            f"The source {source_hash[:12]} is not in the database as it was recorded; use another copy of it."
        )
    return data.decode()
