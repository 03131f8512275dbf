"""A day's offline trials, written to a database and read again by one process.

    python -m tests.faults.day DATABASE TRIALS

Prints the resident memory in MB at a tenth of the trials, when all are written and when all were read, and how many
were read."""

import argparse
import random
import resource

from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, CheckResult, CompileInfo, Evaluation, Study, TrialState, ValidationReport
from evoattn.model.space import KernelConfig
from evoattn.storage import Storage

FAMILIES = ("flash_mma", "flash_scalar")
SPACES = {name: load_space(name, GPUS["l4"]) for name in FAMILIES}
INFO = CompileInfo(128, 8, 16, 24, 1024, (), 0.3, "NVRTC 13.0", ("-arch=sm_89",))
CHECKS = ValidationReport("interpreter", tuple(CheckResult(f"case {i}", True, 1e-4, 1e-2) for i in range(8)))


def megabytes() -> float:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def draw(rng: random.Random, seen: set[int]) -> KernelConfig:
    """A config that was not drawn before, as from a sampler; 8 bytes of each id tell them apart."""
    while True:
        name = rng.choice(FAMILIES)
        config = KernelConfig(name, {p.name: rng.choice(p.values) for p in SPACES[name].parameters})
        if (number := int(config.id[:16], 16)) not in seen:
            seen.add(number)
            return config


def write(storage: Storage, study: Study, trials: int) -> float:
    """Record so many trials; MB at a tenth of them."""
    rng, early = random.Random(0), 0.0
    seen: set[int] = set()
    for n in range(trials):
        if n == trials // 10:
            early = megabytes()
        config = draw(rng, seen)
        source = f"// {n}\n" + "constexpr int BLOCK_M = 64;\n" * 700
        candidate = Candidate(config.family, config.params, config.id, source, "sm_89")
        right = Evaluation(TrialState.ESTIMATED, "", INFO, CHECKS, (), rng.uniform(1e5, 1e6), 0.2)
        wrong = Evaluation(TrialState.COMPILE_ERROR, f"Line {n}: identifier is undefined.", seconds=0.2)
        evaluation = rng.choice((right, right, right, wrong))
        storage.record(study, config, candidate, evaluation, (rng.randint(1, n + 1),), "mutation")
    return early


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database")
    parser.add_argument("trials", type=int)
    words = parser.parse_args()
    storage = Storage.open(words.database)
    problem = AttentionProblem(1, 16, 16, 1024, 1024, 64, name="seed_h100")
    versions = {"evoattn": "day"}
    study = storage.create_study("day", problem, GPUS["l4"], True, "genetic", 0, FAMILIES, versions, {})
    early = write(storage, study, words.trials)
    written = megabytes()
    read = sum(1 for _ in storage.iter_trials(study, evidence=True))
    print(f"{early:.1f} {written:.1f} {megabytes():.1f} {read}")


if __name__ == "__main__":
    main()
