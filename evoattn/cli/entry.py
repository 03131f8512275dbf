"""Where the `evoattn` command begins: a search has its workers' imports run beside its own from the first moment on."""

from __future__ import annotations

import ctypes
import signal
import sys
from io import TextIOWrapper


def _has_driver() -> bool:
    """Whether there may be a CUDA device."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the `evoattn` command. Ctrl-C ends it with a sentence while it still imports, too; so does
    SIGTERM, by which `timeout`, containers and batch systems ask for an end."""
    signal.signal(signal.SIGTERM, _interrupt)
    for stream in (sys.stdout, sys.stderr):  # a locale without a letter gets a question mark in its place
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        _run()
    except KeyboardInterrupt:
        print("evoattn: Interrupted.", file=sys.stderr)
        sys.exit(1)


def _run() -> None:
    words = {word.split("=")[0] for word in sys.argv[2:]}
    if sys.argv[1:2] == ["search"] and not {"-h", "--help"} & words:
        from evoattn.evaluation import reserve, server

        if {"--offline", "--devices", "--ray"} & words or not _has_driver():
            server.start()  # many processes need torch, or none here
        else:
            reserve.begin()  # the GPU worker
            server.start(light=True)  # all others
    from evoattn.cli.main import main as command  # imports typer, which takes longer than to start the server

    command()
