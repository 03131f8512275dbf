"""Backward passes beside every peer: our kernels and cuDNN, SDPA, FlashAttention and FlexAttention in one final each.

    python -m benchmarks.backward --named                                # the problems of issue 33
    python -m benchmarks.backward --drawn 60 --seed 900                  # training problems of the sampler
    python -m benchmarks.backward --named --seconds 15 --forward --json backward.json

All contestants of a problem take turns in CUDA graphs of as many calls each, and all answers are checked (`evoattn
bench`). Ours are the configs of `--configs`, what a search of `--seconds` finds and what the databases hold, and the
pick, the cost model's choice, which always stands. TFLOP/s count 2.5 times the forward pass. With `--forward` the
forward pass is timed too, and the sum of both compared, each contestant with itself."""

import argparse
import json
import math
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evoattn.bench.contenders import read_configs
from evoattn.bench.row import Row
from evoattn.bench.run import Bench
from evoattn.model.errors import FailedRun, WrongUse
from evoattn.model.gpu import GpuSpec, detect_devices
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape
from evoattn.peers.labels import PEER_NAMES, peer_label
from evoattn.portfolio.pick import pick
from evoattn.portfolio.workload import draw
from evoattn.search.api import search
from evoattn.storage import Storage

NAMED = (
    "B=8,H=32,S=2048,D=64",
    "B=8,H=32,S=2048,D=64,mask=causal",
    "B=1,H=32,S=16384,D=64",
    "B=32,H=16,S=512,D=128,mask=causal",
    "B=16,H=16,S=1024,D=128,mask=causal",
    "B=8,H=16,S=2048,D=128,mask=causal",
    "B=4,H=16,S=4096,D=128",
    "B=4,H=16,S=4096,D=128,mask=causal",
    "B=1,H=16,S=16384,D=128",
    "B=1,H=16,S=16384,D=128,mask=causal",
    "B=1,H=32,Hkv=8,S=4096,D=128,mask=causal",
    "B=1,H=32,Hkv=8,S=8192,D=128,mask=causal",
    "B=1,H=32,S=4096,D=192,Dv=128,mask=causal",
    "B=4,H=8,S=4096,D=256",
    "B=4,H=8,S=4096,D=256,mask=causal",
    "B=8,H=16,S=1000,D=96",
    "B=64,H=16,S=577,D=64",
    "B=32,H=12,S=512,D=64",
    "B=2,H=64,Hkv=8,S=4096,D=64,mask=causal,window=1023:0",
    "B=2,H=8,Hkv=4,S=4096,D=256,mask=causal,window=1023:0",
    "B=2,H=8,Hkv=4,S=4096,D=256,mask=causal,softcap=50",
    "B=8,H=32,S=512,D=64,bias=hs,scale=1",
    "B=64,H=16,S=2048,D=128,mask=causal_lower_right,varlen=64:2048",
)
"""Those that issue 33 names, and its variants: windows of gpt-oss and Gemma, a softcap, T5's bias, 64 documents."""
LEAST_LENGTH, MOST_LENGTH = 64, 16384
PEERS = ("flash", "cudnn", "efficient", "fa3", "fa4", "flex")


def drawn(seed: int, count: int) -> list[AttentionProblem]:
    """The first `count` problems of the sampler's seed that are self-attention in 16 bits, as backward passes."""
    found: list[AttentionProblem] = []
    for problem in draw(seed, 20 * count):
        length = problem.seqlen_q
        if length == problem.seqlen_k and LEAST_LENGTH <= length <= MOST_LENGTH and problem.dtype != "fp32":
            found.append(problem.with_(op="backward"))
    return found[:count]


def named(dtype: str, deterministic: bool) -> list[AttentionProblem]:
    """`NAMED` as backward passes."""
    return [parse_shape(f"{text},dtype={dtype},op=backward").with_(deterministic=deterministic) for text in NAMED]


def contenders(problem: AttentionProblem, gpu: GpuSpec, configs: Path | None) -> list[tuple[str, dict[str, Any]]]:
    """(family, parameters): the pick, and the problem's configs in the file."""
    chosen = pick(problem, gpu)
    found = [(chosen.config.family, chosen.config.params)] if chosen else []
    return found + (read_configs(configs, problem, gpu.arch) if configs else [])


def ours_over_best(row: Row) -> float | None:
    """How many times faster than the best peer; None where one is missing."""
    return 1 / row.ratio if row.ratio else None


def both(backward: Row, forward: Row) -> float | None:
    """As `ours_over_best`, of forward and backward together: the peer whose sum is least."""
    if not (backward.ours and forward.ours):
        return None
    ours = backward.ours.median_us + forward.ours.median_us
    shared = backward.peers.keys() & forward.peers.keys()
    sums = [backward.peers[name].median_us + forward.peers[name].median_us for name in shared]
    return min(sums) / ours if sums else None


