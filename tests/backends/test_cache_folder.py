"""The folder of compiled kernels stays small, beside other processes and on disks that refuse. A file of lines that
processes append to: what is whole is found, whatever else happens to the file."""

import multiprocessing
import os
import resource
import shutil
import stat
import subprocess
import sys
import time

import pytest

from evoattn.backends import cache_folder
from evoattn.backends.appended import MOST_BYTES, Lines
from evoattn.backends.cache_folder import HOUR_S, LIMIT, MARK, keep_small, limit_bytes, mark_used, read_own, write_whole
from evoattn.model.whole_file import TEMPORARY

KB = 1000


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Ten kernels of 1 kB in two folders, the first used longest ago, and room for eight."""
    monkeypatch.setenv(LIMIT, str(8 * KB / 1e9))
    for i in range(10):
        path = tmp_path / "ab"[i % 2] / f"{i}.kernel"
        assert write_whole(path, bytes(KB))
        os.utime(path, (0, 1000 + i))
    return tmp_path


def kept(folder):
    return sorted(int(path.stem) for path in folder.rglob("*.kernel"))


def test_those_used_longest_ago_are_removed(folder):
    keep_small(folder)
    assert kept(folder) == [4, 5, 6, 7, 8, 9], "four fifths of the limit"


def test_one_that_is_used_stays(folder):
    mark_used(folder / "a" / "0.kernel")
    keep_small(folder)
    assert kept(folder) == [0, 5, 6, 7, 8, 9]


def test_a_use_is_written_down_once_a_day(folder):
    path, recent = folder / "a" / "0.kernel", time.time() - 100
    os.utime(path, (0, recent))
    mark_used(path)
    assert path.stat().st_mtime == pytest.approx(recent)


def test_nothing_is_removed_below_the_limit(folder, monkeypatch):
    monkeypatch.setenv(LIMIT, str(10 * KB / 1e9))
    keep_small(folder)
    assert len(kept(folder)) == 10


def test_the_folder_is_looked_through_every_ten_minutes(folder):
    (folder / MARK).touch()
    keep_small(folder)
    assert len(kept(folder)) == 10
    os.utime(folder / MARK, (0, time.time() - 601))
    keep_small(folder)
    assert len(kept(folder)) == 6


def test_only_what_is_ours_is_removed(folder, monkeypatch):
    monkeypatch.setenv(LIMIT, "0.000000001")
    names = ["thesis.tex", "evoattn-0.1.tar.gz", f"a/old{TEMPORARY}", f"a/new{TEMPORARY}"]
    others = [folder / name for name in names]
    for path in others:
        path.write_bytes(bytes(KB))
    for path in others[:3]:
        os.utime(path, (0, time.time() - HOUR_S - 60))
    keep_small(folder)
    assert kept(folder) == [] and [path.exists() for path in others] == [True, True, False, True]


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no setpriv")
def test_files_that_cannot_be_removed_leave_the_room_to_others(folder):
    """Those of folder a, as where another user made them; who is root gives up the right to remove them too."""
    (folder / "a").chmod(0o555)
    code = "import sys, pathlib; from evoattn.backends import cache_folder; "
    code += "cache_folder.keep_small(pathlib.Path(sys.argv[1]))"
    dropped = ["setpriv", "--bounding-set=-dac_override"] if os.getuid() == 0 else []
    try:
        subprocess.run([*dropped, sys.executable, "-c", code, folder], check=True)
    finally:
        (folder / "a").chmod(0o755)
    assert kept(folder) == [0, 2, 4, 6, 8, 9]


@pytest.mark.slow
def test_files_that_others_remove_meanwhile_do_not_count(folder):
    """Four processes look at once, as if none had looked before."""
    code = f"""
import sys
from pathlib import Path
from evoattn.backends import cache_folder
sys.stdin.read(1)
cache_folder._prune(Path({str(folder)!r}), 0.0)
"""
    started = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) for _ in range(4)]
    for process in started:
        process.communicate(b"x", timeout=600)
    assert [process.returncode for process in started] == [0] * 4
    assert kept(folder) == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("words", ["", "much", "nan", "inf"])
def test_a_limit_that_is_no_number_is_the_usual_one(monkeypatch, words):
    monkeypatch.setenv(LIMIT, words)
    assert limit_bytes() == int(cache_folder.USUAL_GB * 1e9)


def test_a_folder_that_is_not_there_or_cannot_be_changed_is_left_alone(tmp_path):
    keep_small(tmp_path / "none")
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not write_whole(blocked / "folder" / "1.kernel", b"")
    keep_small(blocked)
    mark_used(blocked / "1.kernel")


def test_a_full_disk_keeps_nothing_and_leaves_nothing(tmp_path):
    """As on one with room for 1,000 bytes more."""
    code = f"""
