"""Is `evoattn.attention` right for any call? Draws calls over all arguments and judges each answer.

    python -m tests.fuzz [--faces [NAME ...]] [--count 300] [--seed 200] [--jobs 16] [--seconds 90] [--json FILE]
    [--only N]

Of each call: two runs, the same bit for bit, over memory that was poisoned with NaN before; inputs unchanged; nothing
written beside a given `out`; the answer and the log-sum-exp against the formula in float64 by flash-attention's rule.
The second run of half of the calls is compiled, a CUDA graph's, of several threads or streams, SDPA's in nested blocks,
in a mode of torch (inference, autocast, deterministic algorithms, gradients) or by a transform.
With `--faces` it asks evoattn's other faces, or those that are named: gradients, expressions, FlexAttention's language,
8 bits, FlashAttention's functions, `batch_invariant=True`; the second time in a CUDA graph, on a stream or in tasks of
asyncio.
Where no kernel runs, the reason is counted and PyTorch's answer is judged, too. `--jobs` processes compile kernels
ahead. After a call that breaks the device another process goes on. Exit code 1 if anything is wrong. Without a GPU
PyTorch answers all calls."""

import argparse
import contextlib
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from evoattn.backends.platform import CudaPlatform
from evoattn.model.gpu import detect_devices
from evoattn.ops.runtime import Runtime, current
from evoattn.portfolio.pick import next_picks
from tests.fuzz.ahead import compile_face, compile_one
from tests.fuzz.calls import drawn
from tests.fuzz.judged import Judged, judged
from tests.fuzz.judged_faces import ALL, face_of, judged_face
from tests.fuzz.ways import ways
from tests.support.in_processes import in_processes

