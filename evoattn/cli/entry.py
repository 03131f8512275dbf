"""Where the `evoattn` command begins: a search has its workers' imports run beside its own from the first moment on."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `evoattn` command."""
    if sys.argv[1:2] == ["search"] and not {"-h", "--help"} & set(sys.argv):
        from evoattn.evaluation import server

        server.start()
    from evoattn.cli.main import main as command  # imports typer, which takes longer than to start the server

    command()
