"""`import evoattn` is quick and imports nothing heavy; its names exist; the user's folders are where they belong."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import evoattn
from evoattn.backends.compiler import compile_candidate
from evoattn.model import paths
from evoattn.model.records import Candidate
from evoattn.storage import Storage, StorageError

HEAVY = ("torch", "numpy", "cupy", "optuna", "sqlalchemy", "alembic", "jinja2", "rich", "typer", "yaml")


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after the statement."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_import_is_light():
    assert not loaded_by("import evoattn") & {*HEAVY, "importlib_metadata"}


IMPORT_WITHOUT = """
import importlib, pkgutil, sys
class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in SEARCH_ONLY:
            raise ImportError(f"{name} is for the search")
sys.meta_path.insert(0, Refusal())
for room in ("model", "families", "ptx", "backends", "correctness", "ops"):
    for module in pkgutil.walk_packages([f"{PACKAGE}/{room}"], f"evoattn.{room}."):
        if module.name not in SEARCH_MODULES:
            importlib.import_module(module.name)
import os
os.environ.update(XDG_DATA_HOME="/somewhere/data", XDG_CACHE_HOME="/somewhere/cache")
os.environ.pop("EVOATTN_CACHE", None)
from evoattn.model import paths
assert str(paths.data_folder()) == "/somewhere/data/evoattn"
assert str(paths.cubin_cache()) == "/somewhere/cache/evoattn/cubins"
"""
SEARCH_MODULES = {"evoattn.model.safe_yaml", "evoattn.families.render"}
"""Those that read YAML and templates."""


@pytest.mark.slow
def test_a_kernel_that_was_found_needs_no_library_of_the_search():
    values = {
        "SEARCH_ONLY": {"optuna", "sqlalchemy", "alembic", "jinja2", "rich", "typer", "yaml"},
        "SEARCH_MODULES": SEARCH_MODULES,
        "PACKAGE": str(Path(evoattn.__file__).parent),
    }
    code = "".join(f"{name} = {value!r}\n" for name, value in values.items()) + IMPORT_WITHOUT
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there():
    for name in evoattn.__all__:
        assert getattr(evoattn, name) is not None
        assert name in dir(evoattn)
    assert evoattn.GPUS["h100"].arch == "sm_90a"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = evoattn.nothing


def test_the_users_folders(monkeypatch, tmp_path):
    for name in ("EVOATTN_DB", "EVOATTN_CACHE"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if sys.platform == "linux":
        assert paths.default_database() == str(tmp_path / "data" / "evoattn" / "evoattn.sqlite")
        assert paths.cubin_cache() == tmp_path / "cache" / "evoattn" / "cubins"
    Storage.open(paths.default_database()).close()  # the first search makes the folder
    assert Path(paths.default_database()).exists()
    with pytest.raises(StorageError):
        Storage.open(str(tmp_path / "mistyped" / "evoattn.sqlite"))
    monkeypatch.setenv("EVOATTN_DB", "sqlite:///elsewhere.sqlite")
    assert paths.default_database() == "sqlite:///elsewhere.sqlite"


def test_compiled_kernels_are_kept_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("EVOATTN_CACHE", str(tmp_path))
    candidate = Candidate("any", {}, "id", 'extern "C" __global__ void k() {}', "sm_89")
    fresh = compile_candidate(candidate)
    assert len(list(tmp_path.rglob("*.kernel"))) == 1
    assert compile_candidate(candidate) == fresh


def test_type_checkers_see_every_public_name():
    """As the very things that are imported at first use."""
    tree = ast.parse(Path(evoattn.__file__).read_text())
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    homes = {name.asname: statement.module for statement in block.body for name in statement.names}
    assert set(homes) == set(evoattn.__all__) - {"__version__"}
    for name, home in homes.items():
        real = getattr(import_module(home), name)
        public = getattr(evoattn, name)
        assert public is real or (name == "search" and home == "evoattn.search.api")
