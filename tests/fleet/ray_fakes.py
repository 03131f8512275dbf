"""What the nodes of a test's cluster run: made-up GPUs, and compiles that take a while."""

import os
import time

from evoattn.evaluation.process import Handler
from evoattn.model.gpu import DetectedDevice
from tests.search.search_fakes import FakeBoard, FakeCompiler


def made_up_gpus() -> list[DetectedDevice]:
    """In an actor: the GPU that Ray gave it, each a little slower than the one before."""
    number = int(os.environ["CUDA_VISIBLE_DEVICES"])
    return [DetectedDevice(0, "NVIDIA H100 80GB HBM3", (9, 0), "13.0", f"made up-{1 + number / 10}")]


class Named:
    """Gives a board of Ray the name that the fakes read their speed from."""

    def __init__(self, problem, gpu, cache):
        os.environ["CUDA_VISIBLE_DEVICES"] = made_up_gpus()[0].uuid
        super().__init__(problem, gpu, cache)


class FakeRayBoard(Named, FakeBoard):
    seconds = 0.2
    """So long that no board does all before the other's actor is up, on a busy machine too."""


class SlowCompiler(FakeCompiler):
    def __call__(self, task):
        time.sleep(0.1)
        return super().__call__(task)


class DiesOnce(Handler):
    """Its process ends at the task `die`."""

    def __call__(self, task):
        if task == "die":
            os._exit(3)
        if task == "hang":
            time.sleep(60)
        if task == "raise":
            raise ValueError("bad luck")
        return task, os.getpid()
