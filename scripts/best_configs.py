#!/usr/bin/env python3
"""The best configs of every problem in databases, as JSON lines that `evoattn bench --configs` reads.

best_configs.py TOP DATABASE... > FILE
"""

import sys

from evoattn.bench.contenders import write_configs
from evoattn.storage import Storage

sys.stdout.write(write_configs([Storage.open(url, create=False) for url in sys.argv[2:]], int(sys.argv[1])))
