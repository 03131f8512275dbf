"""A file that is written anew is the former one or the new one, never a part; what is no file is written to. Paths as
people read them."""

import contextlib
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from evoattn.model.errors import WrongUse
from evoattn.model.paths import NO_HOME, _user_folder, data_folder, database_text, default_database, for_people
from evoattn.model.whole_file import write_file

FULL = """
import resource, sys
from pathlib import Path
from evoattn.model.whole_file import write_file
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_file(Path(sys.argv[1]), "x" * 100000)
except OSError as error:
    print(error.filename)
"""
"""As on a disk with room for 1,000 bytes more."""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "folder" / "kernel.cu"
    path.parent.mkdir()
    path.write_text("former")
    return path


@pytest.mark.parametrize("there", [True, False])
def test_a_full_disk_leaves_what_was_there_and_nothing_else(file, there):
    if not there:
        file.unlink()
    done = subprocess.run([sys.executable, "-c", FULL, file], check=True, capture_output=True, text=True)
    assert done.stdout == f"{file}\n"
    assert [path.read_text() for path in file.parent.iterdir()] == ["former"] * there


def test_a_file_keeps_its_permissions_and_a_new_one_has_the_usual(file):
    usual = stat.S_IMODE(file.stat().st_mode)
    file.chmod(0o624)
    write_file(file, "µ")
    assert file.read_bytes() == "µ".encode() and stat.S_IMODE(file.stat().st_mode) == 0o624
    write_file(file.with_name("new"), "")
    assert stat.S_IMODE(file.with_name("new").stat().st_mode) == usual
    assert sorted(os.listdir(file.parent)) == ["kernel.cu", "new"]


def test_readers_of_the_former_file_see_it_to_its_end(file):
    with file.open() as reader:
        write_file(file, "new")
        assert reader.read() == "former"


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link(file, tmp_path, there):
    link = tmp_path / "link"
    link.symlink_to(file)
    if not there:
        file.unlink()
    write_file(link, "new")
    assert link.is_symlink() and file.read_text() == "new" and not file.is_symlink()


def test_all_names_of_a_file_see_what_is_written(file, tmp_path):
    other = tmp_path / "other"
    other.hardlink_to(file)
    write_file(file, "new")
    assert other.read_text() == "new"


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_file_of_another_owner_stays_his(file):
    os.chown(file, 4321, 4321)
    write_file(file, "new")
    assert file.stat().st_uid == 4321 and file.read_text() == "new"


def test_a_pipe_and_a_device_are_written_to(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_file(pipe, "through")
    reader.join()
    assert read == ["through"] and stat.S_ISFIFO(pipe.stat().st_mode)
    write_file(Path("/dev/null"), "gone")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_is_written_to_also_where_it_is_a_file(file, name):
    code = f"from evoattn.model.whole_file import *; write_file(Path({name!r}), 'new'); print('after', flush=True)"
    with file.open("a") as output:
        subprocess.run([sys.executable, "-c", code], stdout=output, check=True)
    assert file.read_text() == "newafter\n"


def test_what_cannot_be_written_is_named(tmp_path):
    for path in (tmp_path / "none" / "file", tmp_path):
        with pytest.raises(OSError) as error:
            write_file(path, "")
        assert error.value.filename == str(path) and not (tmp_path / "none").exists()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_file_in_a_folder_that_takes_no_others_is_written_in_place(file):
    file.parent.chmod(0o555)
    write_file(file, "new")
    file.parent.chmod(0o755)
    assert file.read_text() == "new"


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


def test_a_database_is_named_by_a_text_or_a_path():
    assert [database_text(db) for db in (None, "a.sqlite", Path("b/c.sqlite"))] == [None, "a.sqlite", "b/c.sqlite"]
    for db in (5, b"a.sqlite"):
        with pytest.raises(WrongUse, match="db must be a path or a URL as text"):
            database_text(db)


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


def test_a_database_is_not_written_over(tmp_path):
    """`evoattn report --format json -o` of the very database took it with all its studies."""
    file = tmp_path / "a.sqlite"
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute("create table studies (name)")
    before = file.read_bytes()
    (link := tmp_path / "link").symlink_to(file)
    for path in (file, link):
        with pytest.raises(OSError, match="A database is not written over"):
            write_file(path, "{}")
    assert file.read_bytes() == before
