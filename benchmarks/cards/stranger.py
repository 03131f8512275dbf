"""How good are picks on a card that evoattn has never seen, after a calibration of so many minutes?

The GPU at hand plays the stranger (`evoattn/model/gpu_table.py`):

    --play stranger   itself, with everything that ships for it hidden: the picks' times over those of the shipped picks
    --play a100, l4   with the families and the shared memory of a block of that card, beside SDPA's flash and efficient

First `evoattn calibrate` runs with `--calibrate`, in a data folder of its own; then the picks of unseen problems are
timed in turns with SDPA, with the shipped picks (stranger alone), with the kernels that a pick races in the op's first
call of a size and with the best of a search of `--search` seconds a problem. A race of its own before that says which
one the op would run. One table says what came of it; `-o` keeps all times. `--calibrate 0` takes what `--folder` has,
or judges picks before a calibration; `--problems 0` only calibrates. `--part 1/4` judges every fourth problem, so that
GPUs share them, and `--tables` makes one table of several such files."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from statistics import geometric_mean, quantiles
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evoattn.engine.tools import Tools
    from evoattn.model.gpu import DetectedDevice, GpuSpec
    from evoattn.model.problem import AttentionProblem
    from evoattn.portfolio.select import Checked

PEERS = ("flash", "efficient")
"""Not cuDNN: it uses Hopper's instructions."""
FIRST_SEED, EACH_SEED = 8200, 20
SHOWN = 8
"""Problems that a table names."""
GOALS = {"stranger": "times of shipped picks: 1.05 after 10 minutes, 1.03 after 20"}
BESIDE_SDPA = "ahead of SDPA on 57 of 60, SDPA / pick 1.25, regret 1.04, all after 10 minutes"


@dataclass(frozen=True)
class Row:
    """One problem as `check_all` judges it, and µs of two more picks that took part, None where there is none: `plain`,
    without the card's correction, and `shipped`."""

    checked: Checked
    plain: float | None = None
    shipped: float | None = None

    def over(self, us: float | None) -> float | None:
        """A time over the pick's, None where there is none of either."""
        return us / self.checked.pick_us if us and self.checked.pick_us else None

    @property
    def gain(self) -> float | None:
        """The time of the faster one of SDPA's backends over the pick's."""
        return self.over(min(self.checked.peers.values(), default=None))

    @property
    def raced(self) -> float:
        """The time of what the op runs after its race, over the best of ours; the pick's where it has no rival."""
        us, best = self.checked.raced_us or self.checked.pick_us, self.checked.best_us
        return us / best if us and best else math.nan

    def name(self, ratio: float) -> str:
        """For people, behind a ratio."""
        return f"  {ratio:.3f} {self.checked.problem} ({self.checked.pick[0] if self.checked.pick else 'none'})"


def _geomean(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios):.3f}" if ratios else "none"


def table(rows: Sequence[Row], goal: str) -> str:
    """What came of it, for people."""
    gains = [(gain, row) for row in rows if (gain := row.gain)]
    shipped = [1 / r for row in rows if (r := row.over(row.shipped))]
    plain = [r for row in rows if (r := row.over(row.plain))]
    lost = [(row.checked.regret, row) for row in rows if row.checked.pick_us]
    regrets, sdpa = [regret for regret, _ in lost], [gain for gain, _ in gains]
    raced = [row.raced for _, row in lost]
    tail = f"{quantiles(regrets, n=20)[-1]:.3f}" if len(regrets) > 1 else "none"
    lines = [
        f"Goal: {goal}.",
        "| what | problems | geomean | worst |",
        "|---|---|---|---|",
        f"| pick / shipped pick | {len(shipped)} | {_geomean(shipped)} | {max(shipped, default=math.nan):.3f} |",
        f"| pick without correction / pick | {len(plain)} | {_geomean(plain)} | {min(plain, default=math.nan):.3f} |",
        f"| pick / best of ours (regret; 95th percentile {tail}) | {len(regrets)} | {_geomean(regrets)} "
        f"| {max(regrets, default=math.nan):.3f} |",
        f"| the same of what runs after the race with its rivals | {len(raced)} | {_geomean(raced)} "
        f"| {max(raced, default=math.nan):.3f} |",
        f"| SDPA flash or efficient / pick | {len(sdpa)} | {_geomean(sdpa)} | {min(sdpa, default=math.nan):.3f} |",
        f"Ahead of SDPA on {sum(gain > 1 for gain in sdpa)} of {len(sdpa)}; "
        f"{sum(not row.checked.pick_us for row in rows)} of {len(rows)} problems have no pick or a wrong one.",
        "Least ahead of SDPA:",
        *(row.name(gain) for gain, row in sorted(gains, key=itemgetter(0))[:SHOWN]),
        "Most lost to the best of ours:",
        *(row.name(regret) for regret, row in sorted(lost, key=itemgetter(0), reverse=True)[:SHOWN]),
        *(f"  wrong: {row.checked.problem}: {row.checked.wrong}" for row in rows if row.checked.wrong),
    ]
    return "\n".join(lines)


def unseen(count: int, gpu: GpuSpec, seed: int = FIRST_SEED) -> list[AttentionProblem]:
    """Plain problems of `seed` and the next ones, of which nothing is made, as many as fit the card; without fp32, as
    SDPA's flash is."""
    from evoattn.portfolio.calibrate import fits
    from evoattn.portfolio.workload import draw

    found: dict[AttentionProblem, None] = {}
    while len(found) < count:
        found |= dict.fromkeys(p for p in draw(seed, EACH_SEED) if p.dtype != "fp32" and fits(p, gpu))
        seed += 1
    return list(found)[:count]


