"""Most worker processes are forked from one process that has the imports behind it and never touches CUDA.

So a worker is there in milliseconds once that process is: at the start, and after a kernel that broke its context. It
may leave out torch, whose import takes seconds: then it soon forks the workers that need none, and of those that do one
is begun ahead, before it is known what it will do."""

import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess, SpawnProcess
from threading import Event, Lock
from typing import Any, NamedTuple

from evoattn.evaluation.imports import import_for_device
from evoattn.evaluation.process import die_with_parent, serve
from evoattn.model.errors import FailedRun, WrongUse

_lock = Lock()
_without = 0


@contextmanager
def without_main_file() -> Iterator[None]:
    """Worker processes that are started meanwhile do not import the program's main file: it needs no guard, may come
    from standard input, and its imports cost them no time. They can be sent nothing that it defines."""
    global _without
    with _lock:
        _without += 1
    try:
        yield
    finally:
        with _lock:
            _without -= 1


@contextmanager
def as_asked() -> Iterator[None]:
    """Around the start of a process: `multiprocessing` does not see the main file if it is to be left out."""
    with _lock:
        main = vars(sys.modules["__main__"])
        names = ("__file__", "__spec__") if _without else ()
        kept: dict[str, Any] = {name: main[name] for name in names if name in main}
        if kept:
            main.pop("__file__", None)
            main["__spec__"] = None
        try:
            yield
        finally:
            main.update(kept)


def require_startable() -> None:
    """Raise `WrongUse` in a process of another library that can start none: `multiprocessing` allows that neither to a
    daemonic one, as those of its `Pool`, nor to one that still imports the main file, and says so only after a study
    has begun."""
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        raise WrongUse(
            "A search was begun by a process that imports the script which started it: put the call under "
            '`if __name__ == "__main__":`.'
        )
    if process.daemon:
        raise WrongUse("A search starts processes, which multiprocessing forbids in a daemonic one, as a Pool's are.")


PRELOADED, LIGHT = "evoattn.evaluation.preloaded", "evoattn.evaluation.preloaded_light"

CONTEXT = multiprocessing.get_context("forkserver")
"""Makes the worker processes. This process may have locks and CUDA state, which those do not inherit."""
BESIDE = multiprocessing.get_context("spawn")
"""Makes a process that does not wait for those imports, and has none of them."""
_imports: list[str] = []
"""What the server imports, once it was started."""
_has_forked = Event()


ADDRESS_BYTES = 1_200_000_000
"""Address space that a process with torch and the compiler takes: at 0.9e9 compiles fail, at 1.0e9 small ones go well
(torch 2.13 of a CPU, NVRTC 13.0)."""
FILES = 12
"""Files that a process opens beside what it has, for one worker more, the database and the libraries."""


def require_room() -> None:
    """Raises `FailedRun` where the limits of this process, which workers inherit, are too small for one worker more:
    it would fail somewhere on its way, each time in another way."""
    bytes_, _ = resource.getrlimit(resource.RLIMIT_AS)
    if bytes_ != resource.RLIM_INFINITY and bytes_ < ADDRESS_BYTES:
        raise FailedRun(
            f"A process may take {bytes_ / 1e9:.1f} GB of address space here, and a worker needs "
            f"{ADDRESS_BYTES / 1e9:.1f}; raise the limit (`ulimit -v`)."
        )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # the listing needs a file itself
        used = files
    if files != resource.RLIM_INFINITY and files < used + FILES:
        raise FailedRun(
            f"A process may have {files} files open here, which is too few for one worker more; raise the limit "
            "(`ulimit -n`), or use fewer --jobs."
        )


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that are started meanwhile get no SIGINT: Ctrl-C is not theirs to handle, and they ignore it only once
    their imports are done."""
    resource_tracker.ensure_running()  # first, as its start unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(light: bool = False) -> None:
    """Start the process that workers are forked from, unless it runs; returns at once. The first worker would start it
    too; started before, it imports while the caller does other things. `light`: it leaves out torch.

    Raises `WrongUse` in a process that was forked from one with such a server: it can neither use that nor see whether
    it runs; and as `require_room` does."""
    require_room()
    if not _imports:
        _imports.append(LIGHT if light else PRELOADED)
        CONTEXT.set_forkserver_preload(_imports)
    try:
        with without_interrupts():
            forkserver.ensure_running()
    except ChildProcessError:
        raise WrongUse(
            "A process that was forked from one that has searched can start no workers: begin it by the method spawn "
            "of multiprocessing."
        ) from None


def is_light() -> bool:
    """Whether the server leaves out torch."""
    return _imports == [LIGHT]


def forks_soon() -> bool:
    """Whether the server has its imports behind it, or soon has."""
    return is_light() or _has_forked.is_set()


def fork(target: Callable[..., None], arguments: tuple[Any, ...]) -> ForkServerProcess:
    """A process forked from the server, which is waited for. Raises `FailedRun` where that ended, and as `start`."""
    start()
    process = CONTEXT.Process(target=target, args=arguments, daemon=True)
    with without_interrupts(), as_asked():
        try:
            process.start()
        except (EOFError, ConnectionError):
            raise FailedRun(
                "The process that workers are forked from has ended; see that the limits of memory, files and "
                "processes (`ulimit -a`) leave room for it."
            ) from None
    _has_forked.set()
    return process


def spawn(target: Callable[..., None], arguments: tuple[Any, ...]) -> SpawnProcess:
    """A process with none of the server's imports. Raises as `require_room` does."""
    require_room()
    process = BESIDE.Process(target=target, args=arguments, daemon=True)
    with without_interrupts(), as_asked():
        process.start()
    return process


class Spare(NamedTuple):
    """A process that waits for what it is to do, and the pipe to it."""

    process: SpawnProcess
    connection: Connection


_spare: list[Spare] = []


def begin_spare() -> None:
    """Start it, unless there is one; returns at once. The next worker that needs those imports is this process
    (`take_spare`), and another one is begun once it is ready."""
    if _spare:
        return
    parent, child = BESIDE.Pipe()
    process = spawn(_import_and_serve, (child,))
    child.close()
    _spare.append(Spare(process, parent))


def take_spare() -> Spare | None:
    """The process that was begun, once; None where there is none, or it has died."""
    try:
        spare = _spare.pop()  # asked for in one step, as two threads may search
    except IndexError:
        return None
    return spare if spare.process.is_alive() else None


def _import_and_serve(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    threading.Thread(target=_import, daemon=True).start()
    with suppress(EOFError):  # nobody had use for it
        serve(connection, *connection.recv())


def _import() -> None:
    with suppress(ImportError, OSError):  # what fails here fails again in the handler, and is said by the search
        import_for_device()
