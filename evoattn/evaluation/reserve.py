"""A worker process that begins with the slow imports before it is known what it will do."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import NamedTuple

from evoattn.evaluation import server
from evoattn.evaluation.process import serve

PRELOADED = "evoattn.evaluation.preloaded_device"


class Spare(NamedTuple):
    """A process that waits for what it is to do, and the pipe to it."""

    process: SpawnProcess
    connection: Connection


_spare: list[Spare] = []


def begin() -> None:
    """Start it, unless there is one; returns at once. The next worker that needs those imports is this process
    (`take`), and another one is begun once it is ready."""
    if _spare:
        return
    parent, child = server.BESIDE.Pipe()
    process = server.spawn(_import_and_serve, (child,))
    child.close()
    _spare.append(Spare(process, parent))


def take() -> Spare | None:
    """The process that was begun, once; None where there is none, or it has died."""
    try:
        spare = _spare.pop()  # asked for in one step, as two threads may search
    except IndexError:
        return None
    return spare if spare.process.is_alive() else None


def _import_and_serve(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.die_with_parent()
    threading.Thread(target=_import, daemon=True).start()
    with suppress(EOFError):  # nobody had use for it
        serve(connection, *connection.recv())


def _import() -> None:
    with suppress(ImportError, OSError):  # what fails here fails again in the handler, and is said by the search
        import_module(PRELOADED)
