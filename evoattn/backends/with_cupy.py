"""CuPy, imported so that it makes no folder in the home directory, and needs none."""

import atexit
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from evoattn.backends.cache_folder import make_folder
from evoattn.model.paths import cubin_cache

FOLDER = "CUPY_CACHE_DIR"


def give_a_folder(variables: MutableMapping[str, str], cache: Path) -> None:
    """CuPy makes a folder for a cache of its own at its import, which nothing here uses: name it in `variables` one in
    `cache`, unless the user chose one or has CuPy's usual one. Where that cannot be made it is a folder that goes when
    this process ends."""
    usual = Path(variables.get("HOME", os.path.expanduser("~"))) / ".cupy/kernel_cache"
    if FOLDER in variables or usual.is_dir():
        return
    folder = cache / "cupy"
    try:
        make_folder(folder)
        variables[FOLDER] = str(folder)
    except OSError:
        variables[FOLDER] = made = tempfile.mkdtemp(prefix="evoattn-")
        atexit.register(shutil.rmtree, made, ignore_errors=True)


give_a_folder(os.environ, cubin_cache())

import cupy  # noqa: E402

__all__ = ["cupy", "give_a_folder"]
