#!/usr/bin/env python3
"""FlashAttention's own tests on `evoattn.flash_attn`: how many pass, and how many of their calls do kernels serve?

    python -m tests.checks.flash_attention_suite FOLDER [--file hopper/test_flash_attn.py] [--count 1500] [--seed 1]
                                                 [--alike 6] [--no-gradients] [--only output,kvcache] [--seconds 540]
                                                 [--processes 10] [--json OUT]

FOLDER holds files of https://github.com/Dao-AILab/flash-attention at their places: hopper/test_flash_attn.py,
hopper/test_util.py, hopper/padding.py, and flash_attn/layers/rotary.py with flash_attn/ops/triton/rotary.py, which
rotate the references. `--file` names another file of tests, as FlashAttention 2's, with its test_util.py beside it. The
tests import einops: `pip install --target FOLDER einops` puts it there. Nothing of it is in this repository.

`evoattn.integrations.flash_attn.install()` answers their imports. Cases are drawn by the seed, as many of each function
as the others have, until `--count` of them ran; skipped ones do not count. `--alike` says how many lengths are drawn
for each draw of the other parameters, as such cases share kernels. fp8 is switched off by the suite's own switch, cases
with dropout are left out, and so are the tests of FlashAttention's C++ functions: their signatures, and that one waits
for the device to compare lengths with a page table's room. A call counts as served by kernels if
no part of it was computed by PyTorch; those of `flash_attn_combine` are PyTorch's and are not counted.

Tensors of these tests want gradients, and PyTorch then computes. `--no-gradients` leaves backward passes out, by the
suite's own switch, and runs forward passes without. `--measured` runs only kernels of kinds that were timed on this
card; without it all are allowed, as after `evoattn.enable(estimated=True)`. `--cpu` rewrites the tests for a CPU, where
PyTorch computes all of them, and leaves out the large ones. `--processes` shares the count among several, which draw by
seeds of their own and share the cache of compiled kernels: most of the time is that of compilers. Exit code 1 if a case
fails."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evoattn.backends.platform import find_platform
from evoattn.integrations.flash_attn import install, version_2, version_3
from evoattn.model.paths import cubin_cache
from evoattn.ops.call import Answer, Call
from evoattn.ops.runtime import FOLDER, Runtime, current
from evoattn.ops.torch_answer import NoKernel
from evoattn.portfolio.pick import next_picks

LEFT_OUT = ("bw_compatibility", "generator_arg_must_be_none", "block_table_bounds")
LONG = "race_condition"
"""Tests that take minutes each."""
MOST_SCORES = 1 << 13
"""Of a head of a case on a CPU."""
ROOM = 24 << 30
"""Bytes of a GPU's memory: with less than that free, processes give back what they have kept."""
DRAWN = 4
"""Cases that are drawn of a function for each that is wanted of all: many are skipped."""
COUNTED = (
    *("flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_with_kvcache"),
    *("flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"),
)


