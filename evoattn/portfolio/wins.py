"""Kernels that the user's own `tune` found for exact problems: kept in the data folder, asked before a portfolio."""

from __future__ import annotations

import contextlib
import fcntl
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoattn.backends.cache_folder import write_whole
from evoattn.model import forks
from evoattn.model.gpu import GpuSpec
from evoattn.model.paths import data_folder
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.space import ConfigError, KernelConfig, load_space

VERSION = 1
FILE = "wins.json"


@dataclass(frozen=True)
class Win:
    """One kernel for one problem on one kind of GPU. Times are µs per call: the kernel's, and of what ran before."""

    gpu: str
    sm_count: int
    problem: AttentionProblem
    family: str
    params: dict[str, Any]
    us: float
    before_us: float

    @property
    def key(self) -> tuple[object, ...]:
        """What must agree: the GPU and all of the problem but its memory layout, the scale, which is an argument of
        every kernel, and how many keys are in use, which a call does not know; equal masks under one name."""
        return _key(self.problem, self.gpu, self.sm_count)

    def to_row(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**self.__dict__, "problem": self.problem.to_dict()}


@dataclass(frozen=True)
class Exact:
    """A win as the op reads it: see `evoattn.portfolio.pick.Pick`."""

    family: str
    config: KernelConfig
    why: str
    estimated: bool = False
    expected_regret: float | None = None
    source: str = "exact"


def _key(problem: AttentionProblem, gpu: str, sm_count: int) -> tuple[object, ...]:
    p = problem
    mask = "causal" if p.causal and p.seqlen_q == p.seqlen_k and not p.window else p.mask
    variant = p.window, p.softcap, p.sink, p.alibi, p.bias, p.value_dim, p.shared_kv, bool(p.seqused), p.page
    return (
        gpu,
        sm_count,
        p.heads,
        p.kv_heads,
        *_lengths(p),
        p.head_dim,
        p.dtype,
        mask,
        p.lse,
        variant,
    )


def _lengths(problem: AttentionProblem) -> tuple[object, ...]:
    """Batch and lengths; of packed sequences, whose lengths change with every call, how long they get, to a power of
    two."""
    if problem.varlen:
        return "packed", problem.seqlen_q.bit_length(), problem.seqlen_k.bit_length()
    return problem.batch, problem.seqlen_q, problem.seqlen_k


class Wins:
    """The wins in a file, read again where another process has changed it. A damaged file is passed over with a
    warning.
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the user's own unless given. It need not exist."""
        self.path = path or data_folder() / FILE
        self._read_at: tuple[int, int] | None = None
        self._wins: dict[tuple[object, ...], Win] = {}
        self._unwritten: dict[tuple[object, ...], Win] = {}
        self._lock = forks.Lock()

    def find(self, problem: AttentionProblem, gpu: GpuSpec) -> Exact | None:
        """The win for this problem on this kind of GPU; None where there is none, or where today's space lacks its
        config.
        """
        with self._lock:
            self._refresh()
            key = _key(problem, gpu.name, gpu.sm_count)
            win = self._unwritten.get(key) or self._wins.get(key)
        if win is None:
            return None
        try:
            config = load_space(win.family, gpu).make_config(win.params)
        except ConfigError as error:
            warnings.warn(f"evoattn: a kernel of {self.path} is passed over: {error}", RuntimeWarning, stacklevel=2)
            return None
        return Exact(win.family, config, f"your search measured {win.us:.2f} µs, {win.before_us:.2f} µs before")

    def add(self, wins: list[Win]) -> None:
        """Keep these, in place of earlier ones for the same problems; where the file cannot be written, with a warning
        and for this process only.
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
                self._wins.update(self._unwritten | new)
                text = json.dumps({"version": VERSION, "wins": [win.to_row() for win in self._wins.values()]}, indent=1)
                return write_whole(self.path, text.encode())
        except OSError:
            return False

    def _refresh(self) -> None:
        try:
            status = self.path.stat()
            if (status.st_mtime_ns, status.st_size) == self._read_at:
                return
            text = json.loads(self.path.read_text(encoding="utf-8"))
            rows = [Win(**{**row, "problem": AttentionProblem(**row["problem"])}) for row in text["wins"]]
            self._wins = {win.key: win for win in rows}
            self._read_at = status.st_mtime_ns, status.st_size
        except FileNotFoundError:
            self._wins, self._read_at = {}, None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ProblemError) as error:
            self._wins = {}
            warnings.warn(f"evoattn: {self.path} cannot be read: {error}", RuntimeWarning, stacklevel=3)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """One writer at a time, among processes."""
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
