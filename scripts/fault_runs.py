"""Kill, fill, lock and forbid: a search under faults, and its database held to what it acknowledged.

    python scripts/fault_runs.py [--kills 20] [--worker-kills 8] [--trials 20000] [--seed 0]
                                 [--only kill,workers,disk,right,two,day]

Prints a row a fault: how often, what was promised and what was kept; exit code 0 only if nothing was lost, doubled or
corrupted, and every refusal was one sentence. Kills run the real search, on the GPU where one is (else offline for an
L4); `--fake` puts a made-up GPU in its place, which `workers` also does where there is no GPU, so that a GPU worker can
be killed. Disk, right and two are about files and always use it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from evoattn.model import gpu
from evoattn.model.paths import ROOT

DRIVER = Path(__file__).with_name("fault_search.py")
SMALL = ("--shape", "B=1,H=1,S=64,D=16", "--family", "flash_scalar", "--jobs", "2")
LIBC = ctypes.CDLL(None)
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2  # linux/prctl.h, linux/capability.h
MAX_GROWTH_MB, MAX_REPORT_S = 20.0, 3.0
"""Over 20,000 trials: memory stays flat (their numbers alone take a few MB in the driver), a report takes 3 s."""


class Fault(AssertionError):
    """Something was lost, doubled, corrupted or said unclearly."""


def require(fact: bool, sentence: str) -> None:
    if not fact:
        raise Fault(sentence)


class Run:
    """One database in a folder of its own, with the journal of what its searches were promised."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.db, self.journal = folder / "db.sqlite", folder / "journal"
        self.target = "h100" if kind == "fake" else "auto" if gpu.detect_devices() else "l4"

    def start(self, *words: str, obeys_modes: bool = False, file_bytes: int | None = None) -> subprocess.Popen:
        def limit() -> None:
            if obeys_modes:  # root's right to write everywhere ends at the next exec
                for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
                    LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
            if file_bytes:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        command = [sys.executable, str(DRIVER), str(self.journal), self.kind, "--db", str(self.db), *words]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        return subprocess.Popen(
            command,
            env=environment,
            preexec_fn=limit,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def search(self, budget: str, **how) -> subprocess.Popen:
        """A new study in a new database, else a resumed one."""
        if self.db.exists() and self.studies():
            return self.start("--budget", budget, "--jobs", "2", "--resume", **how)
        return self.start("--gpu", self.target, "--budget", budget, *SMALL, **how)

    def lines(self, kind: str) -> list[list[str]]:
        text = self.journal.read_text() if self.journal.exists() else ""
        return [line.split()[1:] for line in text.splitlines() if line.startswith(f"{kind} ")]

    def acknowledged(self) -> dict[int, str]:
        return {int(number): config_id for number, config_id in self.lines("trial")}

    def _rows(self, query: str) -> list[tuple]:
        try:
            with closing(sqlite3.connect(f"file:{self.db}?mode=ro", uri=True, timeout=20)) as connection:
                return connection.execute(query).fetchall()
        except sqlite3.OperationalError as error:  # killed before its first table, or before its first file
            require(
                "no such table" in str(error) or "unable to open" in str(error),
                f"The database cannot be read: {error}.",
            )
            return []

    def studies(self) -> list[tuple]:
        return self._rows("SELECT name FROM studies")

    def check(self) -> int:
        """Hold the database to the journal; returns the trials in it."""
        rows = self._rows("SELECT number, study_id, config_id, state FROM trials ORDER BY number")
        kept = {number: config_id for number, _, config_id, _ in rows}
        lost = [n for n, config_id in self.acknowledged().items() if kept.get(n) != config_id]
        require(not lost, f"{len(lost)} acknowledged trials are lost, the first is {lost[:1]}.")
        ours = [(study, config_id) for _, study, config_id, state in rows if state != "DUPLICATE"]
        require(len(ours) == len(set(ours)), f"{len(ours) - len(set(ours))} trials are there twice.")
        for pragma, answer in (("integrity_check", [("ok",)]), ("foreign_key_check", [])):
            found = self._rows(f"PRAGMA {pragma}") if self.db.exists() else answer
            require(found == answer, f"PRAGMA {pragma} says {found[:2]}.")
        return len(kept)


def finish(process: subprocess.Popen, codes: tuple[int, ...], part: str = "", seconds: float = 180.0) -> str:
    """Wait for a search, hold its exit code and its words to what they should be, and return them."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise Fault(f"The search hangs: {process.communicate()[0][-300:]}") from None
    require(
        process.returncode in codes and "Traceback" not in output and part in output,
        f"Exit code {process.returncode}, expected {codes} with {part!r}: {output[-600:]}",
    )
    return " ".join(output[output.find("evoattn: ") + 9 :].split()) if "evoattn: " in output else ""


def wait_until(condition, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        require(time.monotonic() < end, "It did not happen in time.")
        time.sleep(0.005)


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
            f"The search ended by itself: {process.stdout.read()[-400:] if process.poll() is not None else ''}",
        )
        process.send_signal(signal.SIGKILL)
        process.communicate()
        run.check()
    finish(run.search("5trials"), (0,))
    return f"{kills} kills; {len(run.acknowledged())} trials acknowledged, {run.check()} kept, none twice"


def wait_for_trials(run: Run, process: subprocess.Popen, count: int) -> None:
    """Until that many trials are acknowledged, or the search has ended."""
    wait_until(lambda: len(run.acknowledged()) >= count or process.poll() is not None)


def worker_runs(run: Run, kills: int, rng: random.Random) -> str:
    """Kill the GPU worker and compile workers at random under one search: it goes on to the end of its budget."""
    budget, killed = 60 + 5 * kills, {}
    process = run.search(f"{budget}trials")
    for n in range(kills):
        wait_for_trials(run, process, 3 + n * budget // (kills + 1))
        time.sleep(rng.uniform(0, 0.1))
        workers = {
            name: [int(pid) for other, pid in run.lines("worker") if other == name] for name, _ in run.lines("worker")
        }
        name = sorted(workers)[n % len(workers)]
        alive = [pid for pid in workers[name] if Path(f"/proc/{pid}").exists()]
        os.kill(rng.choice(alive), signal.SIGKILL)
        killed[name] = killed.get(name, 0) + 1
    finish(process, (0,), "Done (budget spent)", 400)
    require(run.check() == budget, f"{run.check()} trials for a budget of {budget}.")
    died = run._rows("SELECT count(*) FROM trials WHERE state = 'WORKER_DIED'")[0][0]
    counts = ", ".join(f"{count} x {name}" for name, count in killed.items())
    return f"killed {counts}; {budget} of {budget} trials, {died} WORKER_DIED"


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


DAY = """
import resource, sys
from evoattn.model.space import KernelConfig, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.storage import Storage
from evoattn.model.records import Candidate, CheckResult, CompileInfo, Evaluation, TrialState, ValidationReport
import random
rng, count = random.Random(0), int(sys.argv[2])
storage = Storage.open(sys.argv[1])
families = ("flash_mma", "flash_scalar")
problem = AttentionProblem(1, 16, 16, 1024, 1024, 64, name="seed_h100")
study = storage.create_study("day", problem, GPUS["l4"], True, "genetic", 0, families, {"evoattn": "day"}, {})
spaces = {name: load_space(name, GPUS["l4"]) for name in families}
info = CompileInfo(128, 8, 16, 24, 1024, (), 0.3, "NVRTC 13.0", ("-arch=sm_89",))
checks = ValidationReport("interpreter", tuple(CheckResult(f"case {i}", True, 1e-4, 1e-2) for i in range(8)))
def megabytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20
seen = set()  # a sampler proposes no config twice; 8 bytes of each id tell them apart
def draw():
    while True:
        name = rng.choice(families)
        config = KernelConfig(name, {p.name: rng.choice(p.values) for p in spaces[name].parameters})
        if int(config.id[:16], 16) not in seen:
            seen.add(int(config.id[:16], 16))
            return name, config
for n in range(count):
    if n == count // 10:
        early = megabytes()
    name, config = draw()
    source = f"// {n}\\n" + "constexpr int BLOCK_M = 64;\\n" * 700
    candidate = Candidate(name, config.params, config.id, source, "sm_89")
    right = Evaluation(TrialState.ESTIMATED, "", info, checks, (), rng.uniform(1e5, 1e6), 0.2)
    wrong = Evaluation(TrialState.COMPILE_ERROR, f"Line {n}: identifier is undefined.", seconds=0.2)
    evaluation = rng.choice((right, right, right, wrong))
    storage.record(study, config, candidate, evaluation, (rng.randint(1, n + 1),), "mutation")
written = megabytes()
read = sum(1 for _ in storage.iter_trials(study, evidence=True))
print(f"{early:.1f} {written:.1f} {megabytes():.1f} {read}")
"""


def day_run(run: Run, trials: int) -> str:
    """A day's offline trials through the storage: memory at a tenth of them and at the end, then each report timed as a
    user runs it."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", DAY, str(run.db), str(trials)]
    done = subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True)
    require(done.returncode == 0, done.stderr[-300:])
    early, written, read, count = map(float, done.stdout.split())
    require(count == trials == run.check(), f"{count} trials read of {trials}.")
    require(
        max(written, read) - early < MAX_GROWTH_MB,
        f"Memory grew from {early} to {written} MB writing and {read} MB reading.",
    )
    seconds = {}
    for form in ("table", "json", "html"):
        command = [
            sys.executable,
            "-m",
            "evoattn.cli.main",
            "report",
            "--db",
            str(run.db),
            "--format",
            form,
            "-o",
            str(run.folder / form),
        ]
        started = time.perf_counter()
        subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True)
        seconds[form] = time.perf_counter() - started
        require(
            seconds[form] < MAX_REPORT_S * max(1.0, trials / 20_000),
            f"The report as {form} took {seconds[form]:.1f} s.",
        )
    spoken = ", ".join(f"{form} {s:.1f} s" for form, s in seconds.items())
    return f"{trials} trials: {early:.0f} MB at a tenth, {written:.0f} MB written, {read:.0f} MB all read; {spoken}"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--worker-kills", type=int, default=8)
    options.add_argument("--trials", type=int, default=20_000)
    options.add_argument("--only", default="kill,workers,disk,right,two,day")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--fake", action="store_true", help="a made-up compiler and GPU in the kill runs too")
    given = options.parse_args()
    rng, root = random.Random(given.seed), os.geteuid() == 0
    here = bool(gpu.detect_devices())
    runs = {
        "kill": ("fake" if given.fake else "real", lambda run: kill_runs(run, given.kills, rng)),
        "workers": (
            "real" if here and not given.fake else "fake",
            lambda run: worker_runs(run, given.worker_kills, rng),
        ),
        "disk": ("fake", lambda run: disk_run(run, root)),
        "right": ("fake", lambda run: right_run(run)),
        "two": ("fake", lambda run: two_runs(run)),
        "day": ("fake", lambda run: day_run(run, given.trials)),
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
