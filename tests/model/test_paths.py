"""Paths as people read them."""

import pytest

from evoattn.model.paths import NO_HOME, _user_folder, data_folder, default_database, for_people


@pytest.mark.parametrize(
    "home, path, expected",
    [
        ("/home/ada", "/home/ada/runs/a.sqlite", "~/runs/a.sqlite"),
        ("/home/ada/", "/home/ada/a.sqlite", "~/a.sqlite"),
        ("/home/ada", "/home/ada2/a.sqlite", "/home/ada2/a.sqlite"),
        ("/home/ada", "/home/ada", "/home/ada"),
        ("/home/ada", "runs/home/ada/a.sqlite", "runs/home/ada/a.sqlite"),
        ("/home/ada", "sqlite:////home/ada/a.sqlite", "sqlite:////home/ada/a.sqlite"),
        ("/", "/a.sqlite", "/a.sqlite"),
    ],
)
def test_the_home_folder_is_a_tilde(monkeypatch, home, path, expected):
    monkeypatch.setenv("HOME", home)
    assert for_people(path) == expected


@pytest.mark.parametrize(
    "home, given, expected",
    [("/home/ada", "", "/home/ada/.cache/evoattn"), ("/home/ada", "/x", "/x/evoattn"), ("odd", "/x", "/x/evoattn")],
)
def test_the_folders_are_those_of_linux(monkeypatch, home, given, expected):
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert str(_user_folder("cache")) == expected
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert (_user_folder("cache") == NO_HOME) is (home == "odd")


def test_the_database_is_in_the_folder_of_data_unless_said_otherwise(monkeypatch):
    monkeypatch.delenv("EVOATTN_DB", raising=False)
    assert default_database() == f"{data_folder()}/evoattn.sqlite" and data_folder().name == "evoattn"
    monkeypatch.setenv("EVOATTN_DB", "sqlite:///x.db")
    assert default_database() == "sqlite:///x.db"
