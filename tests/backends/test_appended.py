"""A file of lines that processes append to: what is whole is found, whatever else happens to the file."""

import multiprocessing
import resource

import pytest

from evoattn.backends.appended import MOST_BYTES, Lines


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
