"""Add recordings of `benchmarks/samplers/landscapes.py` to those of the repository, in place of such of the same name.

python -m benchmarks.samplers.keep_landscapes h100-f.jsonl.gz
"""

from __future__ import annotations

import argparse
from pathlib import Path

from evoattn.cost import landscapes, measurements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, nargs="+")
    options = parser.parse_args()
    measurements.append(measurements.LANDSCAPES, map(landscapes.recording, options.recordings))
    print(f"{measurements.LANDSCAPES} has {', '.join(measurements.names(measurements.LANDSCAPES))}.")


if __name__ == "__main__":
    main()
