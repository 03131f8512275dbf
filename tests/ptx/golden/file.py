"""Golden launches: PTX, inputs, and what a GPU made of them, in one file; and how close the interpreter must come."""

import hashlib
import json
import re
import zlib
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from evoattn.ptx import parse_program
from tests.ptx.golden.harness import observed, parsed

FILE = Path(__file__).with_name("golden.bin")
"""JSON of the cases, then every different array once, compressed as a whole."""


@cache
def opcodes_of(ptx: str) -> frozenset[str]:
    [kernel] = parse_program(ptx).kernels.values()
    return frozenset(ins.opcode for ins in kernel.instructions)


@dataclass
class Golden:
    """One launch. `after` are the arrays as the device left them, None where no device has run it yet."""

    name: str
    ptx: str
    maps: list[dict[str, Any]]
    before: list[np.ndarray]
    scalars: list[np.generic]
    blocks: int
    threads: int
    smem: int
    after: list[np.ndarray] | None = field(default=None)

    @property
    def entry(self) -> str:
        return str(re.findall(r"\.entry\s+(\w+)", self.ptx)[0])

    @property
    def cluster(self) -> int:
        """Blocks of a cluster, as the kernel asks for."""
        asked = re.search(r"\.reqnctapercluster\s+(\d+)", self.ptx)
        return int(asked[1]) if asked else 1

    @property
    def key(self) -> str:
        """The same for launches of the same kernel on the same inputs."""
        words = [
            self.ptx,
            repr(self.maps),
            *(f"{s.dtype.str}{s}" for s in self.scalars),
            self.blocks,
            self.threads,
            self.smem,
        ]
        digest = hashlib.sha256("|".join(map(str, words)).encode())
        for array in self.before:
            digest.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())
        return digest.hexdigest()

    @property
    def opcodes(self) -> frozenset[str]:
        return opcodes_of(self.ptx)

    @property
    def bytes(self) -> int:
        return sum(a.nbytes for a in self.before)

    def interpreted(self, **options: Any) -> list[np.ndarray]:
        """The arrays as the interpreter leaves them; `options` as of `run_launch`. Raises `AssertionError` on a
        fault."""
        arrays = [a.copy() for a in self.before]
        execution = observed(
            parsed(self.ptx),
            self.maps,
            arrays,
            self.scalars,
            self.blocks,
            self.threads,
            self.smem,
            cluster=(self.cluster, 1, 1),
            **options,
        )
        assert not execution.faults, execution.faults
        return arrays


def save(goldens: list[Golden], device: dict[str, str], path: Path = FILE) -> None:
    blobs: dict[str, np.ndarray] = {}

    def kept(array: np.ndarray) -> list[Any]:
        key = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        blobs.setdefault(key, array)
        return [key, array.dtype.str, list(array.shape)]

    rows = []
    for golden in goldens:
        row = asdict(golden) | {
            "before": [kept(a) for a in golden.before],
            "scalars": [[s.dtype.str, s.item()] for s in golden.scalars],
        }
        rows.append(row | {"after": [kept(a) for a in golden.after] if golden.after else golden.after})
    sizes = {key: array.nbytes for key, array in blobs.items()}
    head = json.dumps({"device": device, "arrays": sizes, "cases": rows}, default=int).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(zlib.compress(b"%d\n%s" % (len(head), head) + b"".join(a.tobytes() for a in blobs.values()), 9))


def load(path: Path = FILE) -> tuple[list[Golden], dict[str, str]]:
    """(cases, the device that ran them). Raises `OSError` if the file is missing."""
    length, _, rest = zlib.decompress(path.read_bytes()).partition(b"\n")
    head, data = json.loads(rest[: int(length)]), rest[int(length) :]
    blobs, start = {}, 0
    for key, size in head["arrays"].items():
        blobs[key], start = data[start : start + size], start + size

    def array(key: str, dtype: str, shape: list[int]) -> np.ndarray:
        return np.frombuffer(blobs[key], dtype).reshape(shape).copy()

    goldens = []
    for row in head["cases"]:
        maps = [{name: tuple(v) if isinstance(v, list) else v for name, v in m.items()} for m in row["maps"]]
        scalars = [np.dtype(dtype).type(value) for dtype, value in row["scalars"]]
        after = row["after"] and [array(*a) for a in row["after"]]
        goldens.append(
            Golden(
                **row | {"maps": maps, "scalars": scalars, "before": [array(*a) for a in row["before"]], "after": after}
            )
        )
    return goldens, head["device"]


