"""The proof of the making of 8 bits: a `cases.Proof`."""

import math

import torch
from torch import Tensor

from evoattn.correctness import eight_bits
from evoattn.correctness.interpreter_cases import SmallCase
from evoattn.correctness.reference import Answer, Exact, rms
from evoattn.correctness.terms import torch_dtype
from evoattn.model.operation import TensorSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.quantize import SMOOTH, TOGETHER, TURN, number_of, sampled_rows
from evoattn.model.scales import BLOCK_ROWS, PER_BLOCK
from evoattn.model.space import KernelConfig

NAN_CODE = 0x7F
"""The first of e4m3 that is no number: those below are none below 0."""
KINDS = ("plain", "zeros", "extremes", "outliers")
LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Whose inverse is a number, too: less is not asked of a scale."""
OF_MEANS, OF_FLIPS = 1e-5, 0.01
"""Of the largest value what the order of a sum in float32 may make of a mean; of the numbers' root mean square what
those may that are rounded to the other side for it."""


def make_inputs(
    problem: AttentionProblem, seed: int, device: torch.device | str, kind: str = "plain", tile: int = 64
) -> dict[str, Tensor]:
    """Normal values, those of each head of another size; with `zeros` every other head and every third row are 0, -0
    among them; with `extremes` sizes go from the least to the largest number of the dtype; with `outliers` a channel
    has a mean far from 0, as Llama's keys have. With `zeros` and `outliers` the largest value has an infinity beside
    it, in either half of a pair, and a NaN is somewhere else. Raises `ValueError` on an unknown kind."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}.")
    generator = torch.Generator(device=device).manual_seed(seed)
    return {spec.name: _values(problem, spec, generator, device, kind) for spec in problem.inputs}


