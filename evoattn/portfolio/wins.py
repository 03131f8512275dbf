"""What was found out on this machine, kept in the data folder: kernels that the user's own searches found for exact
problems, asked before a portfolio; and races of kernels with one another and with PyTorch's own."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from evoattn.backends import appended
from evoattn.backends.cache_folder import write_whole
from evoattn.families.registry import load_space
from evoattn.model import forks
from evoattn.model.gpu import GpuSpec
from evoattn.model.paths import data_folder
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.scales import PER_BLOCK, PER_TOKEN
from evoattn.model.space import ConfigError, KernelConfig

FILE = "wins.json"
CLEARLY = 0.985
"""A kernel replaces what runs today if it takes at most this part of its time in one interleaved run."""
VERSION = 1
"""Of the file. A later one means that this evoattn would misread rows, or spoil the file by writing it again: it is
neither read nor written. A row that only says more needs none: who cannot read it passes it over and keeps it."""


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


@dataclass(frozen=True)
class Exact:
    """A win, or a recorded kernel, as the op reads it: see `evoattn.portfolio.pick.Pick`."""

    family: str
    config: KernelConfig
    why: str
    estimated: bool = False
    expected_regret: float | None = None
    rivals: tuple[KernelConfig, ...] = ()


def _key(problem: AttentionProblem, gpu: str, sm_count: int) -> tuple[object, ...]:
    p = problem
    mask = "causal" if p.causal and p.seqlen_q == p.seqlen_k and not p.window else p.mask
    variant = p.window, p.softcap, p.sink, p.alibi, p.bias, p.score, p.predicate, p.value_dim, p.shared_kv
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


@dataclass
class _Content:
    """What a file says."""

    wins: dict[tuple[object, ...], Win] = field(default_factory=dict)
    others: list[Any] = field(default_factory=list)
    """Rows that cannot be read, of another evoattn perhaps: they are written again as they are."""
    why: str = ""
    """Why these, or all, cannot be read."""
    damaged: bool = False
    """Nothing can be made out: the file is moved aside before another one is written."""
    closed: bool = False
    """The file may be in order, but not for this process to read: nothing is written in its place."""


def _parsed(data: bytes) -> _Content:
    content = _Content()
    try:
        text = json.loads(data)
        version = text.get("version", VERSION) if isinstance(text, dict) else VERSION
        if not isinstance(version, int) or version > VERSION:
            return _Content(why=f"it is of version {version}, and this evoattn knows {VERSION}", closed=True)
        if not isinstance(text, dict) or not isinstance(text.get("wins"), list):
            raise ValueError("it has no list of wins")
    except (ValueError, RecursionError) as error:
        return _Content(why=str(error), damaged=True)
    for row in text["wins"]:
        try:
            win = Win.from_row(row)
            content.wins[win.key] = win
        except (ValueError, TypeError, AttributeError, ProblemError) as error:
            content.others.append(row)
            content.why = content.why or str(error)
    return content


class Wins:
    """The wins in a file, read again where another process has changed it. What cannot be read there is passed over
    with a warning, and not lost.
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the user's own unless given. It need not exist."""
        self.path = path or data_folder() / FILE
        self._read_at: tuple[int, int, int] | None = None
        self._content = _Content()
        self._unwritten: dict[tuple[object, ...], Win] = {}
        self._lock = forks.Lock()

    def find(self, problem: AttentionProblem, gpu: GpuSpec) -> Exact | None:
        """The win for this problem on this kind of GPU; None where there is none, or where today's space lacks its
        config.
        """
        with self._lock:
            self._refresh()
            key = _key(problem, gpu.name, gpu.sm_count)
            win = self._unwritten.get(key) or self._content.wins.get(key)
        if win is None:
            return None
        try:
            config = load_space(win.family, gpu).make_config(win.params)
        except ConfigError as error:
            warnings.warn(f"evoattn: a kernel of {self.path} is passed over: {error}", RuntimeWarning, stacklevel=2)
            return None
        before = "nothing else could be timed" if win.before_us is None else f"{win.before_us:.2f} µs before"
        return Exact(win.family, config, f"your search measured {win.us:.2f} µs, {before}")

    def add(self, wins: list[Win]) -> None:
        """Keep these, in place of earlier ones for the same problems; where the file cannot be written, with a warning
        and for this process only. A damaged file is moved aside, and a warning says where.
        """
        new = {win.key: win for win in wins}
        with self._lock:
            if self._write(new):
                self._unwritten = {}
            else:
                self._unwritten |= new
                words = f"evoattn: {self.path} cannot be written: what was found serves this process only."
                warnings.warn(words, RuntimeWarning, stacklevel=2)

    def _write(self, new: dict[tuple[object, ...], Win]) -> bool:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _held(self.path.with_suffix(".lock")):
                self._refresh()
                content = self._content
                if content.closed:
                    return False
                if content.damaged:
                    aside = f"evoattn: the {self.path} that cannot be read is kept as {_moved_aside(self.path)}."
                    warnings.warn(aside, RuntimeWarning, stacklevel=3)
                wins = content.wins | self._unwritten | new
                rows = [*content.others, *(win.to_row() for win in wins.values())]
                return write_whole(self.path, json.dumps({"version": VERSION, "wins": rows}, indent=1).encode())
        except OSError:
            return False

    def _refresh(self) -> None:
        """Read the file, unless it is the one that was read last."""
        try:
            status = self.path.stat()
            found = status.st_mtime_ns, status.st_size, status.st_ino
            if found == self._read_at:
                return
            self._content, self._read_at = _parsed(self.path.read_bytes()), found
        except FileNotFoundError:
            self._content, self._read_at = _Content(), None
        except OSError as error:  # no permission, a disk that does not answer …: it may pass
            self._content, self._read_at = _Content(why=str(error), closed=True), None
        content = self._content
        if content.why:
            several = f"{len(content.others)} of the kernels in " if content.others else ""
            words = f"evoattn: {several}{self.path} cannot be read: {content.why.rstrip('.')}."
            warnings.warn(words, RuntimeWarning, stacklevel=3)


