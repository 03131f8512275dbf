"""Decoding with a static cache of transformers: how many of its places are filled is a tensor on the device. Steps
over a growing cache with padding are taken as steps over a static one whose places are all filled."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evoattn.model.mask import CAUSAL_LOWER_RIGHT, FULL
from evoattn.model.problem import BIAS_ROW_STEP, AttentionProblem, ProblemError
from evoattn.ops.arguments import DTYPES
from evoattn.ops.attention import attend
from evoattn.ops.call import Call, strided, terms_of
from evoattn.ops.choice import Refusal
from evoattn.ops.runtime import current

MOST_QUERIES = 8
"""The most queries of a step; more are a prompt, for which a mask tensor costs little."""
PLACES_STEP = 256
"""Places are rounded up to a multiple of it before it is asked whether a kernel serves a step: one answer is for many
lengths of a growing cache."""
TRACES_NO_COPY = torch.__version__ < "2.12"
"""Whether compiled code cannot have the config of one layer, which transformers makes by `copy.copy`: then a mask
tensor is made."""
FILLED_STEP = 4
"""`padded_places` has room for a multiple of it of numbers, int32: the bias behind them begins at 16 bytes."""


def kernel_serves(
    config: Any, batch: int, queries: int, places: int, dtype: object, device: torch.device, padded: bool = False
) -> bool:
    """Whether a kernel would run for a step of a model of this config: without one a mask tensor, made once for all
    layers, is cheaper. `padded`: with a bias that hides padding."""
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        return False
    sizes = _sizes(config)
    # A range makes numbers of symbols: a trace is of these sizes, and another one is made for others.
    lengths = len(range(queries)), _up_to(len(range(places)), PLACES_STEP)
    index = -1 if device.type == "cpu" else device.index or 0  # as Tensor.get_device() says
    served = [
        _serves(len(range(batch)), *heads, *lengths, *head_dims, DTYPES[dtype], device.type, index, padded)
        for heads, head_dims in sizes
    ]
    return bool(served) and all(served)


def _sizes(config: Any) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """((heads, K/V heads), head_dims of K and of V) of the layers without a window, which share a mask; none where they
    are not known. Those of Gemma 4 differ. A key of latent attention (DeepSeek) has a rotated and a plain part."""
    layers = [config]
    if getattr(config, "is_heterogeneous", False):
        if TRACES_NO_COPY and torch.compiler.is_compiling():
            return []
        types = getattr(config, "layer_types", None) or []
        full = [i for i, kind in enumerate(types) if kind == "full_attention"]
        layers = [config.per_layer_config[i] for i in full]
    found = []
    for layer in layers:
        heads, hidden = getattr(layer, "num_attention_heads", None), getattr(layer, "hidden_size", None)
        if not heads or not hidden:
            return []
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        head_dim = getattr(layer, "head_dim", None) or hidden // heads
        value_dim = head_dim
        plain, rotated, value = (getattr(layer, f"{name}_head_dim", None) for name in ("qk_nope", "qk_rope", "v"))
        if plain and rotated and value:
            head_dim, value_dim = plain + rotated, value
        found.append(((heads, kv_heads), (head_dim, value_dim)))
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _serves(
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    places: int,
    head_dim: int,
    value_dim: int,
    dtype: str,
    kind: str,
    index: int,
    padded: bool,
) -> bool:
    """As `kernel_serves`; of a trace a constant."""
    runtime = current.runtime()
    if runtime.platform is None or kind != runtime.device_type:
        return False
    shape = batch, heads, kv_heads, queries, places, head_dim
    asked = *shape, value_dim, dtype, index, padded
    known = runtime.served
    if (served := known.get(asked)) is None:
        gpu = runtime.platform.spec(index)
        mask = CAUSAL_LOWER_RIGHT if queries > 1 else FULL
        try:
            bias = ("bs" if batch > 1 else "s") if padded else ""
            problem = AttentionProblem(*shape, dtype, mask, seqused=f"0:{places}", bias=bias, value_dim=value_dim)
        except ProblemError:
            gpu = None
        choice = runtime.choose(strided(problem), gpu, index=index) if gpu else Refusal("")
        served = not isinstance(choice, Refusal) and not runtime.failure(choice, index)
        known[asked] = served
    return served


def filled_places(batch: int, queries: int, offset: Tensor) -> Tensor:
    """In place of a mask tensor: the keys of each sequence after this step, int32 `[batch, 1, 1, 1]`. Four dimensions,
    as transformers passes such on as they are."""
    return (offset + queries).to(torch.int32).reshape(-1, 1, 1, 1).repeat(batch, 1, 1, 1)


def padded_places(batch: int, offset: Tensor, padding: Tensor, places: int, dtype: torch.dtype) -> Tensor:
    """As `filled_places`, for one query per sequence, some of whose keys are padding: int32 `[1, 1, 1, words]`.

    First the keys of each sequence, in whole 16 bytes; then a bias `[batch, places]` of `dtype`, in rows of whole 8
    elements, that is -inf at padding. `padding`, bool `[batch, keys so far]`, is true at real keys; nothing is read
    back from the device, so whether there is any padding does not matter."""
    filled = (offset + 1).to(torch.int32).reshape(-1).expand(batch)
    columns = _up_to(places, BIAS_ROW_STEP)
    hidden = torch.zeros(batch, columns, dtype=dtype, device=padding.device)
    hidden[:, : padding.shape[1]].masked_fill_(~padding[:, :columns], -math.inf)
    words = torch.nn.functional.pad(filled, (0, _up_to(batch, FILLED_STEP) - batch))
    return torch.cat((words, hidden.view(torch.int32).flatten())).reshape(1, 1, 1, -1)


@dataclass(frozen=True)
class Places:
    """What a step sees of its cache: `filled` keys of each sequence, int32 `[batch]`, and where there may be padding
    the `bias` that hides it, `[batch, 1, 1, places]`."""

    filled: Tensor
    bias: Tensor | None

    def as_mask(self, queries: int, places: int) -> Tensor:
        """The mask tensor that says the same, bool `[batch, 1, queries, places]`."""
        rows = torch.arange(queries, device=self.filled.device)[:, None]
        seen = torch.arange(places, device=self.filled.device) <= self.filled[:, None, None, None] - queries + rows
        return seen if self.bias is None else seen & (self.bias == 0)


def places_of(mask: Tensor | None, batch: int, places: int, dtype: torch.dtype) -> Places | None:
    """What `filled_places` or `padded_places` put into a mask's place; None of another mask."""
    if mask is None or mask.dtype != torch.int32 or mask.dim() != 4:
        return None
    if mask.shape == (batch, 1, 1, 1):
        return Places(mask.reshape(-1), None)
    begin, columns = _up_to(batch, FILLED_STEP), _up_to(places, BIAS_ROW_STEP)
    if mask.shape != (1, 1, 1, begin + batch * columns * dtype.itemsize // mask.itemsize):
        return None
    bias = mask.reshape(-1)[begin:].view(dtype).reshape(batch, 1, 1, columns)[..., :places]
    return Places(mask.reshape(-1)[:batch], bias)


def _up_to(count: int, step: int) -> int:
    """`count` up to a multiple of `step`."""
    return -(-count // step) * step


def attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Places, scale: float | None, softcap: float, sinks: Tensor | None
) -> Tensor:
    """A step's attention `[batch, heads, queries, head_dim]` over a cache whose empty places hold zeros."""
    answer = attend(
        Call(
            query,
            key,
            value,
            CAUSAL_LOWER_RIGHT if query.shape[2] > 1 else FULL,
            scale,
            key.shape[1] != query.shape[1],
            softcap=softcap,
            terms=terms_of(sinks=sinks, bias=seen.bias, seqused_k=seen.filled),
            finite=True,
        )
    )
    assert isinstance(answer, Tensor)
    return answer
