"""The timer without a device: nothing is collected while a graph is captured."""

import gc

import pytest

from evoattn.timing.timer import Timer


class FakeGraph:
    def capture_begin(self):
        assert not gc.isenabled()

    def capture_end(self):
        assert not gc.isenabled()

    def replay(self):
        return "replayed"


def test_no_garbage_is_collected_during_a_capture():
    timer, seen = Timer(make_event=lambda **_: None, make_graph=FakeGraph), []
    assert gc.isenabled()
    assert timer.capture([lambda: seen.append(gc.isenabled())] * 2)() == "replayed" and seen == [False, False]
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        timer.capture([lambda: 1 / 0])
    assert gc.isenabled()
    gc.disable()
    try:
        timer.capture([])
        assert not gc.isenabled()  # as it was found
    finally:
        gc.enable()
