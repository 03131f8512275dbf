"""Variants by their names beside the same said as functions of FlexAttention's language, by our kernels, in one run.

    python -m benchmarks.flex.named [--only WORD]

Both sides of a problem are captured in CUDA graphs and replayed by turns (`benchmarks.flex`). What the two answers
differ by is printed, too. A band and a soft cap alone run as the name: there the two are the same kernel."""

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import evoattn
from benchmarks.flex.__main__ import timed
from benchmarks.flex.mods import causal

SHAPES = ((2, 16, 1024, 1024, 64), (2, 16, 4096, 4096, 64), (2, 16, 4096, 4096, 128), (8, 16, 1, 8192, 128))
"""Batch, heads, queries, keys, head_dim."""
WINDOW, CAP = 1024, 30.0


class Said(NamedTuple):
    """A variant as `evoattn.attention` takes it, and as functions."""

    words: dict[str, Any]
    score_mod: Callable[..., Tensor] | None
    mask_mod: Callable[..., Tensor] | None


def variants(heads: int, rows: int, keys: int, device: str) -> dict[str, Said]:
    """By name, of so many heads, queries and keys. Queries count from the upper left corner."""
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device=device) / heads)
    bias = torch.randn(heads, rows, keys, device=device, dtype=torch.bfloat16)
    offset = keys - rows  # to the corner that windows and slopes count from
    near = lambda b, h, q, k: (k - q <= offset) & (q + offset - k <= WINDOW)
    capped = lambda s, b, h, q, k: CAP * torch.tanh(s / CAP)
    sloped = lambda s, b, h, q, k: s - slopes[h] * (q + offset - k).abs()
    return {
        "causal": Said({"is_causal": True}, None, causal),
        "window": Said({"causal": "lower_right", "window": (WINDOW, 0)}, None, near),
        "soft cap": Said({"softcap": CAP}, capped, None),
        "soft cap in a window": Said({"softcap": CAP, "causal": "lower_right", "window": (WINDOW, 0)}, capped, near),
        "slopes": Said({"alibi_slopes": slopes}, sloped, None),
        "causal slopes": Said(
            {"alibi_slopes": slopes, "causal": "lower_right"}, sloped, lambda b, h, q, k: k - q <= offset
        ),
        "bias": Said({"bias": bias}, lambda s, b, h, q, k: s + bias[h, q, k], None),
    }


def measured(said: Said, tensors: list[Tensor]) -> tuple[dict[str, float], float]:
    """Medians of both sides in µs, and the largest difference of their answers."""
    q, k, v = tensors
    mask = None
    if said.mask_mod is not None:
        mask = evoattn.create_block_mask(said.mask_mod, None, None, q.shape[2], k.shape[2], "cuda")

    def named() -> Tensor:
        found: Tensor = evoattn.attention(q, k, v, **said.words)
        return found

    def function() -> Tensor:
        found: Tensor = evoattn.flex_attention(q, k, v, said.score_mod, mask)
        return found

    apart = (named().float() - function().float()).abs().max().item()
    return timed({"evoattn": named, "function": function}), apart


def main() -> None:
    """Measure, print, and with `--json` write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="variants whose line has this word")
    words = parser.parse_args()
    ratios: list[float] = []
    print("| variant | shape | named µs | function µs | function over name | apart |\n|" + "---|" * 6)
    for batch, heads, queries, keys, dim in SHAPES:
        tensors = [torch.randn(batch, heads, n, dim, device="cuda").bfloat16() for n in (queries, keys, keys)]
        for name, said in variants(heads, queries, keys, "cuda").items():
            shape = f"B={batch} H={heads} Sq={queries} Sk={keys} D={dim}"
            if (queries == 1 and name == "causal") or words.only not in f"{name} {shape}":  # one key
                continue
            try:
                us, apart = measured(said, tensors)
            except Exception as error:  # the others are measured all the same
                print(f"| {name} | {shape} | {str(error).splitlines()[0][:120]} |")
                continue
            ratios.append(us["function"] / us["evoattn"])
            times = f"{us['evoattn']:.1f} | {us['function']:.1f}"
            print(f"| {name} | {shape} | {times} | {ratios[-1]:.3f} | {apart:.0e} |", flush=True)
            torch.cuda.empty_cache()
    if ratios:
        within = sum(ratio <= 1.03 for ratio in ratios)
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(f"\nGeometric mean {mean:.3f}; within 3 % at {within} of {len(ratios)}; most {max(ratios):.3f}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
