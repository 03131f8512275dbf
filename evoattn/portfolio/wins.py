"""What was found out on this machine, kept in the data folder: kernels that the user's own searches found for exact
problems, asked before a portfolio; and races of kernels with one another and with PyTorch's own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from evoattn.backends import appended
from evoattn.backends.cache_folder import make_folder
from evoattn.families.registry import load_space
from evoattn.model import forks
from evoattn.model.gpu import GpuSpec
from evoattn.model.paths import data_folder
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.scales import PER_BLOCK, PER_TOKEN
from evoattn.model.space import ConfigError
from evoattn.portfolio.pick import Pick

FOLDER = "kept"
"""In the data folder: one of its own, which nobody else may write."""
FILE, RACES_FILE = f"{FOLDER}/wins.jsonl", f"{FOLDER}/races.jsonl"
OLD_FILE = "wins.json"
"""What `FILE` was until November 2026, one JSON text in the data folder: its wins are taken over once."""
MOST_BYTES = 64 << 20
"""Of wins: some 80,000."""
CLEARLY = 0.985
"""A kernel replaces what runs today if it takes at most this part of its time in one interleaved run."""


@dataclass(frozen=True)
class Win:
    """One kernel for one problem on one kind of GPU. Times are µs per call: the kernel's, and of what ran before, None
    where that could not be timed."""

    gpu: str
    sm_count: int
    problem: AttentionProblem
    family: str
    params: dict[str, Any]
    us: float
    before_us: float | None

    @property
    def key(self) -> tuple[object, ...]:
        """What must agree: the GPU and all of the problem but its memory layout, the scale, which is an argument of
        every kernel, and how many keys are in use, which a call does not know; equal masks under one name."""
        return _key(self.problem, self.gpu, self.sm_count)

    @classmethod
    def from_row(cls, row: Any) -> Win:
        """Of what `to_row` gave. Raises `ValueError`, `TypeError` or `ProblemError` where the row says something else,
        or more than this evoattn knows."""
        if not isinstance(row, dict) or not isinstance(row.get("problem"), dict):
            raise ValueError("a row has no problem")
        win = cls(**{**row, "problem": AttentionProblem(**row["problem"])})
        if not isinstance(win.params, dict):
            raise ValueError(f"params are no table: {win.params!r}")
        if not isinstance(win.family, str):
            raise ValueError(f"the family is no name: {win.family!r}")
        for us in (win.us, 0.0 if win.before_us is None else win.before_us):
            if not isinstance(us, (int, float)):
                raise ValueError(f"a time is no number: {us!r}")
        return win

    def to_row(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**self.__dict__, "problem": self.problem.to_dict()}


def _key(problem: AttentionProblem, gpu: str, sm_count: int) -> tuple[object, ...]:
    p = problem
    mask = "causal" if p.causal and p.seqlen_q == p.seqlen_k and not p.window else p.mask
    variant = p.window, float(p.softcap), p.sink, p.alibi, p.bias, p.score, p.predicate, p.value_dim, p.shared_kv
    scales = p.scales if p.scales in (PER_TOKEN, PER_BLOCK) else ""  # those of heads are a tensor's with other strides
    keys = bool(p.seqused), p.page, p.appended, p.blocks, p.rotary_apart, p.kv, scales, p.turned
    of = p.op, p.grads, p.deterministic, p.batch_invariant
    return (gpu, sm_count, p.heads, p.kv_heads, *_lengths(p), p.head_dim, p.dtype, mask, p.lse, variant, keys, of)


def _lengths(problem: AttentionProblem) -> tuple[object, ...]:
    """Batch and lengths; of packed sequences, whose lengths change with every call, how long they get, to a power of
    two."""
    if problem.varlen:
        return "packed", problem.seqlen_q.bit_length(), problem.seqlen_k.bit_length()
    return problem.batch, problem.seqlen_q, problem.seqlen_k


class Wins:
    """The wins of a file, which other processes add to."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the user's own unless given. It need not exist."""
        self.path = path or data_folder() / FILE
        self._lines = appended.Lines(self.path, MOST_BYTES)
        self._lock = forks.Lock()
        if path is None and not self.path.exists():
            self._take_over(data_folder() / OLD_FILE)

    def _take_over(self, old: Path) -> None:
        """Keep the wins of the file of before, as far as they can be read."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            for row in json.loads(old.read_bytes())["wins"]:
                with contextlib.suppress(ValueError, TypeError, AttributeError, ProblemError):
                    win = Win.from_row(row)
                    self._lines.add(win.key, win.to_row())

    def find(self, problem: AttentionProblem, gpu: GpuSpec) -> Pick | None:
        """The win for this problem on this kind of GPU; None where there is none, and, with a warning, where today's
        space lacks its config or a later evoattn has said more than this one knows."""
        with self._lock:
            row = self._lines.get(_key(problem, gpu.name, gpu.sm_count))
        if row is None:
            return None
        try:
            win = Win.from_row(row)
            config = load_space(win.family, gpu).make_config(win.params)
        except (ConfigError, ProblemError, ValueError, TypeError, KeyError) as error:
            warnings.warn(f"evoattn: a kernel of {self.path} is passed over: {error}", RuntimeWarning, stacklevel=2)
            return None
        before = "nothing else could be timed" if win.before_us is None else f"{win.before_us:.2f} µs before"
        return Pick(win.family, config, f"your search measured {win.us:.2f} µs, {before}")

    def add(self, wins: list[Win]) -> None:
        """Keep these, in place of earlier ones for the same problems; where the file cannot be written, with a warning,
        for this process, and with the next ones."""
        with self._lock:
            written = [self._lines.add(win.key, win.to_row()) for win in wins]
        if not all(written):
            words = f"evoattn: {self.path} cannot be written: what was found serves this process only."
            warnings.warn(words, RuntimeWarning, stacklevel=2)


FASTER = 0.98
"""A kernel runs in place of PyTorch, or of the pick, if it takes at most this part of its time: less is within what a
race can tell."""

PATIENCE = 2.0
"""Seconds: a race takes 30 ms, and what PyTorch loads at first use."""

Key = tuple[object, ...]


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class Raced:
    """Times per call in µs: of kernels, the pick first, infinite of those that took no part, and of PyTorch's attention
    where it did. Without any time none was raced, and the pick stays."""

    us: tuple[float, ...]
    torch_us: float | None = None

    @property
    def best(self) -> int:
        """Of the kernels: the pick, unless another is clearly faster."""
        least = min(self.us, default=0.0)
        return self.us.index(least) if self.us and least <= FASTER * self.us[0] else 0

    @property
    def won(self) -> bool:
        """Whether a kernel runs."""
        return self.torch_us is None or self.us[self.best] <= FASTER * self.torch_us

    def words(self, names: Sequence[str]) -> str:
        """The time of the best of the kernels of these names, and those of the others."""
        timed = [(us, name) for us, name in zip(self.us, names) if us < math.inf and name != names[self.best]]
        others = [f"{us:.1f} µs of {name}" for us, name in timed]
        others += [] if self.torch_us is None else [f"{self.torch_us:.1f} µs of PyTorch's"]
        return f"{self.us[self.best]:.1f} µs beside {' and '.join(others)}"


class Races:
    """The races of a file, and those of this process."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the user's own unless given. It need not exist."""
        self.path = path or data_folder() / RACES_FILE
        self._lines = appended.Lines(self.path)
        self._known: dict[Key, Raced] = {}

    def find(self, key: Key) -> Raced | None:
        """The race of `key`, in this process or, as far as its file says, another one."""
        if key not in self._known and (row := self._lines.get(key)):
            with contextlib.suppress(TypeError, ValueError):  # a later evoattn may say it otherwise
                us, torch_us = row
                self._known[key] = Raced(tuple(map(float, us)), None if torch_us is None else float(torch_us))
        return self._known.get(key)

    def add(self, key: Key, raced: Raced, lasts: bool = True) -> None:
        """Keep it, if it `lasts` on disk too, if that can be written."""
        self._known[key] = raced
        if lasts:
            us, torch_us = [round(one, 3) for one in raced.us], raced.torch_us
            self._lines.add(key, [us, torch_us and round(torch_us, 3)])

    @contextlib.contextmanager
    def turn(self, patience: float = PATIENCE) -> Iterator[None]:
        """Within it no other process that shares the file races: two at once would slow one another down. Who has
        waited so many seconds, or cannot lock the file, goes on."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                make_folder(self.path.parent)
                file = stack.enter_context(self.path.with_suffix(".lock").open("w", encoding="utf-8"))
                until = time.monotonic() + patience
                while not _locked(file) and time.monotonic() < until:
                    time.sleep(0.002)
            yield
