"""Values for an instruction's operands: edges of each PTX type among random ones."""

from typing import Any

import numpy as np

COUNT = 96
F32_EDGES = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    2.5,
    -2.5,
    3.5,
    np.inf,
    -np.inf,
    np.nan,
    1e-45,
    -1e-40,
    2.0**-126,
    -(2.0**-127),
    3.4e38,
    -3.4e38,
    2.0**31,
    -(2.0**31),
    2.0**32,
    4294967040.0,
    1e10,
    -1e20,
    127.5,
    -149.5,
    128.0,
    65504.0,
    65520.0,
    1e-7,
    255.5,
    1 + 2.0**-23,
]
TAME = [0.0, 1.0, -1.0, 0.5, 3.0, -2.25, 10.0, 0.001]
"""For functions whose bound holds on a range only."""


def floats(dtype: type, seed: int, edges: list[float] = F32_EDGES, spread: float = 4.0) -> np.ndarray:
    """`[COUNT]` edges, then random values, in an order of the seed's own, so that two operands meet in many pairs."""
    rng = np.random.default_rng(seed)
    values = np.concatenate(
        [edges, rng.standard_normal(COUNT - len(edges)) * np.exp(rng.uniform(-spread, spread, COUNT - len(edges)))]
    )
    with np.errstate(over="ignore"):
        return rng.permutation(values).astype(dtype)


def bfloats(seed: int) -> np.ndarray:
    return (floats(np.float32, seed).view(np.uint32) >> 16).astype(np.uint16)


def integers(dtype: type, seed: int, nonzero: bool = False) -> np.ndarray:
    limits, rng = np.iinfo(dtype), np.random.default_rng(seed)
    edges = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 255, limits.min, limits.max, limits.max - 1, limits.max // 2 + 1]
    values: np.ndarray = np.array([e & limits.max if e > limits.max else e for e in edges], dtype)
    words = rng.integers(limits.min, limits.max, COUNT - len(edges), dtype, endpoint=True) >> dtype(
        rng.integers(0, limits.bits // 2)
    )
    values = rng.permutation(np.concatenate([values, words]))
    return np.where((values == 0) | (values == -1 if limits.min else False), dtype(3), values) if nonzero else values


def operand(kind: str, seed: int, **how: Any) -> np.ndarray:
    """Values of a PTX type."""
    if kind in ("f32", "f64", "f16"):
        return floats({"f32": np.float32, "f64": np.float64, "f16": np.float16}[kind], seed, **how)
    if kind == "bf16":
        return bfloats(seed)
    if kind in ("f16x2", "bf16x2"):
        low, high = (operand(kind[:-2], seed + i).view(np.uint16).astype(np.uint32) for i in (0, 50))
        return low | high << np.uint32(16)
    bits = int(kind[1:])
    return integers(np.dtype(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}").type, seed, **how)


def result_type(kind: str) -> type:
    """How NumPy holds a PTX type; what it has no name for as bits."""
    halves = {"f16": "f2", "bf16": "u2", "f16x2": "u4", "bf16x2": "u4"}
    letter = {"s": "i", "f": "f"}.get(kind[0], "u")
    return np.dtype(halves.get(kind) or f"{letter}{int(kind[1:]) // 8}").type
