"""Choose a campaign's problems and what is tried first on each, and compile that, on a machine without a GPU.

    nice -n 19 python scripts/portfolio_ahead.py FOLDER --count 600 --draw 550:650 --seconds 1500 --jobs 2 [--card h100]
    tar -cJf ahead.tar.xz FOLDER    # then, where the GPU is: scripts/portfolio_campaign.py OUT.jsonl.gz --ahead FOLDER

Problems are drawn as for `portfolio_campaign.py --again --count --emphasis`. What is tried are each one's pick, the
ends of climbs and what lies beside them (`evoattn/portfolio/plan.py`). FOLDER gets the plan and the machine code. A
second run goes on with the plan that is there.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from evoattn.backends.compiler import version
from evoattn.backends.kernel_files import KernelFiles
from evoattn.model.gpu import GPUS
from evoattn.portfolio import plan
from evoattn.portfolio.again import groups_again
from evoattn.portfolio.draws import PLAIN, drawn
from scripts.portfolio_campaign import seeds

SAY_EACH = 500
"""Compiled kernels between two lines."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, required=True, help="problems")
    parser.add_argument("--draw", type=seeds, required=True, metavar="FIRST:END", help="their seeds")
    parser.add_argument("--each", type=int, default=400, help="problems drawn of each seed")
    parser.add_argument("--seconds", type=float, default=1500, help="to compile for")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--card", choices=sorted(GPUS), default="h100")
    parser.add_argument("--after", type=Path, nargs="*", default=[], help="campaigns whose problems are left out")
    words = parser.parse_args()
    gpu, started = GPUS[words.card], time.monotonic()
    words.folder.mkdir(parents=True, exist_ok=True)
    path = words.folder / plan.PLAN
    if path.exists():
        _, planned = plan.load(path)
    else:
        problems = drawn([PLAIN], words.draw, words.each)
        groups, _ = groups_again(problems, words.after, gpu, words.count, emphasis=True)
        planned = plan.make(groups, gpu)
        plan.save(path, planned)
        print(f"{time.monotonic() - started:.0f} s: {len(planned)} kernels planned", flush=True)
    files = KernelFiles(words.folder / plan.KERNELS, version())
    count = 0
    for count, _ in enumerate(plan.compile_ahead(iter(planned), files, gpu, words.seconds, words.jobs), 1):
        if count % SAY_EACH == 0:
            print(f"{time.monotonic() - started:.0f} s: {count} compiled", flush=True)
    print(f"{count} of {len(planned)} compiled")


if __name__ == "__main__":
    main()
