#!/usr/bin/env python3
"""The best configs of every problem in databases, as JSON lines that `evoattn bench --configs` reads.

python scripts/best_configs.py TOP DATABASE… > FILE"""

import argparse
import sys

from evoattn.bench.contenders import write_configs
from evoattn.storage import Storage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("top", type=int, help="configs of a problem")
    parser.add_argument("database", nargs="+", help="a file, or the URL of a PostgreSQL server")
    options = parser.parse_args()
    sys.stdout.write(write_configs([Storage.open(url, create=False) for url in options.database], options.top))


if __name__ == "__main__":
    main()
