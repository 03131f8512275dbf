"""Kill, fill, lock and forbid: a search under faults, and its database held to what it acknowledged.

    python -m tests.faults [--kills 20] [--worker-kills 8] [--trials 20000] [--seed 0] [--rounds 5]
                                 [--only kill,workers,boards,ray,disk,right,two,day,postgres]

Prints a row a fault: how often, what was promised and what was kept; exit code 0 only if nothing was lost, doubled or
corrupted, and every refusal was one sentence. Kills run the real search, on the GPU where one is (else offline for an
L4); `--fake` puts a made-up GPU in its place, which `workers` also does where there is no GPU, so that a GPU worker can
be killed. Disk, right and two are about files and always use it, as `postgres` does, which
needs PostgreSQL's programs. `boards` is `workers` on three made-up GPUs, `ray` the same on a local Ray cluster, where
actors are killed too."""

import argparse
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from evoattn.model import gpu
from evoattn.model.paths import ROOT
from tests.faults.fleet import BOARDS, worker_runs
from tests.faults.postgres import postgres_runs
from tests.faults.run import SMALL, Fault, Run, environment, finish, require, wait_for_trials, wait_until

MAX_GROWTH_MB, MAX_REPORT_S = 20.0, 3.0
"""Over 20,000 trials: memory stays flat (their numbers alone take a few MB in the driver), a report takes 3 s."""


def kill_runs(run: Run, kills: int, rng: random.Random) -> str:
    """kill -9 the search, each fifth time while it starts, else a random moment after a random number of new trials;
    then resume it."""
    for n in range(kills):
        before = len(run.acknowledged())
        process = run.search("1h")
        if n % 5 == 4:
            time.sleep(rng.uniform(0.1, 5.0))
        else:
            wait_for_trials(run, process, before + rng.randint(1, 12))
            time.sleep(rng.uniform(0, 0.2))
        require(
            process.poll() is None,
            f"The search ended by itself: {process.communicate()[0][-400:] if process.poll() is not None else ''}",
        )
        process.send_signal(signal.SIGKILL)
        process.communicate()
        run.check()
    finish(run.search("5trials"), (0,))
    return f"{kills} kills; {len(run.acknowledged())} trials acknowledged, {run.check()} kept, none twice"


def disk_run(run: Run, root: bool) -> str:
    """Fill the disk under a search: a tmpfs of 1 MB for root, else a limit on the size of a file; then make room and
    resume."""
    if root:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", run.folder], check=True)
    try:
        (run.folder / "writable").mkdir()
        run.journal = Path(tempfile.mkstemp()[1])  # elsewhere: it is to know more than the disk
        sentence = finish(run.search("1h", file_bytes=None if root else 1 << 19), (1,), "evoattn: The disk that holds")
        kept = run.check()
        require(kept > 10, f"Only {kept} trials before the disk was full.")
        if root:
            subprocess.run(["mount", "-o", "remount,size=64m", run.folder], check=True)
        finish(run.search("5trials"), (0,))
        return f"{kept} trials, then: {sentence} Resumed to {run.check()}"
    finally:
        if root:
            subprocess.run(["umount", "--lazy", run.folder], check=True)


def right_run(run: Run) -> str:
    """Take the write right away from a running search (POSIX: its open files stay writable), then resume without it,
    then with it."""
    process = run.search("60trials", obeys_modes=True)
    wait_until(lambda: len(run.acknowledged()) >= 10)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (run.folder, *run.folder.iterdir())}
    journal = run.journal
    for path, mode in modes.items():
        if path != journal:
            path.chmod(mode & ~0o222)
    first = finish(process, (0, 1))
    kept = run.check()
    sentence = finish(run.start("--budget", "5trials", "--resume", obeys_modes=True), (1,), "evoattn: ")
    require(run.check() == kept, "A search without the right to write has written.")
    for path, mode in modes.items():
        if path.exists():
            path.chmod(mode)
    finish(run.search("5trials", obeys_modes=True), (0,))
    running = f"; {first}" if first else ", the running search goes on"
    return f"{kept} trials{running}; resumed without: {sentence} With: {run.check()} trials"


