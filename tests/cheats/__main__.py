"""Run kernels that cheat (`tests/cheats`) through a whole search: on the CUDA device that is here, or
offline on the interpreter.

    python -m tests.cheats [--offline] [--db FILE]

Prints what happens as it does, with seconds, then a table: the kernel, its state, the sentence that names it, seconds
to catch it, where. Exit code 1 if one got through, was caught for another reason than its own, or an honest control
failed."""

import argparse
import os
import sys
import time
from tempfile import TemporaryDirectory

from evoattn.correctness.sanitizer import find
from evoattn.model import gpu as gpus
from evoattn.storage import Storage
from tests.cheats.pipeline import run_cheats


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--offline", action="store_true", help="on the interpreter, even with a device")
    parser.add_argument("--db", help="keep the database here")
    words = parser.parse_args()
    devices = [] if words.offline else gpus.detect_devices()
    offline = not devices
    spec = gpus.GPUS["h100"] if offline else devices[0].spec
    assert spec is not None  # or there would be no device
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {line}", flush=True)

    with TemporaryDirectory() as folder:
        storage = Storage.open(words.db or f"{folder}/cheats.sqlite")
        sanitize = not offline and find() is not None
        _, caught = run_cheats(storage, spec, offline, min(8, os.cpu_count() or 1), sanitize, say)
        storage.close()
    print(
        f"Kernels that cheat, on {'the interpreter' if offline else devices[0].product}, "
        f"{time.monotonic() - started:.0f} s; "
        f"compute-sanitizer {'not used' if offline else 'found' if find() else 'not installed'}"
    )
    print(f"{'':4}{'cheat':58}{'state':15}{'s':>6}  {'where':12} sentence")
    for c in caught:
        mark = "ok" if c.as_expected else "BAD"
        state = "DISQUALIFIED" if c.trial.disqualified else c.trial.state
        print(f"{mark:4}{c.cheat.name:58}{state:15}{c.trial.seconds:6.2f}  {c.where:12} {c.sentence[:150]}")
    wrong = [c.cheat.name for c in caught if not c.as_expected]
    result = f"{len(wrong)} not as they should be: {', '.join(wrong)}." if wrong else "all as they should be."
    print(f"{len(caught) - 2} cheats and 2 honest controls: {result}")
    return 1 if wrong else 0


if __name__ == "__main__":  # workers are spawned: they import this file again
    sys.exit(main())
