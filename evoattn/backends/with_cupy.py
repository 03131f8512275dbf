"""CuPy, imported so that no home directory, or one that cannot be written, does not stop it."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

FOLDER = "CUPY_CACHE_DIR"


def give_a_folder(variables: MutableMapping[str, str]) -> None:
    """CuPy makes a folder for a cache of its own at its import, which nothing here uses: name it another one in
    `variables` where its usual one cannot be made. It goes when this process ends."""
    if FOLDER in variables:
        return
    try:
        home = variables.get("HOME")
        folder = Path(home if home is not None else os.path.expanduser("~")) / ".cupy/kernel_cache"
        if not folder.is_absolute():
            raise OSError("there is no home directory")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        variables[FOLDER] = made = tempfile.mkdtemp(prefix="evoattn-")
        atexit.register(shutil.rmtree, made, ignore_errors=True)


give_a_folder(os.environ)

import cupy  # noqa: E402

__all__ = ["cupy", "give_a_folder"]
