"""How often does the interpreter raise a false alarm? Runs N valid configs, drawn at random over families and problems, and counts.

    python scripts/interpreter_witness.py 500 [--seed 0]

Each is a kernel that a search without a GPU would compile and check. All should come out right: what does not is named, with its
sentence, and the exit code is 1. Takes about a second of one core a config.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter

import torch

from evoattn.config import KernelConfig, load_space
from evoattn.evaluate import evaluate_offline
from evoattn.families.registry import FAMILIES
from evoattn.gpu import GPUS
from evoattn.problem import AttentionProblem
from evoattn.render import render
from evoattn.samplers.pool import ConfigPool
from evoattn.trial import TrialState

HEAD_DIMS = (16, 24, 32, 64, 72, 96, 128, 192, 256)
LENGTHS = (1, 17, 64, 203, 512, 1025, 2048)


def draw_problem(rng: random.Random) -> AttentionProblem:
    kv_heads = rng.choice((1, 2, 4))
    return AttentionProblem(
        rng.choice((1, 2)), kv_heads * rng.choice((1, 2, 4)), kv_heads, rng.choice(LENGTHS), rng.choice(LENGTHS), rng.choice(HEAD_DIMS),
        rng.choice(("fp16", "bf16", "fp32")), rng.choice(("full", "causal_upper_left", "causal_lower_right")), rng.choice(("bhsd", "bshd")),
    )


def draw_config(family: str, problem: AttentionProblem, gpu: str, rng: random.Random) -> KernelConfig | None:
    """A valid config; None if the family has none for the problem."""
    spec = GPUS[gpu]
    if FAMILIES[family].why_unsupported(problem, spec):
        return None
    space = load_space(family, spec)
    pool = ConfigPool({family: space}, lambda name, params: FAMILIES[name].why_invalid(problem, KernelConfig(name, params), spec), rng)
    drawn = pool.draw(family)
    return None if drawn is None else KernelConfig(*drawn)


def run(count: int, seed: int) -> tuple[Counter, list[str]]:
    """(how many by family and state, a line for each config that is not right)."""
    rng, states, wrong = random.Random(seed), Counter(), []
    families = sorted(FAMILIES)
    while states.total() < count:
        family, gpu, problem = families[states.total() % len(families)], rng.choice(sorted(GPUS)), draw_problem(rng)
        config = draw_config(family, problem, gpu, rng)
        if config is None:
            continue
        result = evaluate_offline(render(FAMILIES[family], problem, config, GPUS[gpu]), config, problem, GPUS[gpu])
        states[family, result.state] += 1
        if result.state is not TrialState.ESTIMATED:
            wrong.append(f"{config.describe()} on {gpu}, {problem.describe()}: {result.state}: {result.reason}")
    return states, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, metavar="N", help="configs to run")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    states, wrong = run(args.count, args.seed)
    for (family, state), number in sorted(states.items()):
        print(f"{family:16} {state:16} {number:5}")
    print(f"{len(wrong)} false alarms in {states.total()} configs")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
