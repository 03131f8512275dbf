"""How often does the interpreter raise a false alarm? Runs N valid configs, drawn at random over families and problems,
and counts.

    python -m tests.mutation.false_alarms 500 [--seed 0] [--first 0] [--family flash_mma …] [--jobs 2] [--out FILE]

Each is a kernel that a search without a GPU would compile and check. All should come out right: what does not is named
as soon as it is met, with its sentence, and the exit code is 1. Takes some two seconds of one core a config; Ctrl-C
ends it with the table of what ran. The configs of a seed are numbered: those before `--first` are passed over. With
`--out`, a line of JSON is added to the file for each; those that the file has are counted and not run again, so that a
run may be done in pieces, and on several machines (`cat` puts their files together)."""

import argparse
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from evoattn.evaluation.evaluate import evaluate_offline
from evoattn.evaluation.tasks import Compile
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.append import HALVES, PAIRS
from evoattn.model.dtype import DTYPES, WIDE_DTYPES
from evoattn.model.gpu import GPUS
from evoattn.model.mask import MASKS
from evoattn.model.merge import NARROW
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.quantize import TOGETHER, TURN
from evoattn.model.records import TrialState
from evoattn.model.scales import ROUNDED
from evoattn.model.space import KernelConfig
from evoattn.model.variant import BIASES, PAGES
from evoattn.samplers.base import ConfigPool
from tests.support.in_processes import in_processes

HEAD_DIMS = (16, 24, 32, 64, 72, 96, 128, 192, 256)
LARGE_HEAD_DIMS = {"large_head": (256, 512, 1024), "large_head_mma": (264, 320, 512)}
LATENT_DIMS = ((576, 512), (192, 128), (256, 256), (320, 128))
"""Of K and V, for latent_wgmma."""
LENGTHS = (1, 17, 64, 203, 512, 1025, 2048)
SHORT_LENGTHS = (1, 5, 17, 64, 203)
"""For head_dims of hundreds: such problems have few rows, and few keys keep the cost model's own run short."""
EIGHT_BIT_CACHES = ("e4m3", "e5m2", "int8")
SCORE = "s*gate[h]*(slope[k-q+99]/64+1)-max(q+d-k,16)/64+slope[k-q+99]"
"""Of expressions: what it makes of a score, and the factor of a gradient, are NaN where the table is."""
LSE_SHARE, DETERMINISTIC_SHARE, VARIANT_SHARE = 0.2, 0.2, 0.4
"""Of the problems: those that ask for the log-sum-exp; of the backward pass those that ask for the same bits in every
run; those with a variant of attention, where the family has any."""


@dataclass(frozen=True)
class Ran:
    """One config."""

    number: int
    family: str
    seconds: float
    what: str
    alarm: str
    """What the interpreter says; empty if it is right."""


@dataclass
class Tally:
    """What ran, by family: configs, seconds, and how many are not right."""

    ran: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    alarms: Counter[str] = field(default_factory=Counter)

    def add(self, one: Ran) -> None:
        self.ran[one.family] += 1
        self.seconds[one.family] += one.seconds
        self.alarms[one.family] += bool(one.alarm)

    def table(self) -> str:
        rows = [f"{'family':16} configs  right  alarms  seconds"]
        for family in sorted(self.ran):
            ran, alarms = self.ran[family], self.alarms[family]
            rows.append(f"{family:16} {ran:7} {ran - alarms:6} {alarms:7} {self.seconds[family]:8.0f}")
        return "\n".join([*rows, f"{self.alarms.total()} false alarms in {self.ran.total()} configs"])


