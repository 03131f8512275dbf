"""Studies for the tests of the report: small ones of two parameters, and one of real families with made-up times."""

import io
import random
from functools import cache

from rich.console import Console

from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.families.render import render
from evoattn.model import gpu
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, CompileInfo, Evaluation, Study, Timing, Trial, TrialState
from evoattn.model.space import KernelConfig, SearchSpace
from evoattn.report import render_table
from evoattn.report.screen import Kept
from evoattn.search.starting import starting_configs
from evoattn.storage import Storage

PROBLEM = AttentionProblem(1, 16, 16, 1024, 1024, 64, name="seed_h100")
H100 = gpu.lookup("h100")
EVIL = "</script><script>alert(1)</script><b onmouseover=x>[bold]\x1b[31m"
FAMILIES = {"flash_wgmma": 17.0, "flash_mma": 24.0, "flash_wmma": 60.0}
"""With the time in µs around which their trials lie."""
WEIGHTS = {"BLOCK_N": 0.05, "STAGES": 0.03, "BLOCK_M": 0.02}
"""How much a step in the order of a parameter's values costs."""


def timed_study(storage: Storage, trials: int = 60, name: str = "seed_h100_h100", seed: int = 1) -> Study:
    """Starting configs, their children, failures; a final with two peers that ran and one that refused."""
    rng = random.Random(seed)
    versions = {"evoattn": "0.1.0", "device": "NVIDIA H100 80GB HBM3", "driver": "CUDA 13.0", "torch": "2.13.0"}
    study = storage.create_study(name, PROBLEM, H100, False, "genetic", seed, tuple(FAMILIES), versions, {})
    right: list[tuple[float, Trial]] = []
    for n in range(trials):
        if n % 9 == 8:
            _fail(storage, study, n)
            continue
        family = rng.choices(list(FAMILIES), (6, 3, 1))[0]
        of_family = [entry for entry in right if entry[1].family == family]
        if len(of_family) < 3:
            config, parents, operator = _starting(family, len(of_family)), (), "starting"
        else:
            pair = sorted(rng.sample(of_family, min(4, len(of_family))), key=lambda entry: entry[0])[:2]
            parents, operator = tuple(trial.number for _, trial in pair), rng.choice(["mutation", "crossover"])
            config = _child(family, pair[0][1].config, pair[1][1].config, rng)
        us = _time(family, config, rng)
        right.append((us, _record(storage, study, config, us, parents, operator)))
    best = [trial for _, trial in sorted(right, key=lambda entry: entry[0])]
    starting = [trial for trial in best if trial.operator == "starting"]
    finalists = best[:4] + [trial for trial in starting[:1] if trial not in best[:4]]
    base = best[0].timing.median_us
    for place, trial in enumerate(finalists):
        factor = (1.0, 1.0005, 1.02, 1.03)[place] if place < 4 else trial.timing.median_us / base
        storage.add_timing(trial.number, _final(base * factor, rng))
    storage.add_peer(study, "cudnn", _final(base * 1.12, rng))
    storage.add_peer(study, "flash", _final(base * 1.45, rng))
    storage.add_peer(study, "math", None, "Refused: it has no kernel for this mask.")
    return study


@cache
def _space(family: str) -> SearchSpace:
    return load_space(family, H100)


def _starting(family: str, index: int) -> KernelConfig:
    configs = starting_configs(_space(family), PROBLEM, H100)
    return configs[index % len(configs)]


def _child(family: str, one: dict, other: dict, rng: random.Random) -> KernelConfig:
    """A valid config with genes of both parents, one or two of them drawn anew."""
    space = _space(family)
    for _ in range(200):
        params = {name: rng.choice((one, other))[name] for name in one}
        for parameter in rng.sample(space.parameters, rng.choice((1, 2))):
            params[parameter.name] = rng.choice(parameter.values)
        config = KernelConfig(family, params)
        if registry.lookup(family).why_invalid(PROBLEM, config, H100) is None:
            return config
    return KernelConfig(family, dict(one))


def _time(family: str, config: KernelConfig, rng: random.Random) -> float:
    steps = sum(
        weight * abs(values.index(config[name]) - len(values) // 2)
        for name, weight in WEIGHTS.items()
        for values in (next((p.values for p in _space(family).parameters if p.name == name), None),)
        if values
    )
    return FAMILIES[family] * (1 + steps) * rng.uniform(0.96, 1.25)


def _record(
    storage: Storage, study: Study, config: KernelConfig, us: float, parents: tuple[int, ...], operator: str
) -> Trial:
    candidate = render(registry.lookup(config.family), PROBLEM, config, H100)
    screen = Timing(tuple(us * f for f in (0.98, 1.0, 1.03)), {"stage": "screen", "run": config.id})
    info = CompileInfo(registers=168, spill_store_bytes=0, static_smem_bytes=64, compiler="NVRTC 13.0")
    evaluation = Evaluation(TrialState.COMPLETE, "", info, timings=(screen,), relative_cost=us * 97)
    return storage.record(study, config, candidate, evaluation, parents, operator)


def _fail(storage: Storage, study: Study, n: int) -> None:
    state, reason = (
        (TrialState.INVALID_CONFIG, f"BLOCKS_PER_SM=4 blocks of {512 + n} threads are over the 2048 of an h100 SM."),
        (TrialState.WRONG_RESULT, f"ragged: O[0,3,{n},17] is 0.25, and 0.125 is right (allowed 0.002)."),
        (TrialState.TIMEOUT, "It did not end within 30 s."),
    )[n // 9 % 3]
    config = _starting("flash_mma", n)
    candidate = Candidate("flash_mma", config.params, config.id, f"// failed {n}", "sm_90a")
    storage.record(study, config, candidate, Evaluation(state, reason), (), "random")


def _final(us: float, rng: random.Random) -> Timing:
    samples = tuple(us * rng.uniform(0.997, 1.003) for _ in range(25))
    return Timing(samples, {"stage": "final", "run": "the final", "cache": "warm"})


def timing(us: float, stage: str) -> Timing:
    return Timing(
        tuple(us * f for f in (0.9, 1.0, 1.1)),
        {"stage": stage, "cache": "warm", "run": "the final" if stage == "final" else us},
    )


def add(
    storage, study, state, family="flash_scalar", us=(), cost=None, parents=(), reason="", operator="random", **params
):
    """Record one trial; `us` are (stage, median) pairs."""
    timings = tuple(timing(value, stage) for stage, value in us)
    info = (
        CompileInfo(registers=96, spill_store_bytes=8, spill_load_bytes=4, static_smem_bytes=16) if us or cost else None
    )
    evaluation = Evaluation(state, reason, info, timings=timings, relative_cost=cost)
    return storage.record(study, KernelConfig(family, params), None, evaluation, parents, operator)


def make_study(storage, offline=False, name="s"):
    versions = {"evoattn": "0.1"} if offline else {"evoattn": "0.1", "device": "NVIDIA H100", "driver": "CUDA 13.0"}
    return storage.create_study(name, PROBLEM, H100, offline, "genetic", 7, ("flash_scalar",), versions, {})


def printed(summary, width):
    console = Console(width=width, record=True, file=io.StringIO())
    render_table(summary, console, Kept("/data/evoattn.sqlite"), full=True)
    return console.export_text()
