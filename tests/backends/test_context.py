"""CUDA's context by libcuda alone, with a library that is none."""

import pytest

from evoattn.backends.context import make_context


class Driver:
    """Answers each call with success, or with the error of the one that `fails`."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.calls = fails, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            return 999 if name == self.fails else 0

        return call


CALLS = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


def test_the_primary_context_of_the_first_device_is_made():
    driver = Driver()
    assert make_context(lambda name: driver) and driver.calls == CALLS


@pytest.mark.parametrize("fails", CALLS)
def test_what_fails_is_no_error_here(fails):
    driver = Driver(fails)
    assert not make_context(lambda name: driver) and driver.calls[-1] == fails


def test_a_machine_without_a_driver_has_none():
    def load(name):
        raise OSError(name)

    assert not make_context(load)
