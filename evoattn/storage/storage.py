"""The database as the rest of evoattn sees it: records in, records out, sentences for what goes wrong."""

from __future__ import annotations

from evoattn.storage.peers import Peers
from evoattn.storage.profiles import Profiles
from evoattn.storage.studies import Studies
from evoattn.storage.trials import Trials


class Storage(Studies, Trials, Peers, Profiles):
    """An open database: `Storage.open(url)`.

    Rows are only ever added. Every method raises `StorageError` where the database fails it.
    """
