"""The fields of a problem that make more of it than plain attention, and their values.

Sources: windows and ALiBi as in FlashAttention 2 (`window_size`, `alibi_slopes`), softcap as in Gemma 2, sinks as in
gpt-oss, the bias as `attn_mask` of `torch.nn.functional.scaled_dot_product_attention`, a head_dim of V and a V within K
as in DeepSeek V2's latent attention, used lengths and pages as `seqused_k` and `block_table` of FlashAttention 3,
packed sequences as its `flash_attn_varlen_func`, block lists as `BlockMask` of torch's FlexAttention."""

import math
import re
from typing import Any

from evoattn.model.block_list import fault_of_blocks
from evoattn.model.mask import MASKS
from evoattn.model.scales import why_not_rounded
from evoattn.model.score import parse_predicate, parse_score, parse_tables
from evoattn.model.sequences import parse_lengths, parse_sequences
from evoattn.model.turned import why_not_turned

SCORE_VARIANTS = ("window", "softcap", "sink", "alibi", "bias", "score")
"""Those that change scores: `templates/device/mask.cuh` and `score.cuh` serve them."""
KEY_VARIANTS = ("seqused", "page")
"""Those that say which keys there are and where they lie."""
ROTARY_APART = "rotary_apart"
"""K is V and, behind it, columns in a tensor of their own."""
APPENDED = "appended"
"""The last keys in use are new: a kernel writes them into the cache before it reads them."""
TURNED = "turned"
"""V of 8 bits with its keys along rows (`evoattn.model.turned`)."""
EIGHT_BITS = ("kv", "scales")
"""K and V of 8 bits under another Q, and scales of more than a tensor (`evoattn.model.scales`)."""
VARIANTS = (
    *(*SCORE_VARIANTS, "value_dim", "shared_kv", ROTARY_APART),
    *(*KEY_VARIANTS, APPENDED, "varlen", "blocks", *EIGHT_BITS, TURNED),
)
"""Each is compiled into a kernel where it is asked for, and a family says which it serves (`Family.variants`)."""
BIASES = ("s", "hs", "bs", "bhs")
"""Dimensions over which a bias differs: b batches, h heads, s queries and keys; it is broadcast over the others."""
PAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""How many keys a page may have: powers of two."""
SMALL_PAGE = 16
"""Fewer keys than these are copied row by row, by kernels of their own."""
_WINDOW = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)


def parse_window(text: str) -> tuple[int, int]:
    """(past, ahead) of `past:ahead`, e.g. `128:0`. Raises `ValueError` on anything else."""
    if match := _WINDOW.fullmatch(text):
        return int(match[1]), int(match[2])
    raise ValueError(f"{text!r} is no window of two whole numbers, past:ahead.")


def fault_of(problem: Any) -> str:
    """One sentence if the fields of a problem that make a variant of it cannot be, alone or together, else empty."""
    for field in ("sink", "alibi", "shared_kv", ROTARY_APART, APPENDED, TURNED):
        if not isinstance(value := getattr(problem, field), bool):
            return f"{field} must be true or false, not {value!r}."
    scale, softcap = problem.scale, problem.softcap
    if scale is not None and not (_is_number(scale) and 0 < scale < math.inf):
        return f"scale must be a positive number, not {scale!r}: kernels keep the largest score before it is scaled."
    if not (_is_number(softcap) and 0 <= softcap < math.inf):
        return f"softcap must be a positive number, or 0 for none, not {softcap!r}."
    if problem.bias and problem.bias not in BIASES:
        return (
            f"bias must be one of {', '.join(BIASES)} (b batches, h heads, s queries and keys), not {problem.bias!r}."
        )
    if problem.alibi and problem.bias:
        return "alibi and bias exclude each other: add the slopes to the bias, or take one of them out."
    if problem.shared_kv and problem.head_dim_v > problem.head_dim:
        return (
            f"shared_kv: V is the first columns of K, so that its head_dim of {problem.head_dim_v} must be at most "
            f"the {problem.head_dim} of K."
        )
    if problem.rotary_apart and (problem.shared_kv or problem.head_dim_v >= problem.head_dim):
        return (
            "rotary_apart: K is V and, behind it, the columns of another tensor, so that V has a smaller head_dim (Dv) "
            "and shared_kv says something else."
        )
    try:
        tables, several = parse_tables(problem.tables), bool(problem.predicate)
        if problem.score:
            parse_score(problem.score, problem.tables, several)
    except (TypeError, ValueError, AttributeError) as error:
        return f"score: {error}."
    if problem.predicate and not problem.blocks:
        return "predicate: there are no blocks in which it decides."
    try:
        if problem.predicate:
            parse_predicate(problem.predicate, problem.tables, bool(problem.score))
    except (TypeError, ValueError) as error:
        return f"predicate: {error}."
    if tables and not (problem.score or problem.predicate):
        return "tables: there is no score that uses them."
    others = tuple(name for name in VARIANTS if getattr(problem, name))
    found = _fault_of_keys(problem) or _fault_of_sequences(problem) or _fault_of_window(problem)
    found = found or why_not_turned(problem) or why_not_rounded(problem)
    return found or fault_of_blocks(problem.blocks, others)


def _fault_of_keys(problem: Any) -> str:
    """As `fault_of`, of which keys there are and where they lie."""
    if problem.seqused:
        try:
            parse_lengths(problem.seqused)
        except (TypeError, ValueError):
            return (
                "seqused must be the lowest and the highest number of keys in use, lowest:highest, e.g. 512:4096, "
                f"not {problem.seqused!r}."
            )
    if problem.appended and (reason := _fault_of_new_keys(problem)):
        return reason
    if not problem.page:
        return ""
    if not isinstance(problem.page, int) or problem.page not in PAGES:
        return f"page must be one of {', '.join(map(str, PAGES))} keys, not {problem.page!r}."
    if problem.seqused or problem.varlen:
        return ""
    return "page: paged sequences have lengths of their own; write seqused=512:4096, or varlen, too."


def _fault_of_new_keys(problem: Any) -> str:
    """As `fault_of`, of new keys."""
    if not problem.seqused or problem.op != "forward":
        return "appended: new keys lie behind those in use of the forward pass; write seqused=512:4096, too."
    others = ("value_dim", "shared_kv", "varlen", "blocks", *EIGHT_BITS, TURNED)
    if other := next((name for name in others if getattr(problem, name)), ""):
        return f"appended and {other} exclude each other: take one of them out."
    return ""


def _fault_of_sequences(problem: Any) -> str:
    """As `fault_of`, of packed sequences."""
    if not problem.varlen:
        return ""
    if not isinstance(problem.varlen, str):
        return f"varlen must be a text of lengths, e.g. 16:4096 or 3+0+17, not {problem.varlen!r}."
    if problem.bias or problem.seqused:
        other = "bias" if problem.bias else "seqused"
        return (
            f"varlen and {other} exclude each other: packed sequences have lengths of their own; take one of them out."
        )
    try:
        parse_sequences(problem.varlen, problem.batch, problem.seqlen_q, problem.seqlen_k)
    except ValueError as error:
        return f"{error}."
    return ""


def _fault_of_window(problem: Any) -> str:
    """As `fault_of`, of the window."""
    if not problem.window:
        return ""
    try:
        _, ahead = parse_window(problem.window)
    except (TypeError, ValueError):
        return f"window must be two whole numbers, past:ahead, e.g. 128:0, not {problem.window!r}."
    if MASKS[problem.mask].causal and ahead:
        return f"window={problem.window}: a causal mask hides the keys ahead; write 0 there, or take mask=full."
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
