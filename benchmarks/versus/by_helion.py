"""Helion's autotuner on attention written in Helion.

    python -m benchmarks.versus.by_helion PROBLEM --seconds 60 [--effort quick] -o FOUND.json

Needs `helion` and a CUDA device.
"""

from __future__ import annotations

import time

STARTED = time.time()

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from benchmarks.versus.found import Found, Tried


def tried(trace: Iterable[str], started: float) -> list[Tried]:
    """What Helion's trace (`HELION_AUTOTUNE_LOG_DETAILS`) says of each candidate; `started` is an epoch."""
    events = [json.loads(line) for line in trace]
    return [
        Tried(
            event["timestamp_s"] - started,
            event["perf_ms"] * 1e3 if event["status"] == "ok" and event["perf_ms"] is not None else None,
            event["config"],
        )
        for event in events
        if event["event"] == "trial"
    ]


def out_of_time(number: int, frame: object) -> None:
    """A handler of SIGTERM."""
    raise TimeoutError("ended from outside")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem")
    parser.add_argument("--seconds", type=float, default=60.0, help="from the start of this process")
    parser.add_argument("--effort", choices=["quick", "full"], default="quick")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Read when helion is imported. Without a cache, or a second run would find the first one's answer.
        os.environ |= {
            "HELION_AUTOTUNE_LOG": f"{folder}/log",
            "HELION_AUTOTUNE_LOG_DETAILS": "1",
            "HELION_CACHE_DIR": folder,
            "TRITON_CACHE_DIR": folder,
            "HELION_AUTOTUNE_EFFORT": options.effort,
            "HELION_AUTOTUNE_PROGRESS_BAR": "0",
        }
        from benchmarks.versus.helion_attention import kernel_of
        from evoattn.correctness.reference import make_inputs
        from evoattn.model.named_problems import by_name_or_shape

        problem = by_name_or_shape(options.problem)
        tensors = make_inputs(problem, 0, "cuda")
        bound = kernel_of(problem.mask).bind((tensors["q"], tensors["k"], tensors["v"]))
        bound.settings.autotune_budget_seconds = max(1, round(options.seconds - (time.time() - STARTED)))
        signal.signal(signal.SIGTERM, out_of_time)
        try:
            bound.autotune((tensors["q"], tensors["k"], tensors["v"]))
        except Exception as error:  # what it tried until then counts
            print(f"Helion ended with {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
        with Path(f"{folder}/log.trace.jsonl").open() as trace:
            found = Found(f"Helion {version('helion')}", "helion", options.problem, tried(trace, STARTED))
        found.write(options.output)


if __name__ == "__main__":
    main()
