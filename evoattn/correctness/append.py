"""The proof of new keys in caches and of rotary embeddings: a `cases.Proof`."""

import math

import torch
from torch import Tensor

from evoattn.correctness.interpreter_cases import SmallCase
from evoattn.correctness.reference import Answer, Exact
from evoattn.model.append import PAIRS, room_of, turned_columns
from evoattn.model.problem import AttentionProblem
from evoattn.model.sequences import parse_lengths
from evoattn.model.space import KernelConfig

KINDS = ("plain", "no_place")
OF_TURNS = 1e-6
"""Of the largest number: two products and a sum in float32."""


def make_inputs(
    problem: AttentionProblem, seed: int, device: torch.device | str, kind: str = "plain", tile: int = 64
) -> dict[str, Tensor]:
    """Normal rows, angles of all sizes, pages in a drawn order. With `no_place` sequences are so long that the last of
    their new rows are behind the room, and tables name pages that there are not. Raises `ValueError` on an unknown
    kind."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}.")
    generator = torch.Generator(device=device).manual_seed(seed)
    made = {}
    for spec in problem.inputs:
        if spec.dtype == "int32":
            continue
        values = torch.randn(spec.shape, generator=generator, device=device)
        memory = torch.empty(values.numel(), dtype=getattr(torch, spec.dtype), device=device)
        made[spec.name] = memory.as_strided(spec.shape, spec.strides).copy_(values)
    if "cos" in made:
        angles = 6.3 * torch.rand(made["cos"].shape, generator=generator, device=device)
        made["cos"].copy_(angles.cos()), made["sin"].copy_(angles.sin())
    if problem.seqused:
        lengths = torch.tensor(parse_lengths(problem.seqused).draw(problem.batch), device=device)
        fits = lengths.clamp(max=max(0, room_of(problem) - problem.seqlen_q))
        made["seqused"] = (fits if kind == "plain" else fits + problem.seqlen_q // 2 + 1).int()
    if problem.page:
        order = torch.randperm(problem.batch * problem.table_pages, generator=generator, device=device)
        made["table"] = order.view(problem.batch, -1).int()
        if kind == "no_place":
            made["table"][::2] -= problem.batch * problem.table_pages // 2
            made["table"][1::2] += problem.batch * problem.table_pages // 2
    return made


def make_answer(
    problem: AttentionProblem, tensors: dict[str, Tensor], kind: str = "plain", double: bool = False
) -> Answer:
    """float64: rows turned by the angles of their positions and rounded once, where they have a place."""
    room, device = room_of(problem), tensors["new_k"].device
    used = tensors.get("seqused", torch.zeros(problem.batch, device=device)).long()
    position = used[:, None] + torch.arange(problem.seqlen_q, device=device)
    sequence = torch.arange(problem.batch, device=device)[:, None].expand_as(position)
    within = (position >= 0) & (position < room)
    at, inside = sequence, position.clamp(0, room - 1)
    if problem.page:
        at = tensors["table"].long().gather(1, inside // problem.page)
        inside = inside % problem.page
        within = within & (at >= 0) & (at < problem.shape("k")[0])
    eps = torch.finfo(getattr(torch, problem.element.torch)).eps
    rounding, answer = eps / 2 if problem.element_bytes == 2 else OF_TURNS, {}
    for name in "kv":
        rows = tensors[f"new_{name}"].double().transpose(1, 2)
        if name == "k":
            rows = _turned(problem, tensors, rows, position)
        cache = torch.full(problem.shape(name), math.nan, dtype=torch.float64, device=device)
        cache.transpose(1, 2)[at[within], inside[within]] = rows[within]
        turned = name == "k" and turned_columns(problem)
        allowed = (OF_TURNS + rounding) * float(rows.abs().max()) if turned else 0.0
        answer[f"{name}_cache"] = Exact(cache, allowed, partial=True)
    if turned_columns(problem):
        place = position if problem.causal else used[:, None].expand_as(position)
        o = _turned(problem, tensors, tensors["q"].double().transpose(1, 2), place).transpose(1, 2)
        answer["o"] = Exact(o, (OF_TURNS + rounding) * float(o.abs().max()))
    return answer


def device_cases(problem: AttentionProblem) -> list[tuple[str, AttentionProblem, str]]:
    """Small cases. Whoever leaves out a head, a row or a page, or writes what has no place, fails one; the new rows of
    the longest sequence go on in another page."""
    page = max(1, problem.page)
    small = problem.with_(batch=3, heads=6, kv_heads=2, seqused=problem.seqused and f"0:{max(60, problem.page - 5)}")
    other = "bshd" if problem.layout == "bhsd" else "bhsd"
    return [
        ("one row", small.with_(seqlen_q=1, seqlen_k=64), "plain"),
        ("ragged", small.with_(seqlen_q=37, seqlen_k=2 * page + 101), "plain"),
        ("ragged, strided", small.with_(seqlen_q=9, seqlen_k=page + 70, layout=other), "plain"),
        ("rows without a place", small.with_(seqlen_q=9, seqlen_k=page + 3, batch=4), "no_place"),
    ]


def interpreter_cases(problem: AttentionProblem, config: KernelConfig) -> list[SmallCase]:
    """Those of a device."""
    return [SmallCase(*case) for case in device_cases(problem)]


def _turned(problem: AttentionProblem, tensors: dict[str, Tensor], rows: Tensor, position: Tensor) -> Tensor:
    """`[batch, rows, heads, columns]` turned by the angles of positions `[batch, rows]`."""
    if not (turned := turned_columns(problem)):
        return rows
    where = position.clamp(0, len(tensors["cos"]) - 1)
    cos, sin = (tensors[name].double()[where][:, :, None] for name in ("cos", "sin"))
    rows = rows.clone()
    few = slice(0, turned, 2), slice(1, turned, 2)
    one, two = few if problem.op == PAIRS else (slice(0, turned // 2), slice(turned // 2, turned))
    first, second = rows[..., one].clone(), rows[..., two].clone()
    rows[..., one], rows[..., two] = first * cos - second * sin, first * sin + second * cos
    return rows
