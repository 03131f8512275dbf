"""How long an offline candidate takes: seconds of a core for its compile, and with all cases of the interpreter.

    python scripts/candidate_speed.py [FAMILY…] [--problem seed_h100] [--gpu h100] [--count 16] [--cases]

Random valid configs, one after another in this process. Prints the median and nine in ten of each family; with
`--cases` also the seconds of each case, all configs together. Time is the processor's own: other work on the machine
shows little.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.interpreter_cases import interpreter_cases
from evoattn.correctness.validate import check
from evoattn.evaluation.evaluate import compile_candidate, evaluate_offline
from evoattn.evaluation.tasks import Compile
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import FAMILIES
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import lookup
from evoattn.model.space import KernelConfig, load_space
from evoattn.samplers.pool import ConfigPool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=["flash_mma", "flash_wgmma"])
    parser.add_argument("--problem", default="seed_h100")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100")
    parser.add_argument("--count", type=int, default=16, help="configs per family")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--cases", action="store_true", help="seconds of each case")
    words = parser.parse_args()
    torch.set_num_threads(1)
    problem, gpu = lookup(words.problem), GPUS[words.gpu]
    for name in words.families:
        family, whole, compiles = FAMILIES[name], [], []
        cases: Counter[str] = Counter()
        pool = ConfigPool(
            {name: load_space(name, gpu)},
            lambda f, params: FAMILIES[f].why_invalid(problem, KernelConfig(f, params), gpu),
            random.Random(words.seed),
        )
        for i in range(words.count + 1):  # the first warms up
            drawn = pool.draw(name)
            if drawn is None:
                break
            config = KernelConfig(*drawn)
            task = Compile(family, config, render(family, problem, config, gpu))
            with TemporaryDirectory() as empty:
                started = time.process_time()
                compile_candidate(task.candidate, Path(empty))
                seconds = time.process_time() - started
            compiled = compile_candidate(task.candidate)  # evaluate_offline takes it from the cache
            started = time.process_time()
            evaluate_offline(task, problem, gpu)
            if i:
                compiles.append(seconds)
                whole.append(seconds + time.process_time() - started)
            for small in interpreter_cases(problem, config) if i and words.cases else []:
                built, case_started = BuiltKernel(family, config, gpu, compiled), time.process_time()
                check(small.backend(InterpreterBackend()), small.placed(built), small.make(1))
                cases[small.name] += time.process_time() - case_started
        if not whole:
            print(f"{name}: fewer than two of its configs are valid for this problem on the {gpu.name}.")
            continue
        whole.sort()
        print(
            f"{name}: median {statistics.median(whole):.2f} s, nine in ten {whole[int(0.9 * len(whole))]:.2f} s, "
            f"of which the compile {statistics.median(compiles):.2f} s; {len(whole)} configs",
            flush=True,
        )
        for case, seconds in cases.most_common():
            print(f"    {seconds / len(whole):6.3f} s  {case}")


if __name__ == "__main__":
    main()