def draw_problem(family: str, rng: random.Random) -> AttentionProblem:
    """A problem of the sizes that the family is for; it may still not serve its dtype, its lse or its variants."""
    kv_heads, lengths = rng.choice((1, 2, 4)), SHORT_LENGTHS if family in LARGE_HEAD_DIMS else LENGTHS
    if family.startswith("latent_"):
        return draw_latent_problem(kv_heads, rng)
    plain = AttentionProblem(
        rng.choice((1, 2)),
        kv_heads * rng.choice((1, 2, 4, 9)),
        kv_heads,
        rng.choice(lengths),
        rng.choice(lengths),
        rng.choice(LARGE_HEAD_DIMS.get(family, HEAD_DIMS)),
        rng.choice(served_dtypes(family)),
        rng.choice(tuple(MASKS)),
        rng.choice(("bhsd", "bshd")),
        lse=rng.random() < LSE_SHARE,
        op=FAMILIES[family].operations[0],
    )
    if plain.op == "backward":
        plain = plain.with_(deterministic=rng.random() < DETERMINISTIC_SHARE)
    if len(FAMILIES[family].operations) > 1:
        plain = plain.with_(**draw_operation(plain, family, rng))
    served = FAMILIES[family].variants
    if not served or rng.random() > VARIANT_SHARE:
        return plain
    try:
        return plain.with_(
            **draw_variant(plain, rng.choice(served), rng) | draw_variant(plain, rng.choice(served), rng)
        )
    except ProblemError:  # two that exclude each other
        return plain


def draw_operation(problem: AttentionProblem, family: str, rng: random.Random) -> dict[str, Any]:
    """Fields that make the problem one of the family's operations, each as often as another."""
    op = rng.choice(FAMILIES[family].operations)
    pair = {"heads": problem.kv_heads, "seqlen_k": problem.seqlen_q, "turned": problem.head_dim % 16 == 0}
    fields: dict[str, dict[str, Any]] = {
        TURN: {"dtype": "e4m3", "turned": True},
        **dict.fromkeys(TOGETHER, pair),
        NARROW: {"dtype": rng.choice(("fp16", "bf16"))},
        **{name: {"scale": rng.choice((None, 0.5))} for name in (HALVES, PAIRS)},
        **{name: {"scales": "head"} for name in ROUNDED},
    }
    return {"op": op} | fields.get(op, {})


def served_dtypes(family: str) -> tuple[str, ...]:
    return tuple(name for name in WIDE_DTYPES if name in FAMILIES[family].dtypes) or FAMILIES[family].dtypes


def draw_latent_problem(kv_heads: int, rng: random.Random) -> AttentionProblem:
    """One whose V lies within K."""
    dim, value_dim = rng.choice(LATENT_DIMS)
    return AttentionProblem(
        1,
        kv_heads * rng.choice((1, 16, 70)),
        kv_heads,
        rng.choice((1, 3)),
        rng.choice(SHORT_LENGTHS),
        dim,
        rng.choice(("fp16", "bf16")),
        rng.choice(tuple(MASKS)),
        rng.choice(("bhsd", "bshd")),
        value_dim=value_dim,
        shared_kv=True,
    )


