"""Is evoattn.attention never slower than SDPA on a card that nobody measured, and what do its races cost?

The GPU at hand plays the card (`evoattn/model/played.py`), in data and cache folders of its own. Each unseen problem is
called once, which races the pick and SDPA; then evoattn.attention and SDPA are timed in turns, as the device takes
them. The table says who won, the worst of evoattn's time over SDPA's, and the GPU's time of a race. A second process
then calls all again, and must not race; at last a CUDA graph and compiled code take what the races found."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.cards.stranger import FIRST_SEED, player, unseen

if TYPE_CHECKING:
    from torch import Tensor

    from evoattn.model.problem import AttentionProblem

ROUNDS, CALLS = 7, 10
MOST_SLOWER = 1.03
CYCLES_PER_MS = 1.7e6
"""Of the GPU's clock, at least, while it is busy: what a race's delays take by."""
COMPILED, AT_ONCE = 6, 12
"""Problems that compiled code calls, and that two processes race at once."""
AGAIN = "--again"


def compiled(text: str) -> None:
    """Compile the pick of a problem into the op's cache, in a process of its own without CUDA."""
    from evoattn.backends.cubins import get_cubin
    from evoattn.families import registry
    from evoattn.model.gpu import detect_devices
    from evoattn.model.paths import cubin_cache
    from evoattn.model.shape_text import parse_shape
    from evoattn.ops.runtime import FOLDER
    from evoattn.portfolio.pick import pick

    problem, gpu = parse_shape(text).canonical(), detect_devices()[0].spec
    if gpu and (found := pick(problem, gpu)):
        get_cubin(registry.lookup(found.family), problem, found.config, gpu, cubin_cache() / FOLDER)


def tensors(problem: AttentionProblem) -> dict[str, Any]:
    """The arguments of a call of the problem."""
    import torch

    from evoattn.model.dtype import DTYPES

    made = []
    for name in "qkv":
        shape, strides = problem.shape(name), problem.strides(name)
        whole = torch.randn(math.prod(shape), device="cuda", dtype=getattr(torch, DTYPES[problem.dtype].torch))
        made.append(whole.as_strided(shape, strides))
    words = {"enable_gqa": problem.heads != problem.kv_heads}
    causal = {"full": False, "causal_upper_left": "upper_left", "causal_lower_right": "lower_right"}[problem.mask]
    return dict(zip(("query", "key", "value"), made, strict=True)) | words | {"causal": causal}


def by_sdpa(words: dict[str, Any]) -> Tensor:
    """What a user of PyTorch runs: its own causal mask where both are one."""
    import torch

    from evoattn.ops.arguments import mask_of
    from evoattn.ops.call import Call
    from evoattn.ops.torch_answer import answer

    call = Call(words["query"], words["key"], words["value"], mask_of(words["causal"] or None, False))
    call.enable_gqa = words["enable_gqa"]
    found = answer(call)
    assert isinstance(found, torch.Tensor)
    return found


def again(texts: list[str]) -> None:
    """All problems once more, in this process. Prints of how many a CUDA graph gives what the eager call gives, and of
    how many of the first ones compiled code does."""
    import torch

    import evoattn
    from evoattn.model.shape_text import parse_shape

    right, compiled_right = 0, 0
    for i, text in enumerate(texts):
        words = tensors(parse_shape(text))
        call = partial(evoattn.attention, enable_gqa=words.pop("enable_gqa"), causal=words.pop("causal"))
        eager = call(**words).float()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(**words)
        graph.replay()
        torch.cuda.synchronize()
        right += torch.allclose(eager, out.float(), atol=1e-2, rtol=1e-2)
        if i < COMPILED:
            torch.compiler.reset()
            found = torch.compile(call, fullgraph=True, backend="aot_eager")(**words)
            compiled_right += torch.allclose(eager, found.float(), atol=1e-2, rtol=1e-2)
    print(right, compiled_right)