def _moved_aside(path: Path) -> Path:
    """Where a damaged file went, beside its place. Raises `OSError`."""
    names = (path.with_name(f"{path.stem}.damaged-{number}{path.suffix}") for number in itertools.count(1))
    return path.rename(next(place for place in names if not os.path.lexists(place)))


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """One writer at a time, among processes."""
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


RACES_FILE = "races/races.jsonl"
"""In the data folder: a folder of its own, which nobody else may write."""
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
    """Times per call in µs: of kernels, the pick first, and of PyTorch's attention where it took part. Without any time
    none was raced, and the pick stays."""

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
        others = [f"{us:.1f} µs of {name}" for us, name in zip(self.us, names)]
        others.pop(self.best)
        others += [] if self.torch_us is None else [f"{self.torch_us:.1f} µs of PyTorch's"]
        return f"{self.us[self.best]:.1f} µs beside {' and '.join(others)}"


class Races:
    """The races of a file, and those of this process where it cannot be written."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the user's own unless given. It need not exist."""
        self.path = path or data_folder() / RACES_FILE
        self._mine: dict[bytes, Raced] = {}
        self._lines: dict[bytes, bytes] = {}
        self._size = -1

    def find(self, key: Key) -> Raced | None:
        """The race of `key`, in this process or, as far as its file says, another one."""
        name = appended.name_of(key)
        if name in self._mine:
            return self._mine[name]
        self._refresh()
        row = appended.parsed(name, self._lines[name]) if name in self._lines else None
        if not (isinstance(row, list) and len(row) == 2 and isinstance(row[0], list) and row[0]):
            return None
        us, torch_us = row
        if not all(isinstance(one, (int, float)) and one > 0 for one in (*us, 1 if torch_us is None else torch_us)):
            return None
        return self._mine.setdefault(name, Raced(tuple(us), torch_us))

    def add(self, key: Key, raced: Raced, lasts: bool = True) -> None:
        """Keep it, if it `lasts` on disk too, if that can be written."""
        name = appended.name_of(key)
        self._mine[name] = raced
        if lasts:
            us, torch_us = [round(one, 3) for one in raced.us], raced.torch_us
            appended.append(self.path, name, [us, torch_us and round(torch_us, 3)])

    @contextlib.contextmanager
    def turn(self, patience: float = PATIENCE) -> Iterator[None]:
        """Within it no other process that shares the file races: two at once would slow one another down. Who has
        waited so many seconds, or cannot lock the file, goes on."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(self.path.with_suffix(".lock").open("w", encoding="utf-8"))
                until = time.monotonic() + patience
                while not _locked(file) and time.monotonic() < until:
                    time.sleep(0.002)
            yield

    def _refresh(self) -> None:
        """Read the file where it has changed its size."""
        try:
            size = self.path.stat().st_size
        except OSError:
            size = -1
        if size != self._size:
            self._size, self._lines = size, appended.read(self.path)
