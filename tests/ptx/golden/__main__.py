"""Golden inputs and outputs of every instruction that the interpreter accepts.

    python -m tests.ptx.golden collect      # no GPU needed
    python -m tests.ptx.golden run [--all]  # on an H100

`collect` adds launches of the tests in tests/ptx to those of tests/ptx/golden/golden.bin. `run` runs those without
outputs (or all) there, twice, and prints where the interpreter differs.

After an instruction was added, and a test that launches it, run both. A launch whose outputs differ between two runs,
or that the driver refuses, is left out and named. The file has its launches whole: a test that only says what they
give may go."""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from evoattn.model.paths import ROOT
from tests.ptx.golden import file as golden_file
from tests.ptx.golden.file import Golden

TESTS = ROOT / "tests" / "ptx"

MOST_BYTES = 75_000
"""Inputs of a launch taken from the tests: a wgmma m64n96k16 with both operands in shared memory."""
ALWAYS = (
    *("wgmma.mma", "mma.sync", "wmma", "cp.async", "ldmatrix", "stmatrix", "mbarrier", "st.async", "mapa"),
    *("shfl", "vote", "match", "redux", "elect"),
)
"""Opcodes whose meaning lies in operands and descriptors too: every different kernel with one is kept, of the others
each first."""
SILENT_SECONDS = 20.0


def collect() -> None:
    """Run the tests on the interpreter; keep what adds an opcode, and every different kernel of the matrix and copy
    instructions."""
    import pytest

    from tests.ptx.golden import harness

    kept, machine = golden_file.load()
    keys, opcodes = {golden.key for golden in kept}, set[str]().union(*(golden.opcodes for golden in kept))
    seen = Counter(golden.ptx for golden in kept)
    group = ""

    def observe(*launch: Any) -> None:
        golden = Golden(f"{group}.{len(kept)}", *launch)
        # One number may be a tensor map that the test has encoded itself.
        if golden.key in keys or not all(isinstance(s, np.generic) for s in golden.scalars):
            return
        seen[golden.ptx] += 1
        new = golden.opcodes - opcodes
        special = seen[golden.ptx] <= 2 and any(o.startswith(ALWAYS) for o in golden.opcodes)
        if golden.bytes <= MOST_BYTES and (new or special) and is_right(golden):
            kept.append(golden)
            keys.add(golden.key)
            opcodes.update(golden.opcodes)

    def is_right(golden: Golden) -> bool:
        """Whether it has no fault under the race detector either, which some tests switch off, and reads no shared
        memory that nobody has written, and assembles: all else means nothing on a GPU."""
        harness.observers.remove(observe)
        try:
            results = [golden.interpreted(), golden.interpreted(poison=0x5A5A)]
        except AssertionError:
            return False
        finally:
            harness.observers.append(observe)
        return all(a.tobytes() == b.tobytes() for a, b in zip(*results)) and (
            golden.after is not None or assembles(golden)
        )

    harness.observers.append(observe)
    for path in sorted({*TESTS.glob("test_*.py")} - {TESTS / "test_golden.py"}):
        group = path.stem.removeprefix("test_")
        pytest.main(["-q", "-n0", "--hypothesis-seed=0", "-p", "no:cacheprovider", str(path)])
    golden_file.save(kept, machine)
    awaiting = sum(golden.after is None for golden in kept)
    print(
        f"{len(kept)} launches, {awaiting} of them without outputs, {len(opcodes)} opcodes, "
        f"{golden_file.FILE.stat().st_size} bytes"
    )


def assembles(golden: Golden) -> bool:
    """Whether ptxas takes the kernel."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(golden.ptx)
        done = subprocess.run(
            ["ptxas", "-arch=sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        print(f"{golden.name} is no launch: {done.stderr.splitlines()[0]}", file=sys.__stdout__)
    return done.returncode == 0


def run(everything: bool) -> int:
    """Launches without outputs, or all, on the device, in processes that may hang or die; then the file with their
    outputs, and a table of differences."""
    from evoattn.model.gpu import detect_devices

    recorded, _ = golden_file.load()
    goldens = [golden for golden in recorded if everything or golden.after is None]
    here = detect_devices()
    if not here:
        print("golden.py: there is no CUDA device here.", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        golden_file.save(goldens, {}, folder / "todo.bin")

        def done(n: int) -> bool:
            return (folder / f"{n}.npz").exists() or (folder / f"{n}.why").exists()

        first = 0
        while first < len(goldens):
            child = subprocess.Popen([sys.executable, "-m", "tests.ptx.golden", "device", str(first), name], cwd=ROOT)
            last = time.monotonic() + 40  # it starts CUDA first
            while child.poll() is None and time.monotonic() < last + SILENT_SECONDS:
                if done(first):
                    first, last = first + 1, time.monotonic()
                else:
                    time.sleep(0.01)
            child.kill()
            child.wait()
            while done(first):
                first += 1
            if first < len(goldens) and child.returncode != 3:
                (folder / f"{first}.why").write_text("it hangs, or ends the process")
                first += 1
        left_out = []
        for number, golden in enumerate(goldens):
            if (folder / f"{number}.npz").exists():
                with np.load(folder / f"{number}.npz") as found:
                    golden.after = [
                        found[f"arr_{i}"].view(a.dtype).reshape(a.shape) for i, a in enumerate(golden.before)
                    ]
            else:
                golden.after = None
                left_out.append((golden, (folder / f"{number}.why").read_text()))
    kept = [golden for golden in recorded if golden.after is not None]
    golden_file.save(kept, {"product": here[0].product, "driver": here[0].driver, "uuid": here[0].uuid})
    print(
        f"{len(goldens) - len(left_out)} of {len(goldens)} launches ran on the {here[0].product}; {len(kept)} with "
        "outputs, "
        f"{golden_file.FILE.stat().st_size} bytes in {golden_file.FILE.relative_to(ROOT)}"
    )
    for golden, why in left_out:
        print(f"left out {golden.name}: {why}; {_subject(golden)}")
    differing = 0
    for golden in kept:
        with np.errstate(all="ignore"):
            missed = golden_file.disagreements(golden, golden.interpreted())
        if missed:
            differing += 1
            values = sum(array.size for array in golden.before)
            print(f"differs {golden.name}: {missed} of {values} values; {_subject(golden)}")
    print(f"The interpreter agrees on {len(kept) - differing} of {len(kept)} launches.")
    return 0


def _subject(golden: Golden) -> str:
    """The opcodes that tell it from others: the longest few."""
    return " ".join(sorted(golden.opcodes, key=len)[-3:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("collect", help="write the launches")
    running = commands.add_parser("run", help="run them on an H100")
    running.add_argument("--all", action="store_true", help="those with outputs, too")
    process = commands.add_parser("device", help="a process of `run`: launches from the N-th on")
    process.add_argument("first", type=int, metavar="N")
    process.add_argument("folder", type=Path)
    words = parser.parse_args()
    if words.command == "run":
        return run(words.all)
    if words.command == "collect":
        collect()
    else:
        from tests.ptx.golden.device import run_from

        run_from(words.first, words.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
