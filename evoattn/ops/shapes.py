"""What a model asks of attention: recorded while it runs (`evoattn.capture`), kept as JSON, searched by
`evoattn.tune`."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from evoattn.model import forks
from evoattn.model.blocks import Blocks
from evoattn.model.errors import WrongUse
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.shape_text import by_name_or_shape
from evoattn.model.whole_file import write_file
from evoattn.ops.arguments import WATCHED, has_autocast, is_ordinary
from evoattn.ops.call import NOT_STRIDED, Answer, Call, StridedProblem, out_like
from evoattn.ops.gradients import expected, why_not_differentiable

VERSION = 1
TIMED_CALLS = 64
"""Of one problem: enough for a mean, few enough to keep events for."""

Span = tuple[torch.cuda.Event, torch.cuda.Event]
Given = TypeVar("Given", bound=Answer)


class ShapesError(WrongUse):
    """A file of shapes that cannot be read: its message is one sentence."""


NOTHING = (
    "No call of attention was seen: neither SDPA by its name in torch.nn.functional nor evoattn.attention. Layers of "
    "torch.nn call SDPA in eval() after torch.backends.mha.set_fastpath_enabled(False) alone."
)


def _calls(count: int) -> str:
    """E.g. `     2 calls`."""
    return f"{count:6d} call{'s' * (count != 1)}"


@dataclass
class Asked:
    """One problem: how often it was asked for, and the median device time of a call in µs (0 where none was timed): the
    first call of a kernel may wait for its compilation."""

    problem: AttentionProblem
    count: int = 0
    us: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def settle(self) -> None:
        """Turn recorded events into a median; waits for all of them, which may be of several streams."""
        if self.spans:
            for _, end in self.spans:
                end.synchronize()
            times = sorted(begin.elapsed_time(end) for begin, end in self.spans)
            self.us = 1e3 * times[(len(times) - 1) // 2]
            self.spans = []


Wanted = Iterable[AttentionProblem | str] | AttentionProblem | str
"""Problems, their names or shapes as on the command line; or one of them."""


def problems_of(wanted: Wanted) -> list[AttentionProblem]:
    """The problems themselves. Raises `ProblemError` for an unknown name or shape, and for what is neither."""
    several = wanted if isinstance(wanted, Iterable) and not isinstance(wanted, str) else [wanted]
    problems = [by_name_or_shape(one) if isinstance(one, str) else one for one in several]
    for one in problems:
        if not isinstance(one, AttentionProblem):
            raise ProblemError(
                "Shapes are what `evoattn.capture` recorded, or AttentionProblems, names or shapes as text, not "
                f"{type(one).__name__}."
            )
    return problems


def _entry(number: int, row: Any) -> tuple[AttentionProblem, int, float]:
    """Problem, calls and µs of one entry of a file, which a person may have written. Raises `ValueError`."""
    where = f"entry {number}"
    if not isinstance(row, dict) or not isinstance(problem := row.get("problem"), dict | str):
        raise ValueError(f"{where} has no `problem`, as fields or as the text of a name or a shape")
    calls, us = row.get("calls", 1), row.get("us", 0)
    if type(calls) is not int or calls < 1:
        raise ValueError(f"{where} has calls={calls!r}, which is no whole number of at least 1")
    if type(us) not in (int, float) or not 0 <= us < math.inf:
        raise ValueError(f"{where} has us={us!r}, which is no time")
    if isinstance(problem, str):
        return by_name_or_shape(problem), calls, us
    known = AttentionProblem.__dataclass_fields__
    if unknown := [name for name in problem if name not in known]:
        raise ValueError(f"{where} has a problem with {unknown[0]!r}, which no problem has")
    if missing := [name for name, f in known.items() if f.default is MISSING and name not in problem]:
        raise ValueError(f"{where} has a problem without {', '.join(missing)}")
    return AttentionProblem(**problem), calls, us


class Shapes:
    """The problems that were asked for. Iterating gives the problems, those that take the most time first."""

    def __init__(self) -> None:
        self.missed: dict[str, int] = {}
        """Calls that no kernel could serve whatever its config, by reason."""
        self._asked: dict[tuple[object, ...], Asked] = {}
        self._lock = forks.Lock()

    def add(self, problem: AttentionProblem, count: int = 1, us: float = 0.0) -> Asked:
        """Count calls of a problem."""
        key = tuple(problem.to_dict().items())
        with self._lock:
            entry = self._asked.setdefault(key, Asked(problem))
            entry.count += count
            entry.us = us or entry.us
        return entry

    def miss(self, reason: str) -> None:
        """Count a call that no kernel could serve."""
        with self._lock:
            self.missed[reason] = self.missed.get(reason, 0) + 1

    @property
    def entries(self) -> list[Asked]:
        """By time, most first; by number of calls where nothing was timed."""
        for entry in self._asked.values():
            entry.settle()
        return sorted(self._asked.values(), key=lambda entry: (entry.count * entry.us, entry.count), reverse=True)

    def __iter__(self) -> Iterator[AttentionProblem]:
        return iter([entry.problem for entry in self.entries])

    def __repr__(self) -> str:
        calls = sum(entry.count for entry in self._asked.values())
        return f"Shapes(problems={len(self)}, calls={calls}, missed={sum(self.missed.values())})"

    def __len__(self) -> int:
        return len(self._asked)

    def share(self, entry: Asked) -> float:
        """Of all timed attention, between 0 and 1; 0 where nothing was timed."""
        total = sum(one.count * one.us for one in self.entries)
        return entry.count * entry.us / total if total else 0.0

    def describe(self) -> str:
        """A line for each problem: calls, share of the time and time of a call where they were timed, the shape."""
        if not (self._asked or self.missed):
            return NOTHING
        lines = []
        for entry in self.entries:
            time = f"{100 * self.share(entry):5.1f} % {entry.us:9.1f} µs" if entry.us else "not timed"
            lines.append(f"{_calls(entry.count)}  {time}  {entry.problem.describe()}")
        lines += [f"{_calls(count)} that no kernel serves: {why}" for why, count in self.missed.items()]
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write a JSON file that `load` reads and people can edit. Raises `OSError`, and leaves what was there then."""
        rows = [
            {"problem": e.problem.to_dict(), "calls": e.count, "us": round(e.us, 3), "share": round(self.share(e), 4)}
            for e in self.entries
        ]
        text = json.dumps({"version": VERSION, "shapes": rows, "missed": self.missed}, indent=1)
        write_file(Path(path), text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Shapes:
        """Raises `ShapesError` where the file cannot be read or says something else."""
        shapes = cls()
        try:
            text = json.loads(Path(path).read_text(encoding="utf-8"))
            if isinstance(text, dict) and text.get("version", VERSION) != VERSION:
                raise ValueError(f"it is of version {text['version']!r}, and this evoattn reads {VERSION}")
            if not isinstance(text, dict) or "shapes" not in text:
                raise ValueError("it has no `shapes`; `evoattn.capture` in Python records them and `save` writes them")
            if not isinstance(text["shapes"], list):
                raise ValueError("its `shapes` are no list")
            for number, row in enumerate(text["shapes"], 1):
                shapes.add(*_entry(number, row))
            shapes.missed = {str(why): int(count) for why, count in text.get("missed", {}).items()}
        except OSError as error:
            raise ShapesError(f"The shapes in {path} cannot be read: {error.strerror}.") from None
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, ProblemError) as error:
            raise ShapesError(f"The shapes in {path} cannot be read: {str(error).rstrip('.')}.") from None
        return shapes


