"""A problem in words: one line for people, one name for files and studies."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evoattn.model.problem import AttentionProblem

LONGEST_LENGTHS = 40
"""Characters of lengths that a file's name may have."""


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


def short_name(problem: AttentionProblem) -> str:
    """A name for files and studies: the problem's own, else made of its shape, e.g. `b1_h16_s1024_d64_fp16_full`.

    Different problems without a name have different ones; it holds letters, digits and underscores only.
    """
    if problem.name:
        return problem.name
    p = problem
    parts = [f"b{p.batch}", f"h{p.heads}", f"kv{p.kv_heads}" if p.kv_heads != p.heads else ""]
    parts += [f"s{p.seqlen_q}"] if p.seqlen_q == p.seqlen_k else [f"sq{p.seqlen_q}", f"sk{p.seqlen_k}"]
    mask = p.masking.short or p.mask
    dims = f"d{p.head_dim}v{p.value_dim}" if p.value_dim else f"d{p.head_dim}"
    parts += [dims, p.dtype, mask, p.layout if p.layout != "bhsd" else "", "lse" if p.lse else ""]
    parts += [f"scale{_digits(p.scale)}" if p.scale else "", f"w{p.window.replace(':', '_')}" if p.window else ""]
    parts += [f"cap{_digits(p.softcap)}" if p.softcap else "", "sink" if p.sink else "", "alibi" if p.alibi else ""]
    parts += [f"bias_{p.bias}" if p.bias else "", "shared_kv" if p.shared_kv else ""]
    parts += [f"used{p.seqused.replace(':', '_')}" if p.seqused else "", f"page{p.page}" if p.page else ""]
    parts.append(_lengths_name(p.varlen))
    return "_".join(part for part in parts if part)


def _lengths_name(varlen: str) -> str:
    """Lengths in letters, digits and underscores; long lists by a hash."""
    if len(varlen) > LONGEST_LENGTHS:
        return f"varlen_{hashlib.sha256(varlen.encode()).hexdigest()[:12]}"
    for sign, word in (("/", "_k"), ("+", "_"), (":", "to")):
        varlen = varlen.replace(sign, word)
    return varlen and f"varlen_{varlen}"


def _digits(number: float) -> str:
    """A number in letters and digits, e.g. `0p125`."""
    return repr(float(number)).removesuffix(".0").replace(".", "p").replace("-", "m").replace("+", "")
