"""Who of many workers is heard, as some speak, fall silent and are replaced."""

from contextlib import closing
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

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


def test_now_and_then_all_are_named_as_one_may_be_over_its_time(listener):
    one, other = Speaker(), Speaker()
    assert listener.wait([one, other], 2 * REFRESH_SECONDS) == {one, other}
    assert listener.wait([one, other], 0.0) == set()
