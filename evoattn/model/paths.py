"""Where the program's own files lie, and where it keeps the user's database and compiled kernels."""

import os
import re
from pathlib import Path
from typing import Literal

from evoattn.model.errors import WrongUse
from evoattn.model.gpu_table import GpuSpec

_PACKAGE = Path(__file__).resolve().parents[1]
ROOT = _PACKAGE.parent
"""The folder that holds the package: the root of a checkout, or `site-packages`."""


def own_folder(name: str) -> Path:
    """The folder `name` of the repository's top level. A wheel has it inside the package."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else ROOT / name


TEMPLATES = own_folder("templates")
SEARCH_SPACES = own_folder("search_spaces")
REPORT_TEMPLATES = own_folder("reports")
MIGRATIONS = own_folder("db")


NO_HOME = Path("/nonexistent/evoattn")
"""In place of the folders of a user who has no home directory: nothing is found there, and nothing kept."""


def _user_folder(kind: Literal["data", "cache"]) -> Path:
    """By the rule of Linux. To import platformdirs, which says the same, takes some milliseconds."""
    given = os.environ.get(f"XDG_{kind.upper()}_HOME")
    home = Path(os.path.expanduser("~"))
    if not given and not home.is_absolute():
        return NO_HOME
    return Path(given or home / {"data": ".local/share", "cache": ".cache"}[kind]) / "evoattn"


def data_folder() -> Path:
    """The user's folder for data to keep, e.g. `~/.local/share/evoattn`; it need not exist yet."""
    return _user_folder("data")


def default_database() -> str:
    """`EVOATTN_DB` (a SQLAlchemy URL or a path), or the path of `evoattn.sqlite` in the user's data folder."""
    return os.environ.get("EVOATTN_DB") or str(data_folder() / "evoattn.sqlite")


def for_people(path: str) -> str:
    """A path as a person reads it, with `~` for the home folder; anything else as it is. Not for a command to be
    pasted, where a shell leaves a quoted `~` alone."""
    home = os.path.expanduser("~").rstrip("/")
    return f"~{path.removeprefix(home)}" if home and path.startswith(f"{home}/") else path


def database_text(db: str | os.PathLike[str] | None) -> str | None:
    """A database as a caller of Python names it, a URL or a path, as text. Raises `WrongUse` for anything else."""
    if db is None or isinstance(db, str):
        return db
    if isinstance(db, os.PathLike):
        return os.fspath(db)
    raise WrongUse(f"db must be a path or a URL as text, not {db!r}.")


def cubin_cache() -> Path:
    """The folder of compiled kernels: `EVOATTN_CACHE`, or `cubins` in the user's cache folder.

    It may be deleted at any time."""
    if chosen := os.environ.get("EVOATTN_CACHE"):
        return Path(chosen)
    return _user_folder("cache") / "cubins"


FOLDER, FILE = "calibrations", "calibration.json"


def calibrations_folder() -> Path:
    """A folder for each card; it need not exist."""
    return data_folder() / FOLDER


def calibration_name(name: str, sm_count: int, arch: str) -> str:
    """What a card is called there, e.g. `l4-58-sm_89`."""
    return f"{re.sub(r'[^a-z0-9._-]', '_', name.lower()).lstrip('.')}-{sm_count}-{arch}"


def calibration_folder(gpu: GpuSpec) -> Path:
    """Of this card: name, SMs and architecture."""
    return calibrations_folder() / calibration_name(gpu.name, gpu.sm_count, gpu.arch)