def two_runs(run: Run) -> str:
    """Two searches on one database work side by side; a second one on the same study is refused."""
    first = run.start("--gpu", run.target, "--budget", "120trials", *SMALL, "--study", "first")
    wait_until(lambda: len(run.acknowledged()) >= 1)
    third = run.start("--budget", "5trials", "--resume", "--study", "first")
    second = run.start("--gpu", run.target, "--budget", "120trials", *SMALL, "--study", "second")
    refused = finish(third, (1,), "Another search is running on study 'first'")
    finish(first, (0,)), finish(second, (0,))
    counts = run._rows("SELECT count(*) FROM trials GROUP BY study_id")
    require(counts == [(120,), (120,)], f"Trials by study: {counts}.")
    return f"two studies at once: {run.check()} of 240 trials; one study twice: {refused}"


def day_run(run: Run, trials: int) -> str:
    """A day's offline trials through the storage: memory at a tenth of them and at the end, then the CPU time of each
    report as a user runs it, which other processes do not lengthen."""
    command = [sys.executable, "-m", "tests.faults.day", str(run.db), str(trials)]
    done = subprocess.run(command, env=environment(), cwd=ROOT, text=True, capture_output=True)
    require(done.returncode == 0, done.stderr[-300:])
    early, written, read, count = map(float, done.stdout.split())
    require(count == trials == run.check(), f"{count} trials read of {trials}.")
    require(
        max(written, read) - early < MAX_GROWTH_MB,
        f"Memory grew from {early} to {written} MB writing and {read} MB reading.",
    )
    seconds = {}
    for form in ("table", "json", "html"):
        command = [sys.executable, "-m", "evoattn.cli.main", "report", "--db", str(run.db), "--format", form]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command += ["-o", str(run.folder / form)]
        subprocess.run(command, env=environment(), cwd=ROOT, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds[form] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        require(
            seconds[form] < MAX_REPORT_S * max(1.0, trials / 20_000),
            f"The report as {form} took {seconds[form]:.1f} s.",
        )
    spoken = ", ".join(f"{form} {s:.1f} s" for form, s in seconds.items())
    return f"{trials} trials: {early:.0f} MB at a tenth, {written:.0f} MB written, {read:.0f} MB all read; {spoken}"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--worker-kills", type=int, default=8)
    options.add_argument("--rounds", type=int, default=5, help="of `postgres`")
    options.add_argument("--trials", type=int, default=20_000)
    options.add_argument("--only", default="kill,workers,boards,ray,disk,right,two,day,postgres")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--fake", action="store_true", help="a made-up compiler and GPU in the kill runs too")
    given = options.parse_args()
    rng, root = random.Random(given.seed), os.geteuid() == 0
    here = bool(gpu.detect_devices())
    runs: dict[str, tuple[str, Callable[[Run], str]]] = {
        "kill": ("fake" if given.fake else "real", lambda run: kill_runs(run, given.kills, rng)),
        "workers": (
            "real" if here and not given.fake else "fake",
            lambda run: worker_runs(run, given.worker_kills, rng),
        ),
        "boards": ("fake", lambda run: worker_runs(run, given.worker_kills, rng, BOARDS)),
        "ray": ("fake", lambda run: worker_runs(run, given.worker_kills, rng, (*BOARDS, "--ray"))),
        "disk": ("fake", lambda run: disk_run(run, root)),
        "right": ("fake", lambda run: right_run(run)),
        "two": ("fake", lambda run: two_runs(run)),
        "day": ("fake", lambda run: day_run(run, given.trials)),
        "postgres": ("fake", lambda run: postgres_runs(run.folder, given.rounds, rng)),
    }
    failed = 0
    for name in given.only.split(","):
        kind, work = runs[name]
        folder, started = Path(tempfile.mkdtemp(prefix="evoattn-fault-")), time.monotonic()
        try:
            said, mark = work(Run(folder, kind)), "ok"
        except Fault as fault:
            said, mark, failed = str(fault), "FAILED", failed + 1
        print(f"{name:<8} {mark:<7} {time.monotonic() - started:6.1f} s  {said}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