BROKEN = 3
"""How a process ends after which the device can only be used by another one."""
ENDED = "the process ended in this call"
"""Of a call that has begun."""
STOPPED = 130
"""The exit code after Ctrl-C or SIGTERM, as a shell has it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile ahead")
    parser.add_argument("--seconds", type=float, default=0, help="ends after so long, whatever the count; 0 for never")
    parser.add_argument("--most-flops", type=float, default=1e11, help="of a call")
    parser.add_argument(
        "--measured-only", action="store_true", help="no kernels that were measured on no GPU like this"
    )
    parser.add_argument(
        "--faces", nargs="*", choices=list(ALL), help="not calls of attention, but the other functions, or some of them"
    )
    parser.add_argument("--only", type=int, help="one call, by its number")
    parser.add_argument("--folder", type=Path, help="of compiled kernels; a new one unless given")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--until", type=float, default=0, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.until:
        return run_calls(words)
    started = time.time()
    until = started + (words.seconds or math.inf)
    with tempfile.TemporaryDirectory() as temporary:
        rows_at, folder = words.json or Path(temporary) / "rows", words.folder or Path(temporary)
        rows_at.unlink(missing_ok=True)
        own = [*sys.argv[1:], "--until", str(until), "--json", str(rows_at), "--folder", str(folder)]
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was judged until then is said, too
        try:
            code = started_anew(lambda: subprocess.run([sys.executable, "-m", "tests.fuzz", *own]).returncode, rows_at)
        except KeyboardInterrupt:
            code = STOPPED
        rows = rows_of(rows_at)
    if code == STOPPED:
        rows = {number: row for number, row in rows.items() if row.wrong != ENDED}
    print(summary(list(rows.values()), time.time() - started))
    return code or int(any(row.wrong for row in rows.values()))


def started_anew(run: Callable[[], int], rows_at: Path) -> int:
    """`run` a process, and another one wherever a call has ended it; the exit code of the last. One that has not begun
    a new call would end so again, and is the last."""
    begun = 0
    while ((code := run()) == BROKEN or code < 0) and (count := len(rows_of(rows_at))) > begun:
        print(f"That process ended with {code}; another one goes on.", flush=True)
        begun = count
    return code


def rows_of(path: Path) -> dict[int, Judged]:
    """By its number, what became of each call; the last word counts. A line that a process has not ended is none."""
    rows = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            row = Judged(**json.loads(line))
            rows[row.number] = row
    return rows


@dataclass
class Asking:
    """What is asked, calls or other faces: `items` by their numbers, what makes the kernels of one ready, its name
    before it has run, and the verdict."""

    items: list[Any]
    ahead: Callable[..., Any]
    begun: Callable[[Any], str]
    judge: Callable[[Any], Judged]


def of_calls(words: argparse.Namespace, device: str) -> Asking:
    """Calls of the four functions, each `(number, call)`."""
    way_of = ways(words.seed, words.count)
    return Asking(
        list(enumerate(drawn(words.seed, words.count, words.most_flops))),
        compile_one,
        lambda item: f"{way_of[item[0]]}: {item[1].describe()}",
        lambda item: judged(item[0], item[1], device, way=way_of[item[0]]),
    )


def of_faces(words: argparse.Namespace, device: str, launches: Callable[[], int]) -> Asking:
    """Questions to other faces, which are numbers."""
    faces = {name: ALL[name] for name in words.faces or ALL}
    return Asking(
        list(range(words.count)),
        partial(compile_face, seed=words.seed, faces=faces),
        lambda number: face_of(number, faces),
        lambda number: judged_face(words.seed, number, device, launches, faces),
    )


def number_of(item: Any) -> int:
    """That of a call or a question."""
    return item if isinstance(item, int) else int(item[0])


def run_calls(words: argparse.Namespace) -> int:
    """Run the calls that no process before has run, and write down what became of each."""
    done = rows_of(words.json)
    devices, platform = detect_devices(), None
    if devices and devices[0].spec:
        platform = CountingPlatform()
    device = "cuda" if platform else "cpu"
    asking = (
        of_faces(words, device, lambda: platform.count if platform else 0)
        if words.faces is not None
        else of_calls(words, device)
    )
    items = [one for one in asking.items if number_of(one) not in done and words.only in (None, number_of(one))]
    ready = (one for one in items)
    if platform:
        ready = in_processes(
            words.jobs, partial(asking.ahead, devices[0].spec, words.folder, not words.measured_only), items
        )
    runtime = Runtime(platform, current.best_known, words.folder, others=next_picks)
    runtime.estimated = not words.measured_only
    with current.use(runtime), torch.no_grad(), words.json.open("a") as file:
        if file.tell() and not words.json.read_bytes().endswith(b"\n"):
            file.write("\n")  # the process before ended in the midst of a line
        for item in ready:
            if time.time() > words.until:
                break
            write(file, Judged(number_of(item), asking.begun(item), False, "", 0.0, ENDED))
            row = asking.judge(item)
            write(file, row)
            if row.wrong:
                print(f"{row.number}: {row.wrong}: {row.call}; {row.ran}", flush=True)
                if platform and is_broken():
                    ready.close()  # and with it the processes that compile
                    return BROKEN
    return 0


class CountingPlatform(CudaPlatform):
    """Counts launches."""

    def __init__(self) -> None:
        super().__init__()
        self.count, launch = 0, self.launch

        def counted(*given: Any) -> int:
            self.count += 1
            return launch(*given)

        self.launch = counted


def write(file: TextIO, row: Judged) -> None:
    """Add a line."""
    file.write(json.dumps(row.__dict__) + "\n")
    file.flush()


def is_broken() -> bool:
    """Whether a kernel has left the device unusable for this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def summary(rows: list[Judged], seconds: float) -> str:
    """How many calls ran as what."""
    kernels = [row for row in rows if row.kernel]
    lines = [f"{len(rows)} calls in {seconds:.0f} s, {sum(bool(row.wrong) for row in rows)} wrong; by kernels: "]
    lines[0] += f"{len(kernels)}, {len({row.ran for row in kernels})} kinds of them"
    if kernels:
        worst = max(row.error for row in kernels)
        lines.append(f"  the largest error of a kernel is {worst:.2f} of what is allowed")
    for family, count in Counter(row.ran.split()[0] for row in kernels).most_common():
        lines.append(f"{count:6d}  {family}")
    for reason, count in Counter(row.ran for row in rows if not row.kernel).most_common():
        lines.append(f"{count:6d}  PyTorch: {reason}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