@dataclass
class Counts:
    """Of one test function."""

    passed: int = 0
    failed: int = 0
    out_of_memory: int = 0
    calls: int = 0
    by_kernels: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        for name in ("passed", "failed", "out_of_memory", "calls", "by_kernels"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons += other.reasons


class CountingRuntime(Runtime):
    """Notes why torch answered."""

    reasons: list[str]
    kernels = 0

    def attend(self, call: Call) -> Answer:
        try:
            answer = super().attend(replace(call, strict=True))
            self.kernels += 1
        except NoKernel as error:
            self.reasons.append(str(error).removeprefix("No kernel serves this call: "))
            answer = super().attend(call)
        return answer


class Suite:
    """A plugin of pytest that draws cases, and counts."""

    def __init__(self, runtime: CountingRuntime, options: argparse.Namespace) -> None:
        self.runtime, self.options = runtime, options
        self.counts: dict[str, Counts] = defaultdict(Counts)
        self.failures: list[str] = []
        self._now, self._ran, self._depth = "", 0, 0
        self._until = time.monotonic() + options.seconds

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, counting calls of the running test; one that calls another counts once."""

        @functools.wraps(function)
        def called(*arguments: Any, **words: Any) -> Any:
            if self._depth:
                return function(*arguments, **words)
            self._depth += 1
            self.runtime.reasons, kernels = [], self.runtime.kernels
            try:
                with torch.set_grad_enabled(torch.is_grad_enabled() and not self.options.no_gradients):
                    return function(*arguments, **words)
            finally:
                self._depth -= 1
                counts = self.counts[self._now]
                counts.calls += 1
                counts.by_kernels += self.runtime.kernels > kernels and not self.runtime.reasons
                counts.reasons.update(set(self.runtime.reasons))

        return called

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give a test function cases that are drawn, in place of the product of its marks: that may be 300,000."""
        name, marks = metafunc.function.__name__, list(metafunc.definition.iter_markers("parametrize"))
        if not marks or any(word in name for word in LEFT_OUT):
            return
        own = metafunc.definition.own_markers
        own[:] = [mark for mark in own if mark.name != "parametrize"]
        names = [[word.strip() for word in mark.args[0].split(",")] for mark in marks]
        values = [
            [tuple(one) if len(given) > 1 else (one,) for one in mark.args[1]]
            for given, mark in zip(names, marks, strict=True)
        ]
        if ["dropout_p"] in names:
            values[names.index(["dropout_p"])] = [(0.0,)]
        lengths = [any("seqlen_" in word or word == "seqlen" for word in some) for some in names]
        draw = random.Random(f"{self.options.seed} {name}")
        cases: dict[tuple[Any, ...], None] = {}
        kinds = DRAWN * self.options.count // self.options.alike + 1
        for _ in range(kinds):
            kind = [draw.choice(some) for some in values]
            for _ in range(self.options.alike):
                case = [draw.choice(some) if new else old for old, some, new in zip(kind, values, lengths, strict=True)]
                cases[tuple(itertools.chain.from_iterable(case))] = None
        texts = ["-".join(str(value).removeprefix("torch.") for value in case) for case in cases]
        metafunc.parametrize(list(itertools.chain.from_iterable(names)), list(cases), ids=texts)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        of: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            name = getattr(item, "originalname", item.name)
            case = getattr(item, "callspec", None)
            case = case.params if case else {}
            size = case.get("seqlen_q", 1) * case.get("seqlen_k", 1)
            size = max(size, case.get("seqlen", 1) * case.get("num_splits", 1))
            large = self.options.cpu and size > MOST_SCORES
            left_out = large or any(word in name for word in LEFT_OUT)
            if not left_out and any(word in name for word in self.options.only.split(",")):
                of[name].append(item)
        for name, some in of.items():
            del some[self.options.few if LONG in name else len(some) :]
        longest = max(map(len, of.values()), default=0)
        items[:] = [some[i] for i in range(longest) for some in of.values() if i < len(some)]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            print(report.longreprtext, flush=True)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._now = getattr(item, "originalname", item.name)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or report.skipped:
            return
        counts, said = self.counts[self._now], report.longreprtext
        if report.passed:
            counts.passed += 1
        elif "OutOfMemoryError" in said:
            counts.out_of_memory += 1
        else:
            counts.failed += 1
            lines = [line for line in said.splitlines() if line.startswith("E ")] or said.splitlines()[-1:]
            self.failures.append(f"{report.nodeid}\n    {lines[0][:300]}")
            print(self.failures[-1], flush=True)
        self._ran += 1
        if self._ran % 50 == 0:
            print(f"{self._ran} cases ran", flush=True)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < ROOM:
            torch.cuda.empty_cache()
        if self._ran + 1 >= self.options.count or time.monotonic() > self._until:
            item.session.shouldstop = "enough cases"

    def table(self) -> str:
        """What was counted, as Markdown."""
        lines = ["| test | passed | failed | out of memory | calls | by kernels |", "|---|---|---|---|---|---|"]
        for name, one in [*self.counts.items(), ("all", self.total)]:
            share = f"{one.by_kernels} ({100 * one.by_kernels / max(1, one.calls):.0f} %)"
            lines.append(f"| {name} | {one.passed} | {one.failed} | {one.out_of_memory} | {one.calls} | {share} |")
        lines += ["", "Why PyTorch computed, calls:"]
        return "\n".join([*lines, *(f"{count:6} {reason}" for reason, count in self.total.reasons.most_common(25))])

    @property
    def total(self) -> Counts:
        whole = Counts()
        for one in self.counts.values():
            whole.add(one)
        return whole

    def as_json(self) -> str:
        counts = {name: {**vars(one), "reasons": dict(one.reasons)} for name, one in self.counts.items()}
        return json.dumps({"counts": counts, "failures": self.failures}, indent=1)

    def add_json(self, text: str) -> None:
        """What another process counted."""
        found = json.loads(text)
        for name, one in found["counts"].items():
            self.counts[name].add(Counts(**{**one, "reasons": Counter(one["reasons"])}))
        self.failures += found["failures"]


def of_folder(options: argparse.Namespace) -> Path:
    """The test file, on `sys.path` what it imports; with `--cpu` a copy for a CPU in a temporary folder."""
    file: Path = (options.folder / options.file).resolve()
    folder = file.parent
    if not file.is_file():
        raise SystemExit(f"{file} is not there; see --help for what FOLDER has to hold.")
    if options.cpu:
        folder = Path(tempfile.mkdtemp(prefix="flash-attention-tests-"))
        for one in file.parent.glob("*.py"):
            text = one.read_text().replace('device = "cuda"', 'device = "cpu"')
            (folder / one.name).write_text(text.replace('torch.cuda.get_device_capability("cuda")', "(9, 0)"))
    sys.path[:0] = [str(folder), str(options.folder.resolve())]
    return folder / file.name


def prepared(suite: Suite, options: argparse.Namespace) -> None:
    """Modules under FlashAttention's names, with functions that count; the rest of the package is FOLDER's."""
    os.environ["FLASH_ATTENTION_DISABLE_FP8"] = "TRUE"
    if options.no_gradients:
        os.environ["FLASH_ATTENTION_DISABLE_BACKWARD"] = "TRUE"
    for module in (version_2, version_3):
        for name in COUNTED:
            if hasattr(module, name):
                setattr(module, name, suite.counted(getattr(module, name)))
    install(replace=True)
    package, interface = sys.modules["flash_attn"], sys.modules["flash_attn.flash_attn_interface"]
    package.__path__ = [str(options.folder.resolve() / "flash_attn")]
    vars(interface).update(_get_block_size_n=None, USE_TRITON_ROCM=False)  # of dropout's patterns, and of AMD


def options_of(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--file", default="hopper/test_flash_attn.py")
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alike", type=int, default=1)
    parser.add_argument("--few", type=int, default=2, help="cases of the tests that take minutes each")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--only", default="", help="parts of test functions' names")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    for flag in ("--no-gradients", "--measured", "--cpu"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_args(words)


def in_processes(suite: Suite, words: list[str], options: argparse.Namespace) -> None:
    """Run the suite in several processes, and add up what they counted."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number in range(options.processes):
            few = ["--few", str(options.few if number == 0 else 0)]
            mine = [*few, "--seed", str(options.seed * 1000 + number), "--json", f"{folder}/{number}.json"]
            mine += ["--count", str(-(-options.count // options.processes)), "--processes", "1"]
            running.append(subprocess.Popen([sys.executable, "-m", __spec__.name, *words, *mine]))
        for number, one in enumerate(running):
            status, counted = one.wait(), Path(folder, f"{number}.json")
            if counted.exists():
                suite.add_json(counted.read_text())
            else:
                suite.failures.append(f"process {number} ended with {status} and counted nothing")


def in_this_process(suite: Suite, options: argparse.Namespace) -> None:
    file = of_folder(options)
    prepared(suite, options)
    flags = ["-p", "no:cacheprovider", "-p", "no:terminal", "-c", os.devnull]
    with current.use(suite.runtime):
        pytest.main([str(file), "--rootdir", str(file.parent), *flags], plugins=[suite])


def main(words: list[str]) -> int:
    options = options_of(words)
    alone = options.processes == 1
    platform = find_platform() if alone and torch.cuda.is_available() else None
    runtime = CountingRuntime(platform, current.best_known, cubin_cache() / FOLDER, others=next_picks)
    runtime.estimated, runtime.reasons = not options.measured, []
    suite = Suite(runtime, options)
    if alone:
        in_this_process(suite, options)
    else:
        in_processes(suite, words, options)
        print("\n".join(suite.failures))
    print(suite.table())
    if options.json:
        options.json.write_text(suite.as_json())
    if not suite.counts:
        print("No case ran.")
    return int(not suite.counts or len(suite.failures) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
