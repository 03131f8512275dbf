"""Faults that once passed the tests without a server: waiting for ever, and transactions that crossed another's."""

import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError

from evoattn.storage.patience import Patience


class Said(Exception):
    """An error as a driver of PostgreSQL has it."""

    def __init__(self, sqlstate):
        self.sqlstate = sqlstate


def failing(*codes):
    """Fails with these SQLSTATEs in turn, then answers."""
    left = [*codes]

    def once():
        if left:
            raise DBAPIError("select 1", {}, Said(left.pop(0)))
        return "an answer"

    return once


def patience(wait_s):
    told = []
    return Patience(create_engine("sqlite://"), "db", wait_s, told.append, pause_s=0.01), told


def test_a_server_is_waited_for_so_long_and_no_longer():
    waiting, told = patience(0.0)
    with pytest.raises(DBAPIError):
        waiting.until_there(failing(*["57P03"] * 4))
    assert len(told) == 1


def test_a_short_absence_is_waited_for():
    waiting, told = patience(60.0)
    assert waiting.until_there(failing(None, "08006", "57P01")) == "an answer" and len(told) == 1


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_what_another_transaction_undid_is_done_again_at_once(code):
    waiting, told = patience(0.0)
    assert waiting.until_there(failing(*[code] * 5)) == "an answer" and not told


def test_another_error_is_raised():
    waiting, told = patience(60.0)
    with pytest.raises(DBAPIError):
        waiting.until_there(failing("42P01"))
    assert not told
