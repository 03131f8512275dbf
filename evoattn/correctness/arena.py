"""The memory that a candidate runs in: its buffers in one allocation, guard bands on either side of each, the pristine
data behind them."""

from dataclasses import dataclass

import torch

from evoattn.families.base import starts_zeroed

GUARD_BYTES = 4096
"""On either side of every buffer: one write of a whole tile row past an end still lands in it."""
ALIGNMENT = 256
"""Bytes: what cudaMalloc guarantees."""
BANDS = (0x5A, 0xFF)
"""What the bands hold in a first and a second run: a number that a wrong read would take for a large logit, then
NaN."""
POISON_BYTE = 0xFF
"""Outputs and scratch buffers hold it before a run: NaN in every dtype, and never the NaN that a GPU computes (0x7FFF…;
PTX ISA, cvt)."""
UNWRITTEN = -1
"""The bits of an element that still holds it, as a signed integer."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers of their size: NaN equals NaN, and 0 is not -0."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements of an output still hold `POISON_BYTE`s. Of whole numbers none is known to: all bits are values."""
    found = bits(tensor) == UNWRITTEN
    return found if tensor.is_floating_point() else torch.zeros_like(found)


@dataclass(frozen=True)
class Layout:
    """One output of a problem: logical shape, strides in elements (together they cover all elements), dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize


class Arena:
    """`buffers` by name, flat, for the launches; `views` of inputs and outputs in their logical shapes.

    Inputs are copies of `inputs`, which `changed_inputs` compares them with; those of `changed` are compared with what
    a kernel leaves there, by name."""

    def __init__(
        self,
        inputs: dict[str, torch.Tensor],
        outputs: dict[str, Layout],
        scratch: dict[str, int],
        device: torch.device,
        changed: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """`scratch` in bytes. Raises `torch.cuda.OutOfMemoryError`."""
        self._inputs, self._outputs, self._scratch, self._changed = inputs, tuple(outputs), scratch, changed or {}
        layouts = {name: Layout(tuple(t.shape), t.stride(), t.dtype) for name, t in inputs.items()} | outputs
        sizes = {name: layout.nbytes for name, layout in layouts.items()} | scratch
        spans, end = {}, 0
        for name, size in sizes.items():
            start = -(-(end + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT
            spans[name] = start, start + size
            end = start + size
        self.whole = torch.empty(end + GUARD_BYTES, dtype=torch.uint8, device=device)
        edges = [0, *(edge for span in spans.values() for edge in span), end + GUARD_BYTES]
        self._bands = [self.whole[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        self._bytes = {name: self.whole[a:b] for name, (a, b) in spans.items()}
        self.buffers = {
            name: self._bytes[name].view(layouts[name].dtype) if name in layouts else self._bytes[name]
            for name in spans
        }
        self.views = {
            name: self.buffers[name].as_strided(layout.shape, layout.strides, self.buffers[name].storage_offset())
            for name, layout in layouts.items()
        }
        self._band = BANDS[0]
        self.restore()

    def arm(self, band: int = BANDS[0]) -> None:
        """Before a run: bands of `band` bytes, outputs and scratch buffers poisoned, or zeroed where
        `starts_zeroed`, and inputs that a kernel changes written again."""
        self._band = band
        for piece in self._bands:
            piece.fill_(band)
        self.poison()
        for name in self._scratch:
            self._bytes[name].fill_(0 if starts_zeroed(name) else POISON_BYTE)
        for name in self._changed:
            self.views[name].copy_(self._inputs[name])

    def refill(self, inputs: dict[str, torch.Tensor], changed: dict[str, torch.Tensor]) -> None:
        """Other contents for the inputs, of the same shapes and strides."""
        self._inputs, self._changed = inputs, changed
        self.restore()

    def settle(self) -> None:
        """Write into the inputs what a kernel leaves there."""
        for name, tensor in self._changed.items():
            self.views[name].copy_(tensor)

    def restore(self) -> None:
        """Write the inputs again."""
        for name, tensor in self._inputs.items():
            self.views[name].copy_(tensor)

    def poison(self) -> None:
        """Overwrite the outputs."""
        for name in self._outputs:
            self._bytes[name].fill_(POISON_BYTE)

    def changed_bands(self) -> torch.Tensor:
        """Bytes of the bands that are not what `arm` wrote: int64 scalar on the device, so that the caller chooses when
        to wait."""
        return (torch.cat(self._bands) != self._band).sum()

    def changed_inputs(self) -> list[torch.Tensor]:
        """Elements of each input that are not what they should be after a run, bit for bit: int64 scalars on the
        device, in the order of `inputs`."""
        return [(bits(now) != bits(after)).sum() for now, after in self.inputs.values()]

    @property
    def inputs(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """By name: the view of the input, and what it should hold after a run."""
        return {name: (self.views[name], self._changed.get(name, tensor)) for name, tensor in self._inputs.items()}

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """The views of the outputs."""
        return {name: self.views[name] for name in self._outputs}

    @property
    def zeroed(self) -> tuple[str, ...]:
        """Names of the scratch buffers that hold zeros before a run and must hold them after it
        (`Family.workspace`)."""
        return tuple(filter(starts_zeroed, self._scratch))

    def dirty_zeros(self) -> list[torch.Tensor]:
        """Bytes of each of `zeroed` that are not zero: int64 scalars on the device. Nothing clears them between the
        calls of a graph."""
        return [(self._bytes[name] != 0).sum() for name in self.zeroed]

    def touched_band(self) -> str:
        """The name of the buffer beside the first damaged band."""
        names = list(self.buffers)
        for i, piece in enumerate(self._bands):
            if (piece != self._band).any():
                return names[max(0, i - 1)]
        return names[-1]


class Vault:
    """Says whether anybody wrote into data that no kernel is ever handed: the original inputs and the answers.

    A kernel that writes far past its buffers lands in whatever the allocator put there; without this the candidate
    after it would pay."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = [bits(t) for t in tensors]
        self._sums = self._sum()

    def _sum(self) -> torch.Tensor:
        """Sum of each tensor's bits, wrapping at 64 bits: one damaged word always changes it."""
        return torch.stack([t.sum(dtype=torch.int64) for t in self._tensors])

    def intact(self) -> bool:
        return bool(torch.equal(self._sum(), self._sums))
