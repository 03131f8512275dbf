"""Gradients on this GPU: their errors beside float64, and whether they have the same bits in every run.

    python -m benchmarks.gradients [--rows 1000] [--repeats 300] [--json FILE]

Errors are judged by FlashAttention's rule: at most twice those of PyTorch's attention in the same dtype, three times
with a soft cap, and 2 units of the last place besides. Gradients are of q, k, v, and of the bias or the sinks where the
case has them. For the same bits each case runs `--repeats` times with `deterministic`, block lists too, and is timed
with and without. On a CPU, where kernels do not run, it goes through with few rows."""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import evoattn
from evoattn.ops import torch_answer
from evoattn.ops.given import call_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Tensors = tuple[torch.Tensor, ...]
LEARNED = ("bias", "sinks")
"""Words that want gradients."""
ROUNDS, CALLS = 7, 5
"""Of timing: events, and calls between two."""
CASES: dict[str, tuple[dict[str, Any], Callable[[int, int], dict[str, Any]]]] = {
    "full": (dict(), lambda heads, rows: {}),
    "causal, grouped": (dict(dim=128, kv_heads=2), lambda heads, rows: {"is_causal": True, "enable_gqa": True}),
    "192 beside 128": (dict(dim=192, dim_v=128), lambda heads, rows: {"is_causal": True}),
    "D=256": (dict(dim=256), lambda heads, rows: {}),
    "D=96, fp16": (dict(dim=96, dtype=torch.float16), lambda heads, rows: {"is_causal": True}),
    "scores of 300 times": (dict(scale=17.0), lambda heads, rows: {"is_causal": True}),
    "window, sinks": (
        dict(kv_heads=2),
        lambda heads, rows: {"causal": True, "window": (127, 0), "sinks": drawn(heads), "enable_gqa": True},
    ),
    "soft cap": (dict(dim=128), lambda heads, rows: {"softcap": 20.0, "is_causal": True}),
    "slopes": (dict(), lambda heads, rows: {"alibi_slopes": drawn(heads).float().abs() / 8, "causal": True}),
    "bias": (dict(), lambda heads, rows: {"bias": drawn(heads, rows, rows)}),
}
SAME_BITS = {
    "full": dict(dim=128),
    "causal": dict(dim=128),
    "causal, D=64": dict(),
    "documents, a block list": dict(dim=128),
    "documents, D=64": dict(),
    "100 keys": dict(dim=128, rows=100),
}


def drawn(*shape: int, seed: int = 9, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers, the same in each process. Tensors of one shape have seeds of their own: with K as Q, or dO as V,
    scores and their gradients are symmetric, and hide what exchanges queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def made(rows: int, batch: int = 2, heads: int = 8, **has: Any) -> list[torch.Tensor]:
    """q, k and v that want gradients, and dO, as models lay them out."""
    dim, dtype, kv_heads = has.get("dim", 64), has.get("dtype", torch.bfloat16), has.get("kv_heads", heads)
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, has.get("dim_v", dim)), (heads, has.get("dim_v", dim)))
    q, k, v, do = (drawn(batch, rows, *size, seed=seed, dtype=dtype).transpose(1, 2) for seed, size in enumerate(sizes))
    return [*((x * by).detach().requires_grad_() for x, by in ((q, has.get("scale", 1.0)), (k, 1.0), (v, 1.0))), do]


def gradients(attend: Callable[..., Any], tensors: Tensors, do: torch.Tensor, words: dict[str, Any]) -> Tensors:
    """Of q, k and v and of what is `LEARNED`."""
    inputs = (*tensors, *(words[name] for name in LEARNED if name in words))
    return torch.autograd.grad(attend(*tensors, **words), inputs, do)


def by_torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **words: Any) -> Any:
    return torch_answer.answer(call_of(query, key, value, words))


