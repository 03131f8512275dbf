"""Where the `evoattn` command begins: a search has its workers' imports run beside its own from the first moment on."""

import ctypes
import math
import os
import signal
import sys
import time
from io import TextIOWrapper
from typing import TextIO

TOGETHER_SECONDS = 1.0
"""Signals that come closer together are one."""


def _has_driver() -> bool:
    """Whether there may be a CUDA device."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class _Interrupt:
    """A handler of SIGTERM that does as Ctrl-C. `timeout` sends the signal twice at once, to its child and to the group
    of both: the second would end what the first has begun, the keeping of results."""

    def __init__(self) -> None:
        self._last = -math.inf

    def __call__(self, number: int, frame: object) -> None:
        before, self._last = self._last, time.monotonic()
        if self._last - before > TOGETHER_SECONDS:
            raise KeyboardInterrupt


def _nowhere() -> TextIO:
    """In place of a stream that the caller has closed, as a shell does by `>&-`."""
    return open(os.devnull, "w", encoding="utf-8")


def main() -> None:
    """Entry point of the `evoattn` command. Ctrl-C ends it with a sentence while it still imports, too; so does
    SIGTERM, by which `timeout`, containers and batch systems ask for an end."""
    signal.signal(signal.SIGTERM, _Interrupt())
    sys.stdout, sys.stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):  # a locale without a letter gets a question mark in its place
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        _run()
    except KeyboardInterrupt:
        print("evoattn: Interrupted.", file=sys.stderr)
        sys.exit(1)
    except OSError as error:  # of the help, which no command's own `errors` surrounds
        print(f"evoattn: {error.strerror or error}.", file=sys.stderr)
        sys.exit(1)


def _run() -> None:
    words = {word.split("=")[0] for word in sys.argv[2:]}
    if sys.argv[1:2] == ["search"] and not {"-h", "--help"} & words:
        from evoattn.evaluation import server
        from evoattn.model.errors import FailedRun

        try:
            if {"--offline", "--devices", "--ray"} & words or not _has_driver():
                server.start()  # many processes need torch, or none here
            else:
                server.begin_spare()  # the GPU worker
                server.start(light=True)  # all others
        except FailedRun as error:  # which no command's own `errors` surrounds
            print(f"evoattn: {error}", file=sys.stderr)
            sys.exit(1)
    from evoattn.cli.main import main as command  # imports typer, which takes longer than to start the server

    command()