def draw_variant(problem: AttentionProblem, name: str, rng: random.Random) -> dict[str, Any]:
    """Fields that make the problem one of this variant."""
    keys, queries = problem.seqlen_k, problem.seqlen_q
    ahead = 0 if problem.masking.causal else rng.choice((0, 33))
    fields: dict[str, dict[str, Any]] = {
        "window": {"window": f"{rng.choice((0, 16, 100))}:{ahead}"},
        "softcap": {"softcap": 20.0},
        "sink": {"sink": True},
        "alibi": {"alibi": True},
        "bias": {"bias": rng.choice(BIASES)},
        "value_dim": {"value_dim": rng.choice((48, 64, 80, 128, 256))},
        "shared_kv": {"shared_kv": True, "value_dim": max(16, problem.head_dim // 32 * 16)},
        "rotary_apart": {"rotary_apart": True, "shared_kv": False, "value_dim": max(16, problem.head_dim // 32 * 16)},
        "seqused": {"seqused": f"1:{keys}"},
        "page": {"seqused": f"1:{keys}", "page": rng.choice(PAGES)},
        "appended": {"seqused": f"{min(queries, keys)}:{keys}", "appended": True},
        "varlen": {"varlen": f"1:{queries}/1:{keys}"},
        "score": {"score": SCORE, "tables": "gate:fp32:4+slope:bf16:200"}
        | ({"grads": "own_gate+own_slope"} if problem.op == "backward" and problem.layout == "bshd" else {}),
        "kv": {"kv": rng.choice(EIGHT_BIT_CACHES)},
        "scales": {"scales": "head"}
        | ({} if DTYPES[problem.dtype].bytes == 1 else {"kv": rng.choice(EIGHT_BIT_CACHES)}),
        "blocks": {"blocks": rng.choice(("128x64:70+200", "128x128:70+200", "h:128x64:1/3/7", "h:128x128:1/3/7"))},
        "turned": {"turned": True},
    }
    return fields[name] | (draw_gradients(name, rng) if problem.op == "backward" else {})


def draw_gradients(variant: str, rng: random.Random) -> dict[str, Any]:
    """Whether the gradients of a variant's terms are asked for."""
    names = {"bias": "bias", "sink": "sinks"}
    return {"grads": names[variant]} if variant in names and rng.random() < 0.5 else {}


def draw_config(family: str, problem: AttentionProblem, gpu: str, rng: random.Random) -> KernelConfig | None:
    """A valid config; None if the family has none for the problem."""
    spec = GPUS[gpu]
    if FAMILIES[family].why_unsupported(problem, spec):
        return None
    space = load_space(family, spec)
    pool = ConfigPool(
        {family: space}, lambda name, params: FAMILIES[name].why_invalid(problem, KernelConfig(name, params), spec), rng
    )
    drawn = pool.draw(family)
    return None if drawn is None else KernelConfig(*drawn)


def draw(family: str, rng: random.Random) -> tuple[str, AttentionProblem, KernelConfig]:
    """A card, a problem and a valid config."""
    while True:
        gpu, problem = rng.choice(sorted(GPUS)), draw_problem(family, rng)
        if config := draw_config(family, problem, gpu, rng):
            return gpu, problem, config


def run_one(number: int, seed: int, families: tuple[str, ...]) -> Ran:
    """Config `number` of a seed; the families take turns."""
    family = families[number % len(families)]
    gpu, problem, config = draw(family, random.Random(f"{seed} {number}"))
    started = time.perf_counter()
    task = Compile(FAMILIES[family], config, problem)
    result = evaluate_offline(task, GPUS[gpu])
    return Ran(
        number,
        family,
        time.perf_counter() - started,
        f"{config.describe()} on {gpu}, {problem.describe()}",
        "" if result.state is TrialState.ESTIMATED else f"{result.state}: {result.reason}",
    )


def read(path: Path, seed: int, families: tuple[str, ...]) -> dict[int, Ran]:
    """What a file has of a seed, by number. Raises `ValueError` on configs of other families than these in turn, and on
    what this script of today does not write."""
    found: list[Ran] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            if row.pop("seed") == seed:
                found.append(Ran(**row))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}, is not as this script writes it today ({type(error).__name__}: {error}): give "
                "another --out, or delete the file."
            ) from None
    if wrong := next((one for one in found if families[one.number % len(families)] != one.family), None):
        raise ValueError(f"{path} has number {wrong.number} of seed {seed} as {wrong.family}: it is of other families.")
    return {one.number: one for one in found}


def run(results: Iterable[Ran], tally: Tally, out: Path | None, seed: int) -> None:
    """Adds the results to the tally and to `out`; prints each that is not right."""
    for one in results:
        count(one, tally)
        if out:
            with out.open("a") as file:
                file.write(json.dumps(asdict(one) | {"seed": seed}) + "\n")


def count(one: Ran, tally: Tally) -> None:
    """Add to the tally, and print it if it is not right."""
    tally.add(one)
    if one.alarm:
        print(f"{one.number} {one.family} {one.what}: {one.alarm}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, metavar="N", help="configs to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first config")
    parser.add_argument(
        "--family", nargs="+", choices=sorted(FAMILIES), default=sorted(FAMILIES), help="all, unless given"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="what ran is added to this file, one JSON object per line")
    args = parser.parse_args()
    families, tally = tuple(args.family), Tally()
    try:
        known = read(args.out, args.seed, families) if args.out and args.out.exists() else {}
    except ValueError as error:
        sys.exit(str(error))
    numbers = range(args.first, args.first + args.count)
    for number in filter(known.__contains__, numbers):
        count(known[number], tally)
    call = partial(run_one, seed=args.seed, families=families)
    left = [number for number in numbers if number not in known]
    try:
        run(in_processes(args.jobs, call, left), tally, args.out, args.seed)
    except KeyboardInterrupt:
        print("Interrupted.")
    print(tally.table())
    sys.exit(bool(tally.alarms.total()))


if __name__ == "__main__":
    main()
