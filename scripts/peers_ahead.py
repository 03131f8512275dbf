"""Call peers once on problems, in a process beside a check of them, so that what they compile lies on disk when the
check comes to it.

    FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 python scripts/peers_ahead.py --seeds 71,72 --count 60 [--share 0/2]

FlashAttention 4 compiles 5 to 10 s for each kind of problem, and keeps what it compiled under that variable.
"""

from __future__ import annotations

import argparse
import time

import torch

from evoattn.correctness.terms import torch_dtype
from evoattn.model.problem import AttentionProblem
from evoattn.peers.table import PEERS
from evoattn.portfolio.workload import PLAIN, draw_all


def tensors_of(problem: AttentionProblem, device: str) -> dict[str, torch.Tensor]:
    """Q, K and V of the problem's shapes and strides, all zero."""
    found = {}
    for name in ("q", "k", "v"):
        shape, strides = problem.shape(name), problem.strides(name)
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        memory = torch.zeros(extent, dtype=torch_dtype(problem), device=device)
        found[name] = memory.as_strided(shape, strides)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", required=True)
    parser.add_argument("--count", type=int, default=60, help="plain problems, as `evoattn portfolio check` has them")
    parser.add_argument("--peers", default="fa4")
    parser.add_argument("--share", default="0/1", help="I/N: every N-th problem from the I-th on")
    options = parser.parse_args()
    part, parts = map(int, options.share.split("/"))
    started = time.monotonic()
    for problem in draw_all([PLAIN], [int(seed) for seed in options.seeds.split(",")], options.count)[part::parts]:
        for name in options.peers.split(","):
            try:
                PEERS[name].make(problem, tensors_of(problem, "cuda"))()
                torch.cuda.synchronize()
                said = "called"
            except Exception as error:  # other people's code: it may raise anything
                said = " ".join(str(error).split())[:100]
            print(f"{time.monotonic() - started:5.0f} s {name} {problem.describe()}: {said}", flush=True)


if __name__ == "__main__":
    main()
