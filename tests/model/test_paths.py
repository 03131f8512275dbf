"""Folders of the user: by the environment, else below the home folder."""

from pathlib import Path

import pytest

from evoattn.model import paths
from evoattn.model.errors import WrongUse
from evoattn.model.gpu import GPUS


@pytest.fixture(autouse=True)
def home(monkeypatch):
    for name in ("EVOATTN_CACHE", "EVOATTN_DB", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/a")


def test_folders_are_those_of_linux(monkeypatch):
    assert paths.cubin_cache() == Path("/home/a/.cache/evoattn/cubins")
    assert paths.default_database() == "/home/a/.local/share/evoattn/evoattn.sqlite"
    assert paths.calibrations_folder() == Path("/home/a/.local/share/evoattn/calibrations")
    assert paths.calibration_folder(GPUS["l4"]).name == "l4-58-sm_89"
    assert paths.calibration_name("../My Card", 3, "sm_80") == "_my_card-3-sm_80"
    monkeypatch.setenv("XDG_DATA_HOME", "/d")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert (paths.data_folder(), paths.cubin_cache()) == (Path("/d/evoattn"), Path("/c/evoattn/cubins"))
    monkeypatch.setenv("EVOATTN_CACHE", "/kernels")
    monkeypatch.setenv("EVOATTN_DB", "postgresql://x")
    assert (paths.cubin_cache(), paths.default_database()) == (Path("/kernels"), "postgresql://x")


def test_without_a_home_nothing_is_kept(monkeypatch):
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert paths.data_folder() == paths.NO_HOME and paths.cubin_cache() == paths.NO_HOME / "cubins"
    monkeypatch.setenv("XDG_DATA_HOME", "/d")
    assert paths.data_folder() == Path("/d/evoattn")


def test_a_database_is_text_or_a_path():
    assert [paths.database_text(db) for db in (None, "a.sqlite", Path("b/c"))] == [None, "a.sqlite", "b/c"]
    with pytest.raises(WrongUse, match="a path or a URL as text, not 3"):
        paths.database_text(3)


def test_people_read_a_tilde(monkeypatch):
    assert [paths.for_people(path) for path in ("/home/a/x", "/home/ab/x", "/home/a")] == [
        "~/x",
        "/home/ab/x",
        "/home/a",
    ]
    monkeypatch.setenv("HOME", "/")
    assert paths.for_people("/x") == "/x"


def test_a_package_s_own_folders_are_inside_it_or_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "package")
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    assert paths.own_folder("db") == tmp_path / "db"
    (tmp_path / "package" / "db").mkdir(parents=True)
    assert paths.own_folder("db") == tmp_path / "package" / "db"
