"""A device that is a clock: work is queued by a CPU that takes its time, and runs one piece after the other."""

from contextlib import contextmanager

import torch

from evoattn.backends.base import LaunchError
from evoattn.timing.timer import Timer


class DeviceClock(Timer):
    """`cpu` and `gpu` are µs: where the CPU stands, and when the device will have done what is queued."""

    replay_cpu_us = 15.0
    """What queueing a graph costs on the CPU."""
    own_us = 2.0
    """What a graph takes on the device beside its calls."""
    launch_us = 3.0
    """As `Timer.launch_us` would find: a little more than `own_us`."""

    def __init__(self):
        self.cpu = self.gpu = 0.0
        self._captured = None

    def run(self, us):
        """Queue work of so many µs."""
        self.gpu = max(self.gpu, self.cpu) + us

    def call(self, us, python_us):
        """A call that takes `us` on the device and `python_us` on the CPU."""

        def enqueue():
            self.cpu += python_us
            if self._captured is None:
                self.run(us)
            else:
                self._captured.append(us)

        return enqueue

    def queue(self, work):
        start = max(self.gpu, self.cpu)
        work()
        end = max(self.gpu, self.cpu)

        def elapsed_us():
            self.cpu = max(self.cpu, end)
            return end - start

        return elapsed_us

    @contextmanager
    def side_stream(self):
        yield

    def capture(self, calls):
        self._captured = []
        for call in calls:
            call()
        total, self._captured = sum(self._captured), None

        def replay():
            self.cpu += self.replay_cpu_us
            self.run(self.own_us + total)

        return replay

    def synchronize(self):
        self.cpu = max(self.cpu, self.gpu)


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