def line(problem: AttentionProblem, row: Row, together: float | None) -> str:
    """A row of the table."""

    def time_of(us: float | None) -> str:
        return f"{us:.1f} ({problem.flops / us / 1e6:.0f})" if us else "-"

    peers = (row.peers[name].median_us if name in row.peers else None for name in PEERS)
    times = [time_of(row.ours.median_us if row.ours else None), *map(time_of, peers)]
    ratio = ours_over_best(row)
    ratios = [f"{ratio:.3f}" if ratio else "-", f"{together:.3f}" if together else "-"]
    return " | ".join((f"| {problem.describe()}", *times, *ratios, f"{row.family} |"))


def summary(ratios: list[float]) -> str:
    """How many are ahead, and the geometric mean."""
    if not ratios:
        return "none"
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)} ahead, geometric mean {mean:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--named", action="store_true", help="the problems of issue 33")
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="so many problems of the sampler")
    parser.add_argument("--seed", type=int, default=900, help="of the sampler")
    parser.add_argument("--shape", action="append", default=[], help="another problem, with op=backward")
    parser.add_argument("--dtype", default="bf16", help="of the named problems")
    parser.add_argument("--deterministic", action="store_true", help="ask all for the same bits in every run")
    parser.add_argument("--configs", type=Path, help="a file of configs, as `evoattn bench --configs` reads it")
    parser.add_argument("--seconds", type=float, default=0, help="of search for each problem")
    parser.add_argument("--db", help="the database of the searches and times; one that is thrown away unless given")
    parser.add_argument("--forward", action="store_true", help="time the forward pass too")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEER_NAMES)}")
    parser.add_argument("--skip", type=int, default=0, help="pass over the first problems: for runs in parts")
    parser.add_argument("--most", type=int, default=10**6, help="stop after so many problems")
    parser.add_argument("--jobs", type=int, default=8, help="compile processes")
    parser.add_argument("--json", type=Path, help="a file for all that was measured")
    options = parser.parse_args()
    devices = detect_devices()
    if not devices or devices[0].spec is None:
        sys.exit("There is no CUDA device that evoattn knows.")
    gpu, problems = devices[0].spec, named(options.dtype, options.deterministic) if options.named else []
    problems += [p.with_(deterministic=options.deterministic) for p in drawn(options.seed, options.drawn)]
    problems += [parse_shape(text) for text in options.shape]
    problems = problems[options.skip :][: options.most]
    with tempfile.TemporaryDirectory() as folder:
        measure(problems, gpu, devices[0], options, options.db or str(Path(folder) / "backward.db"))


def measure(problems: list[AttentionProblem], gpu: GpuSpec, device: Any, options: Any, db: str) -> None:
    """Print a row as each problem ends, then the summary."""
    storage = Storage.open(db, create=True)
    bench = Bench([storage], gpu, device, options.jobs, peers=options.peers.split(","))
    records, ahead, together = [], [], []
    print(f"{device.describe()}; µs (TFLOP/s); ratios: the best peer's time over ours, backward and with forward")
    print("| problem | ours | " + " | ".join(map(peer_label, PEERS)) + " | ratio | with forward | family |")
    print("|" + "---|" * (len(PEERS) + 5))
    for problem in problems:
        asked = [problem]
        if options.forward:
            asked.append(problem.with_(op="forward", lse=True, deterministic=False, grads=""))
        for one in asked if options.seconds else ():
            try:
                search(one, f"{options.seconds}s", db=db, jobs=options.jobs, keep=False)
            except (FailedRun, WrongUse) as error:
                print(f"search of {one.describe()}: {error}", file=sys.stderr)
        rows = list(bench.run(asked, lambda one: contenders(one, gpu, options.configs)))
        summed = both(*rows) if options.forward else None
        ratio = ours_over_best(rows[0])
        ahead += [ratio] if ratio else []
        together += [summed] if summed else []
        print(line(problem, rows[0], summed), flush=True)
        for row in rows:
            for note in (*row.notes, *(f"{name}: {why}" for name, why in row.refusals.items())):
                print(f"  {note}", file=sys.stderr)
        records.append({"rows": [asdict(row) for row in rows], "ratio": ratio, "with_forward": summed})
        if options.json:
            options.json.write_text(json.dumps(records, indent=1), encoding="utf-8")
    print(f"backward: {summary(ahead)}")
    if options.forward:
        print(f"forward and backward: {summary(together)}")
    bench.close()
    storage.close()


if __name__ == "__main__":
    main()