def player(card: str, target: str, folder: Path) -> DetectedDevice | None:
    """The GPU at hand as it plays the card, with data and machine code in a folder; None, and a word of it, where there
    is none. Before what reads the environment is imported."""
    os.environ |= {
        "EVOATTN_PLAY_CARD": f"{card}@{target}",
        "XDG_DATA_HOME": str(folder / "data"),
        "EVOATTN_CACHE": str(folder / "cubins"),
    }
    from evoattn.model.gpu import detect_devices
    from evoattn.model.gpu_table import is_played

    device = next((one for one in detect_devices() if one.spec), None)
    if device and device.spec and is_played(device.spec):
        return device
    print("There is no CUDA device here that could play a card.", file=sys.stderr)
    return None


def share(text: str) -> slice:
    """Of `1/4`, every fourth from the first. Raises `ValueError`."""
    part, _, parts = text.partition("/")
    found = slice(int(part) - 1, None, int(parts))
    if not 0 <= found.start < found.step:
        raise ValueError(f"There is no part {text}.")
    return found


def kept_rows(files: Sequence[Path]) -> tuple[str, list[Row]]:
    """The card that was played, and the rows of all files of `-o`."""
    from evoattn.portfolio.select import Checked

    read = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    rows = [row | {"checked": Checked(**row["checked"])} for one in read for row in one["rows"]]
    return read[0]["play"], [Row(**row) for row in rows]


def judge(
    problems: Sequence[AttentionProblem],
    gpu: GpuSpec,
    real: GpuSpec | None,
    words: argparse.Namespace,
    say: Callable[[str], None],
    tools: Tools | None = None,
) -> Iterator[Row]:
    """The picks of the played card in turns with the others. `real`: the GPU whose shipped picks take part."""
    from evoattn.cost import correction
    from evoattn.engine.breeding import Breeder
    from evoattn.portfolio.pick import forget, pick
    from evoattn.portfolio.select import Judging, check_all
    from evoattn.timing.protocol import COMPARISON

    correction.put(gpu, correction.NONE)
    plain = {problem: pick(problem, gpu) for problem in problems}
    forget()
    shipped = {problem: pick(problem, real) if real else None for problem in problems}

    def others(problem: AttentionProblem) -> list[tuple[str, dict[str, Any]]]:
        return [(one.family, one.config.params) for one in (plain[problem], shipped[problem]) if one]

    how = Judging(words.search, PEERS, COMPARISON.samples, words.jobs, others, Breeder, races=True)
    for (group, index), row in check_all(problems, gpu, how, say, tools):
        theirs = plain[group.problems[index]], shipped[group.problems[index]]
        yield Row(row, *(row.times.get(one.config.id) if one else None for one in theirs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--play", default="a100", metavar="CARD", help="a card of `evoattn gpus`, or stranger")
    parser.add_argument("--target", default="sm_90a", help="what the GPU at hand compiles for")
    parser.add_argument("--calibrate", default="10m", metavar="BUDGET")
    parser.add_argument("--kinds", default="plain", metavar="KIND,…", help="of the calibration")
    parser.add_argument("--problems", type=int, default=60, metavar="N")
    parser.add_argument("--seed", type=int, default=FIRST_SEED, metavar="N", help="of the problems")
    parser.add_argument("--search", type=float, default=0.0, metavar="S", help="of each problem, for its regret")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="data and cache; a new one unless given")
    parser.add_argument("--jobs", type=int, metavar="N", help="compile processes")
    parser.add_argument("--part", type=share, default="1/1", metavar="I/N", help="of the problems")
    parser.add_argument("--tables", type=Path, nargs="+", metavar="FILE", help="one table of what -o kept, and no more")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="all times, as JSON, as they come")
    words = parser.parse_args()
    if words.tables:
        play, kept = kept_rows(words.tables)
        print(table(kept, GOALS.get(play, BESIDE_SDPA)))
        return 0
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s: {text}", file=sys.stderr, flush=True)

    folder = words.folder or Path(tempfile.mkdtemp(prefix="evoattn-stranger-"))
    if (device := player(words.play, words.target, folder)) is None or (gpu := device.spec) is None:
        return 1
    from evoattn.engine.budget import parse_budget
    from evoattn.model.gpu import row_of
    from evoattn.portfolio.calibrate import Wanted, calibrate

    known = row_of(device.product)
    real = known.with_limits(device.limits) if known and words.play == "stranger" else None
    seconds = 0.0 if words.calibrate == "0" else parse_budget(words.calibrate).seconds or 0.0
    calibrated: dict[str, Any] = {}
    if seconds:
        done = calibrate(Wanted(seconds, tuple(words.kinds.split(",")), (), words.jobs, judge_share=0.0), gpu, say)
        calibrated = {"times": done.calibration.times, "fit": done.calibration.correction.left_out["all"]}
    if not words.problems:
        return 0
    about = {"device": device.product, "play": words.play, "calibrate": words.calibrate, **calibrated}
    rows = list[Row]()
    for row in judge(unseen(words.problems, gpu, words.seed)[words.part], gpu, real, words, say):
        rows.append(row)
        if words.output:
            words.output.write_text(json.dumps(about | {"rows": [asdict(row) for row in rows]}), encoding="utf-8")
    print(f"{device.product} as {gpu.name}, calibrated for {words.calibrate}, {time.strftime('%Y-%m-%d')}:")
    print(table(rows, GOALS.get(words.play, BESIDE_SDPA)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
