"""Whether a contestant does the same work when it is timed."""

from collections.abc import Collection

import torch

from evoattn.correctness.arena import Arena, bits, unwritten
from evoattn.correctness.judge import order_error


class ReplayWatch:
    """Watches the timed replays of one contestant, a kernel or a peer, and says which did wrong (`fault`).

    Restores inputs and poisons outputs before each replay; compares both after it, without synchronising.

    The comparison is bit for bit, but of outputs that are `unordered` (`Family.unordered`). Its counts stay on the
    device until `fault` reads them."""

    def __init__(self, arena: Arena, expected: dict[str, torch.Tensor] | None, unordered: Collection[str] = ()) -> None:
        """`expected`: the validated outputs for the arena's inputs, by name; None for a contestant that writes
        elsewhere."""
        self._arena, self.expected, self._unordered = arena, expected, unordered
        self._outputs = [(name, bits(out)) for name, out in arena.outputs.items()]
        flags = 2 * len(self._outputs) + len(arena.inputs)
        self._counts = torch.zeros(flags, dtype=torch.int64, device=arena.whole.device)
        self.replays = 0

    def before(self) -> None:
        self._arena.restore()
        self._arena.poison()

    def after(self) -> None:
        self.replays += 1
        if self.expected is not None:
            wrong = [self._is_wrong(name, out, self.expected[name]) for name, out in self._outputs]
            missing = [self._is_missing(self._arena.outputs[name], self.expected[name]) for name, _ in self._outputs]
            changed = [(bits(now) != bits(original)).any() for now, original in self._arena.inputs.values()]
            self._counts += torch.stack(wrong + missing + changed)

    def _is_wrong(self, name: str, out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Bool scalar on the device; `out` are the bits of the output."""
        if name not in self._unordered:
            return (out != bits(expected)).any()
        difference = (self._arena.outputs[name].float() - expected.float()).abs().max()
        return ~(difference <= order_error(expected))  # NaN is wrong

    @staticmethod
    def _is_missing(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Bool scalar on the device. Of a cache only new rows are written, in the validated output too."""
        return (unwritten(out) & ~unwritten(expected)).any()

    def fault(self) -> str:
        """What the replays did wrong, in one sentence; waits for them."""
        counts, outputs = self._counts.tolist(), len(self._outputs)
        wrong, missing = max(counts[:outputs]), max(counts[outputs : 2 * outputs])
        changed = max(counts[2 * outputs :], default=0)
        if changed:
            return f"{changed} of {self.replays} timed replays changed the inputs."
        if missing:
            return (
                f"{missing} of {self.replays} timed replays left outputs unwritten: "
                "the kernel does less work when it is timed."
            )
        if wrong:
            return f"{wrong} of {self.replays} timed replays left another output than the validated one."
        return ""
