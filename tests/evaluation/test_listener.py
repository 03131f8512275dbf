"""Who of many workers is heard, as some speak, fall silent and are replaced; a worker's memory and its imports."""

import ctypes
import multiprocessing
import py_compile
import resource
from contextlib import closing
from importlib.util import spec_from_file_location
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from evoattn.evaluation.handlers import keep_freed_memory
from evoattn.evaluation.imports import why_slow
from evoattn.evaluation.workers import REFRESH_SECONDS, Listener


class Speaker(SimpleNamespace):
    """A worker's connection, and the other end of it."""

    __hash__ = object.__hash__

    def __init__(self):
        self.replace()

    def replace(self):
        for end in (getattr(self, name, None) for name in ("connection", "mouth")):
            if end:
                end.close()
        self.connection, self.mouth = Pipe()


@pytest.fixture
def listener():
    with closing(Listener()) as listener:
        listener.wait([], 0.0)  # the first round is of all
        yield listener


def test_who_speaks_is_heard_until_it_is_listened_to(listener):
    one, other = Speaker(), Speaker()
    assert listener.wait([one, other], 0.0) == set()
    other.mouth.send("a")
    for _ in range(2):
        assert listener.wait([one, other], 5.0) == {other}
    other.connection.recv()
    assert listener.wait([one, other], 0.0) == set()


def test_replaced_workers_are_heard_also_where_they_swap_their_numbers(listener):
    one, other = Speaker(), Speaker()
    numbers = one.connection.fileno(), other.connection.fileno()
    assert listener.wait([one, other], 0.0) == set()
    for speaker in (one, other):
        speaker.connection.close(), speaker.mouth.close()
    other.replace(), one.replace()
    assert {one.connection.fileno(), other.connection.fileno()} & {*numbers}
    other.mouth.send("a")
    assert listener.wait([one, other], 5.0) == {other}
    one.mouth.send("a")
    assert listener.wait([one, other], 0.0) == {one, other}


def test_who_is_left_out_is_not_heard(listener):
    one, other = Speaker(), Speaker()
    one.mouth.send("a"), other.mouth.send("b")
    assert listener.wait([one, other], 5.0) == {one, other}
    assert listener.wait([other], 0.0) == {other}
    assert listener.wait([one], 0.0) == {one}


@pytest.mark.slow
def test_now_and_then_all_are_named_as_one_may_be_over_its_time(listener):
    one, other = Speaker(), Speaker()
    assert listener.wait([one, other], 2 * REFRESH_SECONDS) == {one, other}
    assert listener.wait([one, other], 0.0) == set()


PIECES, BYTES = 600, 1 << 16


def faults(keep: bool) -> int:
    """Page faults of the third of three rounds of small allocations, all freed before the next."""
    if keep:
        keep_freed_memory()
    counts = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        pieces = [b"x" * BYTES for _ in range(PIECES)]
        del pieces
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return counts[-1]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_memory_that_was_freed_is_used_again_without_a_page_fault():
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        given_back, kept = pool.map(faults, [False, True], chunksize=1)
    assert given_back > 10 * max(kept, 1)


def test_a_package_without_bytecode_is_named_until_it_is_compiled(tmp_path):
    file = tmp_path / "torch" / "__init__.py"
    file.parent.mkdir()
    file.write_text("")
    spec = spec_from_file_location("torch", file)
    assert "Python compiles torch anew" in why_slow(spec) and f"compileall -q {file.parent}`" in why_slow(spec)
    py_compile.compile(str(file), cfile=spec.cached)
    assert why_slow(spec) == ""


def test_a_package_that_is_not_there_is_no_slow_one():
    assert why_slow(None) == ""
