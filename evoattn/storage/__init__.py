"""The one source of truth: studies, trials, sources and raw samples in a database."""

from evoattn.storage.errors import StorageError, UnknownRecord
from evoattn.storage.storage import Storage

__all__ = ["Storage", "StorageError", "UnknownRecord"]
