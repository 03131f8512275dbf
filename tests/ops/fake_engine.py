"""An engine of `evoattn.tune` that finds what the test says."""

from evoattn.engine.groups import Kernel
from evoattn.model.records import Timing
from evoattn.timing.protocol import FinalResult
from tests.ops.fake_device import WGMMA


class FakeEngine:
    """Finds one kernel; `final` gives `us` to it, SDPA 10 µs, and 9 µs to what runs today."""

    us, wrong = 5.0, ""
    compiled = measured = 3

    def __init__(self, groups, gpu):
        self.groups, self.seconds, self.ended = groups, 0.0, False
        FakeEngine.last = self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.ended = True

    def run(self, seconds, refresh):
        self.seconds = seconds
        refresh()
        for group in self.groups:
            for index in range(len(group.problems)):
                kernel = Kernel("flash_wgmma", WGMMA, state="right", times={index: self.us})
                group.kernels[f"{index}"] = kernel

    def final(self, group, index, kernels, protocol, peers):
        assert protocol.proves
        times = {kernel.id: self.us if kernel.params == WGMMA else 9.0 for kernel in kernels}
        return self.result(times | {"flash": 12.0, "cudnn": 10.0}, {"math": "too slow"})

    def result(self, times, refusals):
        """`wrong` is why kernels that take `us` are disqualified."""
        words = {
            name: {"disqualified": self.wrong} if self.wrong and us == self.us else {} for name, us in times.items()
        }
        return FinalResult({name: Timing((us,), words[name]) for name, us in times.items()}, refusals)
