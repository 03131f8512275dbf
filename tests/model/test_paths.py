"""Paths as people read them."""

import pytest

from evoattn.model.paths import for_people


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