import resource
from pathlib import Path
from evoattn.backends.cache_folder import write_whole
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
assert not write_whole(Path({str(tmp_path)!r}) / "1.kernel", b"x" * 100000)
assert write_whole(Path({str(tmp_path)!r}) / "2.kernel", b"x" * 1000)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["2.kernel"]


def test_folders_are_made_for_their_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        assert write_whole(tmp_path / "cubins" / "ab" / "1.kernel", b"code")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cubins", tmp_path / "cubins" / "ab")]
    assert modes == [0o700, 0o700]


def planted(folder, name):
    """The file `name` of `folder`, as somebody else may have put it there."""
    path = folder / "1.kernel"
    path.parent.mkdir(mode=0o700)
    if name == "link":
        (folder.parent / "elsewhere").write_bytes(b"code")
        path.symlink_to(folder.parent / "elsewhere")
    elif name == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(b"code")
        path.chmod(0o666 if name == "file for all" else 0o600)
    if name.endswith("of another"):
        os.chown(path if name.startswith("file") else folder, 65534, -1)
    if name.startswith("folder for"):
        folder.chmod({"folder for the group": 0o770, "folder for all": 0o1777}[name])
    return path


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("link", "symbolic link"),
        ("pipe", "no regular file"),
        ("file for all", "may be written by other users"),
        ("folder for the group", "may be written by other users"),
        ("folder for all", "may be written by other users"),
        pytest.param("file of another", "belongs to the user 65534", marks=AS_ROOT),
        pytest.param("folder of another", "belongs to the user 65534", marks=AS_ROOT),
    ],
)
def test_what_others_may_have_written_is_passed_over_with_a_sentence(tmp_path, name, why):
    path = planted(tmp_path / "cubins", name)
    with pytest.warns(RuntimeWarning, match=f"is passed over, as .*{why}"):
        assert read_own(path) is None


def test_what_is_ours_or_missing_says_nothing(tmp_path, recwarn):
    assert read_own(planted(tmp_path / "cubins", "own")) == b"code"
    assert read_own(tmp_path / "cubins" / "2.kernel") is None and read_own(tmp_path / "none" / "1.kernel") is None
    assert not recwarn.list


def value(number):
    return ["a kernel", {"BLOCK_M": number}, number / 7]


def added(path, first, count):
    lines = Lines(path)
    for number in range(first, first + count):
        lines.add(("key", number), value(number))
    return path


def found(path, numbers):
    lines = Lines(path)
    return [lines.get(("key", number)) for number in numbers]


def test_the_last_value_of_a_key_counts_for_other_processes_too(tmp_path):
    ours, theirs = (Lines(tmp_path / "kept" / "lines") for _ in "ab")
    assert ours.get("key") is None and theirs.add("key", 1) and theirs.add("other", None)
    assert (ours.get("key"), ours.get("other"), ours.get("third")) == (1, None, None)
    assert ours.add("key", 2) and theirs.get("key") == 2


@pytest.mark.slow
def test_processes_that_write_at_once_lose_nothing(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.starmap(added, [(tmp_path / "lines", 100 * i, 100) for i in range(4)])
    assert found(tmp_path / "lines", range(400)) == [value(number) for number in range(400)]


def test_damage_costs_a_line_and_never_changes_one(tmp_path):
    path = added(tmp_path / "lines", 0, 3)
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]):
            path.write_bytes(damaged)
            seen = found(path, range(3))
            assert all(one in (None, value(number)) for number, one in enumerate(seen))
            assert seen.count(None) <= 1 or damaged == whole[:place]


@pytest.mark.parametrize("damage", [b"[]", b"half a line of a process that was killed", b"[" * 100_000, b"\xff"])
def test_what_lies_between_lines_costs_none(tmp_path, damage):
    path = added(tmp_path / "lines", 0, 1)
    path.write_bytes(damage + path.read_bytes() + damage)
    assert found(added(path, 1, 1), range(2)) == [value(0), value(1)]


def test_what_a_full_disk_refuses_is_written_with_the_next(tmp_path):
    path = added(tmp_path / "lines", 0, 1)
    lines, limits = Lines(path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
    try:
        assert not lines.add(("key", 1), value(1)) and lines.get(("key", 1)) == value(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert lines.add(("key", 2), value(2)) and found(path, range(3)) == [value(0), value(1), value(2)]


def test_a_file_stays_small_and_keeps_what_is_new(tmp_path):
    most = MOST_BYTES // 64
    lines, number = Lines(tmp_path / "lines", most), 0
    while number * 100 < 2 * most:
        assert lines.add(("key", number), value(number))
        number += 1
    assert most / 3 < (tmp_path / "lines").stat().st_size <= most
    assert found(tmp_path / "lines", (number - 1, 0)) == [value(number - 1), None]
