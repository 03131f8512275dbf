"""When what happened in a search, over all of its processes: a line per event in the file that EVOATTN_TIMELINE names.

`benchmarks/samplers/search_speed.py` reads it."""

import os
import time

FILE = "EVOATTN_TIMELINE"


def mark(event: str) -> None:
    """Write down that `event` happens now, by `time.time`, and how many seconds of a core this process has taken; does
    nothing where no file is named."""
    if path := os.environ.get(FILE):
        with open(path, "a", encoding="utf-8") as file:  # lines of several processes do not mix: each is one write
            file.write(f"{time.time():.4f}\t{os.getpid()}\t{time.process_time():.3f}\t{event}\n")
