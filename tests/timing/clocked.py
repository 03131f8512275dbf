"""Kernels of tests of timing on a CPU: how long they take is said, and counted."""

import torch

from evoattn.backends.base import LaunchError


class CpuBackend:
    device = torch.device("cpu")

    def prepare(self, compiled, launches, buffers):
        return lambda: compiled(buffers)


class Passed:
    """What the fakes say that they took, in all."""

    us = 0.0


class Kernel:
    """Stands where a `BuiltKernel` stands; `us` is what a call takes, None that it does not launch."""

    def __init__(self, us=None, sizes=()):
        self.us, self.sizes, self.buffers, self.calls = us, dict(sizes), {}, 0

    def compiled(self, buffers):
        if self.us is None:
            raise LaunchError("no")
        self.buffers = buffers
        self.calls += 1
        Passed.us += self.us

    def workspace(self, problem):
        return self.sizes

    def unordered(self, problem):
        return ()

    def launches(self, problem):
        return ()
