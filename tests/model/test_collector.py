"""The collector waits inside of a block, whoever ends it, and is left as it was."""

import gc
import os
import sys
import threading

import pytest

from evoattn.model import collector
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.ops.runtime import current


@pytest.fixture
def interrupted():
    """Names of the functions within which the collector has begun, which it does at every few objects."""
    names, before = set(), gc.get_threshold()

    def tell(phase, info):
        frame = sys._getframe(1)
        while frame:
            names.add(frame.f_code.co_name)
            frame = frame.f_back

    gc.set_threshold(10, 1, 1)
    gc.callbacks.append(tell)
    yield names
    gc.callbacks.remove(tell)
    gc.set_threshold(*before)


def many_objects():
    return [[] for _ in range(1000)]


def test_a_block_is_not_interrupted(interrupted):
    with collector.paused(), collector.paused():
        many_objects()
    assert gc.isenabled() and "many_objects" not in interrupted
    many_objects()
    assert "many_objects" in interrupted


def test_a_pick_is_not_interrupted(interrupted):
    assert current.best_known(AttentionProblem(3, 5, 5, 777, 777, 64), GPUS["h100"])
    assert gc.isenabled() and not interrupted & {"pick", "find"}


def test_it_goes_on_after_an_exception():
    with pytest.raises(KeyError), collector.paused():
        raise KeyError
    assert gc.isenabled()


def test_a_process_without_it_stays_without():
    gc.disable()
    try:
        with collector.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_waits_for_the_block_that_ends_last():
    inside, ended = threading.Event(), threading.Event()

    def stay():
        with collector.paused():
            inside.set()
            ended.wait(600)

    with collector.paused():
        thread = threading.Thread(target=stay)
        thread.start()
        assert inside.wait(600)
    assert not gc.isenabled()
    ended.set()
    thread.join()
    assert gc.isenabled()


def is_enabled_in_a_child() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if gc.isenabled() else 7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.slow
def test_a_child_does_not_wait_for_the_block_of_a_thread_that_it_lacks():
    inside, forked = threading.Event(), threading.Event()

    def wait_in_a_block():
        with collector.paused():
            inside.set()
            forked.wait(600)

    thread = threading.Thread(target=wait_in_a_block)
    thread.start()
    inside.wait(600)
    try:
        assert not gc.isenabled() and is_enabled_in_a_child()
    finally:
        forked.set()
        thread.join()
    with collector.paused():
        assert not is_enabled_in_a_child()
    assert is_enabled_in_a_child()