_blocks = Blocks[Shapes | None]("evoattn.capture")
"""None: calls are not written down, as they are parts of one that was."""


is_recording: Callable[[], object] = _blocks.innermost
"""Something if calls may be added to something here, else None: every call asks, and a function of its own costs."""


def recorders() -> list[Shapes]:
    """What calls are added to here; empty outside of all blocks, and while code is compiled."""
    if torch.compiler.is_compiling() or not is_recording():
        return []
    return [one for one in takewhile(lambda one: one is not None, _blocks.values()) if one is not None]


def recording(shapes: Shapes) -> contextlib.AbstractContextManager[None]:
    """Calls inside of the block are added to `shapes`."""
    return _blocks.entered(shapes)


def paused() -> contextlib.AbstractContextManager[None]:
    """Calls inside of the block are not written down: they are parts of one that was."""
    return _blocks.entered(None)


def miss(reason: str) -> None:
    """Write down a call that no kernel could serve."""
    for shapes in recorders():
        shapes.miss(reason)


def _problems(call: Call) -> list[StridedProblem | str]:
    """As `Call.problem`, in the dtype that autocast gives; of a call that wants gradients both passes."""
    query, key, value = call.query, call.key, call.value
    if not is_ordinary(query, key, value):
        return [WATCHED]
    wanted = call.wants_gradients
    if wanted and (reason := why_not_differentiable(call)):
        return [reason]
    given = expected(call) if wanted else None
    kind = query.device.type
    if has_autocast(kind) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (torch.empty_like(t, dtype=dtype, device="meta") for t in (query, key, value))
        call = replace(call, query=query, key=key, value=value)
    out = out_like(query, value, "meta")
    if given is None:
        return [call.problem(out.stride())]
    forward = replace(call, return_lse=True).problem(out.stride())
    return [forward] if isinstance(forward, str) else [forward, replace(given, call=replace(call, out=out)).problem()]