def errors(name: str, rows: int) -> dict[str, Any]:
    """Of each gradient: our error, PyTorch's, and ours over what the rule allows."""
    shape, make = CASES[name]
    *tensors, do = made(rows, **shape)
    words = {
        n: w.to(do.dtype).requires_grad_() if n in LEARNED else w for n, w in make(tensors[0].shape[1], rows).items()
    }
    ours = gradients(evoattn.attention, (*tensors,), do, words)
    low = gradients(by_torch, (*tensors,), do, words)
    wide = {n: w.detach().double().requires_grad_() if n in LEARNED else w for n, w in words.items()}
    exact = gradients(by_torch, tuple(t.detach().double().requires_grad_() for t in tensors), do.double(), wide)
    found: dict[str, Any] = {"case": name}
    names = ("dq", "dk", "dv", *(f"d{n}" for n in LEARNED if n in words))
    for of, one, theirs, right in zip(names, ours, low, exact, strict=True):
        near = 2 * torch.finfo(one.dtype).eps * float(right.abs().max())
        error, allowed = (float((x.double() - right).abs().max()) for x in (one, theirs))
        bound = (3 if "softcap" in words else 2) * allowed + near
        finite = bool(torch.isfinite(one).all())
        found[of] = {"error": error, "torch": allowed, "share": error / bound if finite else float("inf")}
    return found


def attend_of(name: str, rows: int, heads: int) -> Callable[..., torch.Tensor]:
    """Attention of a case of `SAME_BITS`."""
    if "documents" not in name:
        return lambda q, k, v: evoattn.attention(q, k, v, is_causal="causal" in name)
    ends = torch.tensor([0.13, 0.4, 0.55, 0.9], device=DEVICE) * rows
    document = (torch.arange(rows, device=DEVICE)[:, None] >= ends).sum(1)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)

    blocks = evoattn.create_block_mask(mask, None, None, rows, rows, device=DEVICE)
    return lambda q, k, v: evoattn.flex_attention(q, k, v, block_mask=blocks)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def median_us(call: Callable[[], Any]) -> float:
    """Of a call on the device, by events; 0 on a CPU."""
    if DEVICE == "cpu":
        return 0.0
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return float(statistics.median(times))


def same_bits(name: str, rows: int, repeats: int) -> dict[str, Any]:
    """How many of so many runs differ in a bit from the first, and what it costs."""
    *tensors, do = made(**({"rows": rows} | SAME_BITS[name]))
    attend = attend_of(name, tensors[0].shape[2], tensors[0].shape[1])
    out = attend(*tensors)

    def backward() -> Tensors:
        return torch.autograd.grad(out, tensors, do, retain_graph=True)

    free = median_us(backward)
    with deterministic(True):
        out, differ = attend(*tensors), 0
        first = backward()
        for _ in range(repeats):
            differ += not all(torch.equal(a, b) for a, b in zip(first, backward(), strict=True))
        ordered = median_us(backward)
    return {"case": name, "differ": differ, "of": repeats, "free_us": free, "deterministic_us": ordered}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = DEVICE == "cuda"
    parser.add_argument("--rows", type=int, default=1000 if on_gpu else 100, help="queries and keys, for errors")
    parser.add_argument("--long", type=int, default=4096 if on_gpu else 256, help="the same, for the same bits")
    parser.add_argument("--repeats", type=int, default=300 if on_gpu else 3)
    parser.add_argument("--json", type=Path, help="where all numbers go")
    given = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"errors": [], "same bits": []}
    print("error / PyTorch's error in the same dtype, largest, beside float64; share: of what the rule allows")
    print("| gradients | dq | dk | dv | dbias or dsinks | largest share |\n|" + "---|" * 6)
    for name in CASES:
        row = errors(name, given.rows)
        found["errors"].append(row)
        cells = [f"{one['error']:.2g} / {one['torch']:.2g}" for of, one in row.items() if of != "case"]
        share = max(one["share"] for of, one in row.items() if of != "case")
        print(f"| {' | '.join([name, *cells, *['-'] * (4 - len(cells))])} | {share:.2f} |", flush=True)
    print("\n| the same bits | runs that differ | deterministic, µs | free, µs | cost |\n|" + "---|" * 5)
    for name in SAME_BITS:
        if "documents" in name and DEVICE == "cpu":
            continue  # PyTorch has no gradients of FlexAttention there
        row = same_bits(name, given.long, given.repeats)
        found["same bits"].append(row)
        cost = f"{row['deterministic_us'] / row['free_us']:.2f}" if row["free_us"] else "-"
        times = f"{row['deterministic_us']:.0f} | {row['free_us']:.0f}"
        print(f"| {name} | {row['differ']} of {row['of']} | {times} | {cost} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
