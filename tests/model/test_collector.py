"""The collector waits inside of a block, whoever ends it, and is left as it was."""

import gc
import sys

import pytest

from evoattn.model import collector
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.ops import current


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
