"""A database of one study with many made-up trials, for the times of report and dashboard.

    python -m benchmarks.many_trials FILE [--trials 200000] [--offline]

The configs are drawn from the search space of flash_mma, a fifth of the trials failed, and every tenth has the source
of its own that a search's would have, one line long. Half a minute of one core for 200,000."""

import argparse
import random
from collections.abc import Iterator

from evoattn.families.registry import load_space
from evoattn.model.gpu import lookup
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, CompileInfo, CompressedSource, Evaluation, Timing, TrialState
from evoattn.model.space import KernelConfig
from evoattn.storage import Storage
from evoattn.storage.trials import NewTrial

FAMILY, GPU = "flash_mma", lookup("h100")
PROBLEM = AttentionProblem(1, 16, 16, 1024, 1024, 64)
AT_A_TIME = 5000


def made_up(count: int, offline: bool) -> Iterator[NewTrial]:
    """The same ones in every process."""
    rng, parameters = random.Random(1), load_space(FAMILY, GPU).parameters
    for number in range(count):
        config = KernelConfig(FAMILY, {p.name: rng.choice(p.values) for p in parameters})
        candidate = Candidate(FAMILY, config.params, config.id, f"// {number}\n", GPU.arch)
        source = CompressedSource.of(candidate) if number % 10 == 0 else None
        operator = "starting" if number < 10 else rng.choice(("mutation", "crossover", "random"))
        if number % 5 == 4:
            failed = Evaluation(TrialState.WRONG_RESULT, f"ragged: O[0,3,{number},17] is 0.25.", seconds=0.2)
            yield NewTrial(config, source, failed, (), operator)
            continue
        us = 20.0 * rng.lognormvariate(0.5, 0.5)
        info = CompileInfo(registers=168, static_smem_bytes=64, compiler="NVRTC 13.0")
        screen = Timing(tuple(us * f for f in (0.98, 1.0, 1.03)), {"stage": "screen", "run": config.id})
        state, timings = (TrialState.ESTIMATED, ()) if offline else (TrialState.COMPLETE, (screen,))
        right = Evaluation(state, "", info, timings=timings, relative_cost=us * 97, seconds=0.3)
        yield NewTrial(config, source, right, (max(1, number - 7),) if number > 10 else (), operator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--trials", type=int, default=200_000)
    parser.add_argument("--offline", action="store_true", help="estimated costs in place of times")
    given = parser.parse_args()
    storage = Storage.open(given.file)
    versions = {} if given.offline else {"device": "NVIDIA H100 80GB HBM3", "driver": "CUDA 13.0"}
    study = storage.create_study("many", PROBLEM, GPU, given.offline, "genetic", 1, (FAMILY,), versions, {})
    page: list[NewTrial] = []
    for trial in made_up(given.trials, given.offline):
        page.append(trial)
        if len(page) == AT_A_TIME:
            storage.record_all(study, page)
            page = []
    if page:
        storage.record_all(study, page)
    storage.close()


if __name__ == "__main__":
    main()