def _values(
    problem: AttentionProblem, spec: TensorSpec, generator: torch.Generator, device: torch.device | str, kind: str
) -> Tensor:
    if problem.op == TURN:
        codes = torch.randint(0, NAN_CODE, spec.shape, generator=generator, device=device, dtype=torch.uint8)
        made = torch.empty(codes.numel(), dtype=torch.uint8, device=device).as_strided(spec.shape, spec.strides)
        return made.copy_(codes).view(torch_dtype(problem, "q"))
    dtype, (batch, heads, rows, dim) = torch_dtype(problem), spec.shape
    values = torch.randn(batch, heads, rows, dim, generator=generator, device=device)
    turn = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    values *= 0.5 + turn
    far = -1 if kind == "outliers" else 0  # in the last part or the first, neither of which may be left out
    values[far, far, far, far] = 5 * values.abs().max()
    if kind == "zeros":
        values *= ((turn + 1) % 2) * torch.where(torch.arange(rows, device=device) % 3 == 1, -0.0, 1.0)[:, None]
    elif kind == "extremes":
        info = torch.finfo(dtype)
        most = info.max / 4 if problem.op == SMOOTH else info.max  # a difference is a number, too
        least = info.tiny if problem.op == SMOOTH else info.smallest_normal * info.eps
        sizes = torch.tensor([most, least, info.tiny], device=device)
        values = torch.where(values > 0, 1.0, -1.0) * sizes[turn % 3]
        if problem.op == SMOOTH:  # else many less their mean lie halfway between two numbers
            values *= 1 - torch.rand(values.shape, generator=generator, device=device) / 8
        values[:, :, 1::2, 1::2] /= 3
    elif kind == "outliers":
        values[..., dim // 3] += 30
    if kind in ("zeros", "outliers"):
        values[far, far, far, 1 if far == 0 else dim - 2] = math.inf * (1 + 2 * far)
        values[far, far, rows // 2, dim // 2] = math.nan
    made = torch.empty(values.numel(), dtype=dtype, device=device).as_strided(spec.shape, spec.strides)
    return made.copy_(values)


def make_answer(
    problem: AttentionProblem, tensors: dict[str, Tensor], kind: str = "plain", double: bool = False
) -> Answer:
    """The numbers, which are to the last bit what float32 makes of them: value · (1 / scale), rounded to the nearest.

    Of a mean the bits depend on the order of its sum. It is float64 here, and a number may lie one step away, few of
    them in all. What is no finite number counts for no scale and no mean; it becomes NaN, or 0 where numbers are whole.
    """
    if problem.op == TURN:
        return {"numbers": Exact(eight_bits.turn(tensors["x"]).double(), 0.0, 0.0)}
    if problem.op in TOGETHER:
        second = _answer(problem, tensors["v"], problem.turned, False)
        first = _answer(problem, tensors["x"], False, problem.op == SMOOTH)
        return first | {f"v_{name}": one for name, one in second.items()}
    return _answer(problem, tensors["x"], problem.turned, False)


def _answer(problem: AttentionProblem, tensor: Tensor, turned: bool, smooth: bool) -> dict[str, Exact]:
    x, element, finite = tensor.float().nan_to_num(0.0, 0.0, 0.0), number_of(problem), tensor.isfinite()
    mean = x[:, :, sampled_rows(x.shape[2])].double().mean(2, keepdim=True).float()
    wide = x - mean if smooth else x
    sizes = wide.abs().where(finite, 0)
    if problem.scales == "token":
        most = sizes.amax(-1, keepdim=True)
    elif problem.scales == PER_BLOCK:
        most = eight_bits.of_blocks(sizes.amax(-1, keepdim=True))
    elif problem.scales:
        most = sizes.unflatten(1, (problem.kv_heads, -1)).amax((2, 3, 4))[..., None, None]
    else:
        most = sizes.amax().view(1, 1, 1, 1)
    scale = torch.where(most > 0, (most / torch.full_like(most, element.largest)).clamp(min=LEAST_SCALE), 1.0)
    spread = scale.repeat_interleave(problem.group_size, 1) if problem.scales == "head" else scale
    numbers = (wide * spread.reciprocal()).clamp(-element.largest, element.largest)
    dtype = getattr(torch, element.torch)
    numbers = numbers.where(finite, math.nan) if dtype.is_floating_point else numbers.where(finite, 0).round()
    stored = numbers.to(dtype)
    rounded = (eight_bits.turn(stored) if turned else stored).double()
    kept = (scale[:, :, ::BLOCK_ROWS] if problem.scales == PER_BLOCK else scale).reshape(problem.outputs[1].shape)
    if not smooth:
        return {"numbers": Exact(rounded, 0.0, 0.0), "scale": Exact(kept, 0.0, 0.0)}
    step = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(element.largest)) if dtype.is_floating_point else 1.0
    off = OF_MEANS * x.abs().max().item()
    return {
        "numbers": Exact(rounded, step, OF_FLIPS * rms(rounded.nan_to_num(0.0))),
        "scale": Exact(kept, off / element.largest),
        "mean": Exact(mean, off),
    }


def device_cases(problem: AttentionProblem) -> list[tuple[str, AttentionProblem, str]]:
    other = "bshd" if problem.layout == "bhsd" else "bhsd"
    group = 1 if problem.op in (TURN, *TOGETHER) else 3
    small = problem.with_(batch=2, heads=2 * group, kv_heads=2, layout="bhsd")
    return [
        ("ragged", small.with_(seqlen_q=1203, seqlen_k=1203), "outliers"),
        ("ragged, strided, Sq > Sk", small.with_(seqlen_q=415, seqlen_k=415, layout=other), "plain"),
        ("rows of one", small.with_(seqlen_q=1, seqlen_k=1), "plain"),
        ("zeros", small.with_(seqlen_q=190, seqlen_k=190), "zeros"),
        ("extremes", small.with_(seqlen_q=65, seqlen_k=65), "extremes"),
    ]


def interpreter_cases(problem: AttentionProblem, config: KernelConfig) -> list[SmallCase]:
    """Two parts of a head and some rows; the other layout; one row; zeros; extremes; one part of one head; one head
    alone, of which one block has all; where it takes few blocks more parts of a scale than a block has threads."""
    rows, threads = int(config.params["BLOCK_M"]), int(config.params["THREADS"])
    group = 1 if problem.op in (TURN, *TOGETHER) else 2
    small = problem.with_(batch=2, heads=2 * group, kv_heads=2, seqlen_q=7, seqlen_k=7, layout="bhsd")
    several = threads <= 128 and problem.op not in (TURN, *TOGETHER)
    many = small.with_(heads=threads + 2, kv_heads=1, batch=1, seqlen_q=1, seqlen_k=1) if several else small
    return [
        SmallCase("two parts and more", small.with_(batch=1, seqlen_q=2 * rows + 3, seqlen_k=2 * rows + 3), "outliers"),
        SmallCase("strided", small.with_(layout="bshd"), "plain"),
        SmallCase("one row", small.with_(seqlen_q=1, seqlen_k=1), "plain"),
        SmallCase("zeros", small, "zeros"),
        SmallCase("extremes", small, "extremes"),
        SmallCase("a part each", small.with_(heads=2, seqlen_q=rows, seqlen_k=rows), "outliers"),
        SmallCase("one head", small.with_(batch=1, heads=1, kv_heads=1, seqlen_q=5, seqlen_k=5), "plain"),
        *([SmallCase("many parts", many, "plain")] if several else []),
    ]
