"""A device's small cases, run one behind the other in memory that is made once for all candidates."""

import math
import time
from collections.abc import Sequence

import torch

from evoattn.backends.base import QueuedBackend
from evoattn.correctness.arena import BANDS, Arena, Layout, unwritten
from evoattn.correctness.cases import Case
from evoattn.correctness.reference import Exact, first
from evoattn.correctness.validate import output_layouts, run_case
from evoattn.families.built import BuiltKernel
from evoattn.model.records import CheckResult


class _Rows:
    """One output of all cases as a row each, padded to the longest: where its elements lie, and the exact values. What
    is NaN there is not the kernel's to write (`Exact.partial`), or has to be NaN."""

    def __init__(self, arena: Arena, names: Sequence[str], answers: Sequence[Exact]) -> None:
        exact = [answer.values for answer in answers]
        self.dtype = arena.views[names[0]].dtype
        longest, device = max(e.numel() for e in exact), arena.whole.device
        self.places = torch.zeros(len(names), longest, dtype=torch.int64, device=device)
        self.exact = torch.zeros(len(names), longest, dtype=exact[0].dtype, device=device)
        self.valid = torch.zeros(len(names), longest, dtype=torch.bool, device=device)
        self.left, self.nowhere = torch.zeros_like(self.valid), torch.zeros_like(self.valid)
        for i, (name, values) in enumerate(zip(names, exact, strict=True)):
            flat, view, count = arena.buffers[name], arena.views[name], values.numel()
            first = int(flat.storage_offset())
            elements = torch.arange(first, first + flat.numel(), device=device)
            self.places[i, :count] = elements.as_strided(view.shape, view.stride()).flatten()
            nan = values.flatten().isnan()
            (self.left if answers[i].partial else self.nowhere)[i, :count] = nan
            self.exact[i, :count] = values.flatten().nan_to_num(0, math.inf, -math.inf)
            self.valid[i, :count] = ~nan
        self.counts = torch.tensor([values.numel() for values in exact], dtype=torch.float64, device=device)

    @property
    def tables(self) -> list[torch.Tensor]:
        """All that a verdict rests on."""
        return [self.places, self.exact, self.valid, self.left, self.nowhere, self.counts]

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The rows out of the arena's bytes."""
        size = self.dtype.itemsize
        return memory[: len(memory) // size * size].view(self.dtype)[self.places]

    def spoilt(self, rows: torch.Tensor) -> torch.Tensor:
        """How many elements of each row were never written, or are NaN or no NaN, or were not to be written."""
        never, nan = unwritten(rows), rows.isnan()
        wrong = ((never | nan) & self.valid) | (~never & self.left) | ((never | ~nan) & self.nowhere)
        return wrong.sum(1).double()

    def errors(self, rows: torch.Tensor) -> torch.Tensor:
        """Of each row the largest error and the root of the mean square, `[2, rows]`; NaN where an element is."""
        difference = torch.where(self.valid, rows.to(self.exact.dtype) - self.exact, 0)
        rms = (difference.double().square().sum(1) / self.counts).sqrt()
        return torch.stack([difference.abs().amax(1).double(), rms])

    def sum_errors(self, rows: torch.Tensor) -> torch.Tensor:
        """For log-sum-exps: how many are -inf in the wrong place, and the largest error of the others, `[2, rows]`."""
        unseen = self.exact == -math.inf
        misplaced = (((rows == -math.inf) != unseen) & self.valid).sum(1).double()
        difference = torch.where(self.valid & ~unseen, rows.double() - self.exact, 0)
        return torch.stack([misplaced, difference.abs().amax(1)])


class Ladder:
    """The cases in one arena. A candidate's launches for all of them are enqueued, then all is judged together, as
    `validate.run_case` judges one case.

    Only where something is wrong are the cases run one by one, to say what it is."""

    def __init__(self, cases: Sequence[Case], device: torch.device) -> None:
        self.cases, self._device = tuple(cases), device
        inputs, outputs, changed = dict[str, torch.Tensor](), dict[str, Layout](), dict[str, torch.Tensor]()
        for i, case in enumerate(self.cases):
            inputs |= {_key(i, name): tensor for name, tensor in case.tensors.items()}
            outputs |= {_key(i, name): layout for name, layout in output_layouts(case.problem).items()}
            changed |= {_key(i, name): tensor for name, tensor in case.changed().items()}
        self._arena = Arena(inputs, outputs, {}, device, changed)
        self._images, self._after = [], []  # before a run, and what must be so after it
        for band in BANDS:
            self._arena.arm(band)
            self._images.append(self._arena.whole.clone())
            self._arena.settle()
            self._after.append(self._arena.whole.clone() if changed else self._images[-1])
        self._written = torch.zeros_like(self._arena.whole, dtype=torch.bool)
        for name in outputs:
            flat = self._arena.buffers[name].view(torch.uint8)
            self._written[flat.storage_offset() : flat.storage_offset() + len(flat)] = True
        numbers = range(len(self.cases))
        self._rows = {
            name: (
                _Rows(self._arena, [_key(i, name) for i in numbers], [c.answer[name] for c in self.cases]),
                [c.answer[name] for c in self.cases],
            )
            for name in self.cases[0].answer
        }

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What no kernel is handed and the verdicts rest on."""
        tables = [tensor for rows, _ in self._rows.values() for tensor in rows.tables]
        return [*self._images, *self._after, self._written, *tables]

    def climb(self, backend: QueuedBackend, kernel: BuiltKernel) -> tuple[CheckResult, ...]:
        """What was found in each case, up to the first that is not passed. Each case runs twice, as `run_case` does
        with `repeat`. Outputs whose bits may differ from run to run are judged in both. Raises `LaunchError` or
        `ContextLost`."""
        started = time.perf_counter()
        errors = self._errors_of_all(backend, kernel)
        if errors:
            seconds = (time.perf_counter() - started) / len(self.cases)
            return tuple(
                CheckResult(case.name, True, error, first(case.answer).allowed_error, "", seconds)
                for case, error in zip(self.cases, errors, strict=True)
            )
        results: list[CheckResult] = []
        for case in self.cases:
            results.append(run_case(backend, kernel, case, repeat=True)[0])
            if not results[-1].passed:
                return tuple(results)
        reason = (
            "The small cases are right one by one, and not when they run one behind the other: a race, or a kernel "
            "that remembers its launches."
        )
        results[-1] = CheckResult(results[-1].case, False, math.nan, results[-1].allowed_error, reason)
        return tuple(results)

    def _repeated(self, unordered: Sequence[str]) -> torch.Tensor:
        """Bool of all bytes: those that a kernel writes and that are the same in every run."""
        if not unordered:
            return self._written
        repeated = self._written.clone()
        for i in range(len(self.cases)):
            for name in unordered:
                flat = self._arena.buffers[_key(i, name)].view(torch.uint8)
                repeated[flat.storage_offset() : flat.storage_offset() + len(flat)] = False
        return repeated

    def _errors_of_all(self, backend: QueuedBackend, kernel: BuiltKernel) -> list[float]:
        """The largest error of each case if all is right, else nothing."""
        own = [kernel.workspace(case.problem) for case in self.cases]
        scratch = Arena(
            {}, {}, {_key(i, n): size for i, one in enumerate(own) for n, size in one.items()}, self._device
        )
        calls = []
        for i, case in enumerate(self.cases):
            names = (*case.tensors, *output_layouts(case.problem))
            buffers = {name: self._arena.buffers[_key(i, name)] for name in names}
            buffers |= {name: scratch.buffers[_key(i, name)] for name in own[i]}
            calls.append(backend.prepare(kernel.compiled, kernel.launches(case.problem), buffers))
        runs, faults = [], []
        # In the other direction the second time, so that a kernel that does other work in every second launch is seen.
        for band, image, after, queued in zip(BANDS, self._images, self._after, (calls, calls[::-1]), strict=True):
            self._arena.whole.copy_(image)
            scratch.arm(band)
            for call in queued:
                call()
            backend.synchronize()
            runs.append(self._arena.whole.clone())
            faults.append(((runs[-1] != after) & ~self._written).sum())
            if scratch.buffers:
                faults += [scratch.changed_bands(), *scratch.dirty_zeros()]
        unordered = sorted({name for case in self.cases for name in kernel.unordered(case.problem)})
        faults.append(((runs[0] != runs[1]) & self._repeated(unordered)).sum())
        found, limits = [torch.stack(faults).double()], [0.0] * len(faults)
        judged = [(name, runs[0]) for name in self._rows] + [(name, runs[1]) for name in unordered]
        for name, run in judged:
            rows, exact = self._rows[name]
            values, none = rows.of(run), [0.0] * len(exact)
            errors = rows.sum_errors(values).flip(0) if exact[0].logarithms else rows.errors(values)
            found += [errors.flatten(), rows.spoilt(values)]
            limits += [one.allowed_error for one in exact]
            limits += none if exact[0].logarithms else [one.allowed_rms for one in exact]
            limits += none
        numbers: list[float] = torch.cat(found).tolist()
        right = all(number <= limit for number, limit in zip(numbers, limits, strict=True))
        return numbers[len(faults) :][: len(self.cases)] if right else []


def _key(case: int, name: str) -> str:
    """A buffer's name among those of all cases. Its end stays: `starts_zeroed` reads it."""
    return f"{case} {name}"
