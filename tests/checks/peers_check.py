"""Which peers answer a problem right, each problem in a process of its own: what they compile at their first call is on
disk afterwards, for `evoattn bench` on the same machine.

    FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 \
        python -m tests.checks.peers_check [--problem NAME …] [--seeds 71,72 --count 60] [--peers fa4,flex] [-o FILE]

Without names and seeds: every named problem with a variant, and two plain ones that models ask for. With seeds: the
plain problems that `evoattn portfolio check` draws of them. A line for each as it comes;
`-o FILE` keeps them as JSON lines. Nothing is timed: the processes share the GPU."""

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import by_name_or_shape, named_problems
from evoattn.peers.labels import PEER_NAMES
from evoattn.portfolio.workload import PLAIN, draw_all

PLAIN_ONES = ("gemma4_full", "spec_decode")


def default_names() -> list[str]:
    """Of models' attention."""
    return [name for name, problem in named_problems().items() if problem.variants or name in PLAIN_ONES]


def asked(problem: AttentionProblem, peers: list[str]) -> dict[str, str]:
    """`right, N s` of each peer, or why not."""
    import torch

    from evoattn.correctness.cases import make_case
    from evoattn.peers.table import PEERS, PeerRefused, peer_call

    case = make_case("the problem's own shape", problem, 1, torch.device("cuda"))
    told = {}
    for name in peers:
        started = time.monotonic()
        try:
            peer_call(PEERS[name], problem, case.tensors, case.answer)
            told[name] = f"right, {time.monotonic() - started:.1f} s"
        except PeerRefused as error:
            told[name] = str(error)
        torch.cuda.empty_cache()
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", action="append", default=[], help="a name or a shape; may be repeated")
    parser.add_argument("--seeds", default="", help="of drawn problems, with commas")
    parser.add_argument("--count", type=int, default=60, help="of these")
    parser.add_argument("--peers", default=",".join(PEER_NAMES))
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes at once")
    parser.add_argument("-o", "--output", type=Path)
    words = parser.parse_args()
    if words.seeds:
        problems = draw_all([PLAIN], [int(seed) for seed in words.seeds.split(",")], words.count)
    else:
        problems = [by_name_or_shape(text) for text in words.problem or default_names()]
    started = time.monotonic()
    with ProcessPoolExecutor(words.jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = {pool.submit(asked, problem, words.peers.split(",")): problem for problem in problems}
        for future in as_completed(futures):
            problem = futures[future]
            fault = future.exception()
            told = {"all": f"{type(fault).__name__}: {fault}"} if fault else future.result()
            for peer, said in told.items():
                print(f"{problem.name or problem.describe()}: {peer}: {said[:200]}", flush=True)
            if words.output:
                with words.output.open("a") as file:
                    file.write(json.dumps({"problem": problem.to_dict(), "peers": told}) + "\n")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
