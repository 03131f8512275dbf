"""A problem in one line for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evoattn.model.problem import AttentionProblem


def describe(problem: AttentionProblem) -> str:
    """E.g. `seed_h100: B=1 H=16 S=1024 D=64 fp16 full`: what every problem has, then what is unusual in this one."""
    p = problem
    parts = [f"B={p.batch}", f"H={p.heads}" if p.kv_heads == p.heads else f"H={p.heads}/{p.kv_heads}"]
    parts.append(f"S={p.seqlen_q}" if p.seqlen_q == p.seqlen_k else f"Sq={p.seqlen_q} Sk={p.seqlen_k}")
    parts.append(f"D={p.head_dim} Dv={p.value_dim}" if p.value_dim else f"D={p.head_dim}")
    parts += [p.dtype, p.mask]
    if p.layout != "bhsd":
        parts.append(p.layout)
    if p.scale is not None:
        parts.append(f"scale={_number(p.scale)}")
    for field in p.variants:
        value = getattr(p, field)
        if field != "value_dim":
            text = _number(value) if field == "softcap" else value
            parts.append(field if value is True else f"{field}={text}")
    if p.lse:
        parts.append("lse")
    text = " ".join(parts)
    return f"{p.name}: {text}" if p.name else text


def _number(value: float) -> str:
    """In as many digits as tell it from every other number, so that the line can be read back."""
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))
