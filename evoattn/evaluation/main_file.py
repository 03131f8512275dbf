"""Worker processes import the main file of the program that starts them: a search must not begin in that import."""

from __future__ import annotations

import multiprocessing

from evoattn.model.errors import WrongUse

GUARD = 'put the call under `if __name__ == "__main__":`, as worker processes import the script that starts them'


def require_no_import() -> None:
    """Raise `WrongUse` in a worker process that imports the main file, where no process can be started.

    As `multiprocessing.spawn` finds it out, which says so only after a study has begun.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise WrongUse(f"A search was begun by its own worker process: {GUARD}.")
