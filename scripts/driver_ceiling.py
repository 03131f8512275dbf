"""What the process with the search's loop and database costs per candidate, and how many it can drive.

    python scripts/driver_ceiling.py [--seconds 10] [--boards 8] [--jobs 120] [--sampler guided] [--db FILE] [--inside]
                                     [--device-ms 0] [--compile-ms 0] [--disk-ms 0] [--profile]

Compile workers and GPU workers are the processes of a search, but compile and time nothing: they answer after
`--compile-ms` and `--device-ms`, with machine code of the usual size. The sampler has a process of its own, as in a
search; with `--inside` it is in this one. `--disk-ms` is added to each transaction: hosts with GPUs took 5 to 8. Prints
what one candidate costs by part, and the bound that follows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--problem", default="seed_h100")
    parser.add_argument("--sampler", default="guided")
    parser.add_argument("--boards", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=120)
    parser.add_argument("--db")
    parser.add_argument("--device-ms", type=float, default=0.0)
    parser.add_argument("--compile-ms", type=float, default=0.0)
    parser.add_argument("--disk-ms", type=float, default=0.0)
    parser.add_argument("--inside", action="store_true")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    from driver.measured import measured  # here, as each worker process imports this file

    with TemporaryDirectory() as folder:
        measured(given, given.db or str(Path(folder) / "ceiling.sqlite"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