class Recorded:
    """A call that is written down, with its time on a GPU by CUDA events."""

    def __init__(self, call: Call) -> None:
        """`spans`: where times of the forward pass go, and of the backward pass."""
        self._call = call
        self._spans: tuple[list[list[Span]], ...] = [], []
        try:
            problems = _problems(call)
        except RuntimeError:  # nested or sparse tensors, which the call itself may take
            problems = [NOT_STRIDED]
        for shapes in recorders():
            for problem, timed in zip(problems, self._spans, strict=False):
                if isinstance(problem, str):
                    shapes.miss(problem)
                    continue
                entry = shapes.add(problem.as_searched)
                if len(entry.spans) < TIMED_CALLS:
                    timed.append(entry.spans)

    def _timed(self, spans: list[list[Span]]) -> tuple[Callable[..., None], Callable[..., None]]:
        """What is to be called at the begin and at the end of what takes these times."""
        device = self._call.query.device
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def ended(*_: object) -> None:
            end.record(torch.cuda.current_stream(device))
            for one in spans:
                one.append((begin, end))

        return lambda *_: begin.record(torch.cuda.current_stream(device)), ended

    def of(self, compute: Callable[[], Given]) -> Given:
        """What `compute` returns: the answer to the call."""
        query = self._call.query
        forward, backward = self._spans
        if not forward or not query.is_cuda or torch.cuda.is_current_stream_capturing():
            return compute()
        begin, end = self._timed(forward)
        begin()
        answer = compute()
        end()
        out = answer if isinstance(answer, Tensor) else answer[0]
        if backward and out.requires_grad:  # from the answer's gradient to that of the first input that has one
            first = next((t for t in (query, self._call.key, self._call.value) if t.requires_grad), None)
            if first is not None:
                watch(out, first, *self._timed(backward))
        return answer


def watch(out: Tensor, given: Tensor, begin: Callable[..., None], end: Callable[..., None]) -> None:
    """Have autograd call `begin` when it has the gradient of `out`, then, once, `end` when it has that of `given`."""
    handles: list[Any] = []

    def ended(gradient: Tensor) -> None:
        end()
        handles.pop().remove()

    def begun(gradient: Tensor) -> None:
        begin()
        handles.append(given.register_hook(ended))

    out.register_hook(begun)


def recorded_call(call: Call, compute: Callable[[], Given]) -> Given:
    """The answer to a call, by `compute`, which is written down."""
    if not all(isinstance(tensor, Tensor) for tensor in (call.query, call.key, call.value)):
        return compute()
    return Recorded(call).of(compute)
