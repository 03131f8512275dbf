"""Workers of a Ray cluster, as a search sees them."""

from __future__ import annotations

import pickle
import time
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

from evoattn.evaluation.process import Ending, sentence_of
from evoattn.evaluation.workers import START_TRIES, BaseWorker, Outcome, WorkerFailed
from evoattn.fleet import ray_node
from evoattn.fleet.facts import NodeDiffers

START_SECONDS = 120.0
"""What the start of a process on a node may take, beyond the time of a task."""
GONE_SECONDS = 300.0
"""A search ends once no worker of a kind has been up for so long: their nodes are gone."""


class RayWorker(BaseWorker):
    """Waits for one answer of the cluster at a time; a subclass says what runs there."""

    def __init__(self) -> None:
        import ray  # here: this module is imported where Ray is not

        super().__init__()
        self._ray = ray
        self.connection, self._bell = Pipe(duplex=False)
        self._siblings: Sequence[RayWorker] = (self,)
        self._future: Future[Any] | None = None
        self._ref: Any = None
        self._since = self._deadline = time.monotonic()

    @classmethod
    def several(cls, workers: Sequence[RayWorker]) -> Sequence[RayWorker]:
        """Workers of one kind, of which some may be gone as long as one is there."""
        for worker in workers:
            worker._siblings = workers
        return workers

    @abstractmethod
    def _start(self) -> None:
        """Ask the cluster for a process; `poll` sees it come up."""

    @abstractmethod
    def _forget(self) -> None:
        """Have the cluster end the task at hand and its process."""

    def _watch(self, ref: Any, seconds: float) -> None:
        """Ring once the answer is there; it may take `seconds`."""
        self._ref, self._future = ref, ref.future()
        self._deadline = time.monotonic() + seconds
        self._future.add_done_callback(lambda future: self._ring())

    def _ring(self) -> None:
        with suppress(OSError):  # a worker that was stopped listens no more
            self._bell.send_bytes(b"!")

    def check(self) -> None:
        """Raises `WorkerFailed` as of a process of this machine, but not as long as another worker of its kind is
        up."""
        if any(worker.ready for worker in self._siblings):
            return
        super().check()
        if time.monotonic() > max(worker._since for worker in self._siblings) + GONE_SECONDS:
            raise WorkerFailed(f"No node of the Ray cluster has taken work for {GONE_SECONDS:.0f} s.")

    def poll(self) -> Outcome | None:
        """See `BaseWorker`. Raises `NodeDiffers` where a node has another version than this machine."""
        while self.connection.poll():
            self.connection.recv_bytes()
        if self._future is None:
            return None
        if not self._future.done():
            if time.monotonic() < self._deadline:
                return None
            self._forget()
            return self._lost(Ending.TIMEOUT, "It ran past its limit and was ended.", restart=True)
        future, self._future, self._ref = self._future, None, None
        try:
            ending, value, doing = pickle.loads(future.result())
        except Exception as error:  # of Ray, or of the node's code
            return self._failed(error)
        if not self.ready:
            self.ready, self.failures_to_start = True, 0
            return None
        self._doing = doing
        return self._end(ending, value)

    def _failed(self, error: Exception) -> Outcome | None:
        exceptions = self._ray.exceptions
        node_lost = (  # an actor of ours dies of nothing else, as kernels run in a process below it
            exceptions.NodeDiedError,
            exceptions.LocalRayletDiedError,
            exceptions.OwnerDiedError,
            exceptions.ObjectLostError,
            exceptions.ActorDiedError,
            exceptions.ActorUnavailableError,
        )
        cause = error.cause if isinstance(error, exceptions.RayTaskError) else error
        if isinstance(cause, NodeDiffers):
            raise NodeDiffers(str(cause)) from None
        if isinstance(error, node_lost):
            return self._lost(Ending.LOST, f"A node of the Ray cluster is gone: {sentence_of(error)}", restart=True)
        if isinstance(error, exceptions.WorkerCrashedError | exceptions.OutOfMemoryError):
            return self._lost(Ending.DIED, f"Its process on a node ended: {sentence_of(error)}", restart=True)
        return self._lost(Ending.RAISED, sentence_of(cause), restart=not self.ready)

    def _lost(self, ending: Ending, sentence: str, restart: bool) -> Outcome | None:
        """The end of a task without an answer; the outcome, or None if the process was only starting."""
        had_task = self.busy
        if not had_task and ending is not Ending.LOST:
            self.failures_to_start += 1
            self.start_failure = sentence
        if restart:
            self.ready, self._since = False, time.monotonic()
            if self.failures_to_start < START_TRIES:
                self._start()
        return self._end(ending, sentence) if had_task else None

    def stop(self) -> None:
        self._forget()
        self._future = None
        self._bell.close()
        self.connection.close()


class RayCompiler(RayWorker):
    """Has one compile task at a time, which runs on any node with a free core."""

    def __init__(self, answer: Any, words: bytes) -> None:
        """`answer`: `ray_node.answer` as a remote function; one for all, as each process of a node loads it once."""
        super().__init__()
        self._answer, self._words = answer, words
        self._start()

    @classmethod
    def pool(cls, count: int, words: bytes) -> Sequence[RayWorker]:
        """So many of them."""
        import ray

        answer = ray.remote(num_cpus=1, max_retries=0)(ray_node.answer)
        return cls.several([cls(answer, words) for _ in range(count)])

    def _start(self) -> None:
        self._watch(self._answer.remote(self._words, None), START_SECONDS)

    def submit(self, tag: Any, task: Any, seconds: float) -> None:
        self._begin(tag)
        self._watch(self._answer.remote(self._words, ray_node.packed(task)), seconds + START_SECONDS)

    def _forget(self) -> None:
        if self._ref is not None:
            self._ray.cancel(self._ref, force=True)
            self._ref = None


class RayBoard(RayWorker):
    """An actor with one GPU. One that is lost with its node is made anew where a GPU is free."""

    def __init__(self) -> None:
        super().__init__()
        self._make = self._ray.remote(num_gpus=1, num_cpus=1, max_restarts=0)(ray_node.Board)
        self._words: bytes
        self.actor = self._make.remote()

    def begin(self, words: bytes) -> None:
        """Start its worker process."""
        self._words = words
        self._watch(self.actor.start.remote(words), START_SECONDS + START_SECONDS)

    def _start(self) -> None:
        assert self._words, "begin comes first"
        self._ray.kill(self.actor)
        self.actor = self._make.remote()
        self.begin(self._words)

    def submit(self, tag: Any, task: Any, seconds: float) -> None:
        self._begin(tag)
        self._watch(self.actor.run.remote(ray_node.packed(task), seconds), seconds + START_SECONDS)

    def _forget(self) -> None:
        self._ray.kill(self.actor)