TOLERANCES = (
    (r"ex2\.approx(\.ftz)?\.bf16", 2.0**-7, 0),
    (r"tanh\.approx\.bf16", 2.0**-7, 2.0**-8),
    (r"ex2\.approx\.f16", 2.0**-9, 2.0**-24),
    (r"tanh\.approx\.f(16|32)", 2.0**-10, 2.0**-11),
    (r"(sin|cos)\.approx", 0, 2.0**-17),
    (r"lg2\.approx", 2.0**-21, 2.0**-21),
    (r"(ex2|rcp|rsqrt|sqrt)\.approx|div\.(approx|full)", 2.0**-21, 2.0**-126),
)
"""(opcode, relative, absolute) of approximations: the bounds of the PTX ISA, each at most doubled. All else is held to
the last bit, but for the payload of a NaN, which the ISA leaves open, and for `PRODUCT`."""
PRODUCT, PRODUCT_SHARE = re.compile(r"w?g?mma\S*\.f32"), 2.0**-13
"""Tensor cores add the products of a step in an order and with a truncation of their own: to this share of the largest
output."""
PRODUCT_ROUNDED = {"f16": 2.0**-10, "bf16": 2.0**-7}
"""And where such a sum is then rounded to 16 bits, a difference in its last bits can give the neighbour: one unit in
the last place."""


def _half(array: np.ndarray, opcodes: frozenset[str]) -> str:
    """The 16-bit type that an array of integers holds, or an empty string."""
    halves = {match[1] for o in opcodes if (match := re.search(r"\.(bf16|f16)(?:x2)?(?:\.f32)?$", o))}
    return halves.pop() if len(halves) == 1 and array.dtype.kind != "f" and array.dtype.itemsize in (2, 4) else ""


def _numbers(array: np.ndarray, opcodes: frozenset[str]) -> np.ndarray:
    """The values that the bits mean, float64; integers that hold halves as halves."""
    if array.dtype.kind == "f":
        return array.astype(np.float64).ravel()
    half = _half(array, opcodes)
    if half:
        bits = array.ravel().view(np.uint16)
        return (bits.view(np.float16) if half == "f16" else (bits.astype(np.uint32) << 16).view(np.float32)).astype(
            np.float64
        )
    return array.ravel().astype(np.float64)


def disagreements(golden: Golden, ours: list[np.ndarray]) -> int:
    """Values of the golden outputs that `ours` miss."""
    opcodes, missed = golden.opcodes, 0
    bounds = [
        (relative, absolute) for pattern, relative, absolute in TOLERANCES if any(re.match(pattern, o) for o in opcodes)
    ]
    relative, absolute = (max(column, default=0) for column in zip(*bounds)) if bounds else (0, 0)
    assert golden.after is not None, "no device has run it yet"
    for theirs, mine in zip(golden.after, ours, strict=True):
        if theirs.tobytes() == mine.tobytes():
            continue
        a, b = _numbers(theirs, opcodes), _numbers(mine, opcodes)
        with np.errstate(all="ignore"):
            multiplies = any(PRODUCT.match(o) for o in opcodes)
            share = PRODUCT_SHARE * np.abs(a[np.isfinite(a)]).max(initial=0) if multiplies else 0
            step = PRODUCT_ROUNDED.get(_half(theirs, opcodes), 0) if multiplies else 0
            close = (
                np.abs(a - b) <= absolute + (relative + step) * np.abs(a) + share
                if bounds or share
                else np.zeros(a.shape, bool)
            )
            same = (a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b) | close
        missed += int((~same).sum())
    return missed