def races_in(folder: Path) -> int:
    """Races that were held with this data folder."""
    from evoattn.portfolio.wins import RACES_FILE

    file = folder / "data" / "evoattn" / RACES_FILE
    return sum(map(bool, file.read_bytes().splitlines())) if file.exists() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--play", default="stranger", metavar="CARD", help="a card of `evoattn gpus`, or stranger")
    parser.add_argument("--target", default="sm_90a", help="what the GPU at hand compiles for")
    parser.add_argument("--problems", type=int, default=60, metavar="N")
    parser.add_argument("--seed", type=int, default=FIRST_SEED, metavar="N", help="of the problems")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="compile processes")
    parser.add_argument("--seconds", type=float, default=240.0, metavar="S", help="at most")
    parser.add_argument(AGAIN, type=Path, metavar="FILE", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.again:
        again(json.loads(words.again.read_text(encoding="utf-8")))
        return 0
    folder, started = Path(tempfile.mkdtemp(prefix="evoattn-race-")), time.monotonic()
    if (device := player(words.play, words.target, folder)) is None or (gpu := device.spec) is None:
        return 1
    from evoattn.model.shape_text import parse_shape

    texts = [problem.describe() for problem in unseen(words.problems, gpu, words.seed)]
    with ProcessPoolExecutor(words.jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compiled, texts))
    print(f"{time.monotonic() - started:.0f} s: compiled", file=sys.stderr, flush=True)

    import torch

    import evoattn
    from evoattn.ops.choice import CudaClock

    clock, cost = CudaClock(), GpuCost()
    rows: list[tuple[float, bool, float, float, str, str]] = []
    for text in texts:
        if time.monotonic() - started > words.seconds:
            print(f"The time is over: {len(rows)} of {len(texts)} problems were called.", file=sys.stderr)
            break
        given = tensors(parse_shape(text))
        torch.cuda.synchronize()
        before = time.monotonic()
        with cost:
            evoattn.attention(**given)
        torch.cuda.synchronize()
        first_ms = (time.monotonic() - before) * 1e3
        said = evoattn.explain(given.pop("query"), given.pop("key"), given.pop("value"), **given)
        given = tensors(parse_shape(text))
        ours, theirs = [], []
        for _ in range(ROUNDS):
            ours.append(clock.time_us(partial(evoattn.attention, **given), CALLS))
            theirs.append(clock.time_us(partial(by_sdpa, given), CALLS))
        ratio = sorted(a / b for a, b in zip(ours, theirs, strict=True))[ROUNDS // 2]
        rows.append((ratio, not said.startswith("SDPA runs"), first_ms, cost.ms, text, said))
    file = folder / "shapes.json"
    file.write_text(json.dumps([row[4] for row in rows]), encoding="utf-8")
    held = races_in(folder)
    right, right_compiled = map(int, _again(file).communicate()[0].split()[-2:])
    more = races_in(folder) - held
    both, once_more, odd = at_once(folder, [row[4] for row in rows][:AT_ONCE])
    ratios = [row[0] for row in rows]
    print(f"{device.product} as {gpu.name}, {time.strftime('%Y-%m-%d')}:")
    print("| problems | races | kernel runs | ours / SDPA, geomean | worst | over 1.03 | first call, ms | GPU, ms |")
    print("|---" * 8 + "|")
    mean = math.exp(fmean(map(math.log, ratios)))
    slower = sum(ratio > MOST_SLOWER for ratio in ratios)
    print(
        f"| {len(rows)} | {held} | {sum(row[1] for row in rows)} | {mean:.3f} | {max(ratios):.3f} | {slower} "
        f"| {max(row[2] for row in rows):.0f} | {max(row[3] for row in rows):.1f} |"
    )
    least = min(len(rows), COMPILED)
    print(
        f"First call and GPU: the worst. A second process held {more} races; {right} of {len(rows)} graphs and "
        f"{right_compiled} of {least} compiled calls were right.\n"
        f"Two processes at once held {both} races of {min(len(rows), AT_ONCE)} problems, a third {once_more} more; "
        f"{odd} of the three had a wrong answer."
    )
    for ratio, _, _, _, text, said in sorted(rows, reverse=True)[:6]:
        print(f"  {ratio:.3f} {text}: {said}")
    failed = slower or more or right < len(rows) or right_compiled < least or once_more or odd
    return 1 if failed else 0


class GpuCost:
    """Within it, what races take of the GPU: `ms`, with their first calls and the delays before what they time."""

    def __init__(self) -> None:
        self.ms = 0.0

    def __enter__(self) -> GpuCost:
        from evoattn.ops.choice import DELAY_CYCLES, CudaClock

        self.ms, self._usual = 0.0, (CudaClock.first_us, CudaClock.time_us)
        first, usual = self._usual

        def first_us(self_: CudaClock, run: Callable[[], object]) -> float:
            us = first(self_, run)
            self.ms += us * 1e-3
            return us

        def time_us(self_: CudaClock, run: Callable[[], object], count: int) -> float:
            us = usual(self_, run, count)
            self.ms += us * count * 1e-3 + DELAY_CYCLES / CYCLES_PER_MS
            return us

        setattr(CudaClock, "first_us", first_us)  # noqa: B010 (mypy has no word for another method)
        setattr(CudaClock, "time_us", time_us)  # noqa: B010
        return self

    def __exit__(self, *_: object) -> None:
        from evoattn.ops.choice import CudaClock

        for name, usual in zip(("first_us", "time_us"), self._usual, strict=True):
            setattr(CudaClock, name, usual)


def at_once(folder: Path, texts: list[str]) -> tuple[int, int, int]:
    """Two processes that race the same problems at once, with a data folder of their own: races that they held, that a
    third holds after them, and how many of the three failed or had a wrong answer."""
    here, file = folder / "two", folder / "two.json"
    file.write_text(json.dumps(texts), encoding="utf-8")
    pair = [_again(file, here) for _ in range(2)]
    said = [one.communicate()[0] for one in pair]
    held = races_in(here)
    said.append(_again(file, here).communicate()[0])
    wanted = [str(len(texts)), str(min(len(texts), COMPILED))]
    return held, races_in(here) - held, sum(words.split()[-2:] != wanted for words in said)


def _again(file: Path, folder: Path | None = None) -> subprocess.Popen[str]:
    """A process that calls the problems of a file, of another data folder if one is named."""
    words = [sys.executable, "-m", "benchmarks.cards.race", AGAIN, str(file)]
    env = os.environ | ({"XDG_DATA_HOME": str(folder / "data")} if folder else {})
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)


if __name__ == "__main__":
    raise SystemExit(main())
