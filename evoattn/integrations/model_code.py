"""What the code of a transformers model says of how it calls attention, by the config that a mask is made for."""

import functools
import inspect
import re
import sys
import warnings
from typing import Any, get_args

import torch
from transformers import PreTrainedModel

HANDS_ON = re.compile(r"attention_interface\(\s(?:[^()]|\([^()]*\))*?\bsliding_window=")
"""A call of attention with the window of its layer."""
MAKES_WINDOWS = re.compile(r"\bcreate_(?:bidirectional_)?sliding_window\w*mask|\bcreate_masks_for_generate\b")
"""The model has masks made for its windows."""
BEYOND_SDPA = re.compile(r"attention_interface\(\s(?:[^()]|\([^()]*\))*?\b(?:s_aux|softcap)=")
"""A call of attention with sinks or a soft cap."""
NOT_CAUSAL, CAUSAL = "is_causal: bool = False", re.compile(r"\bis_causal=(?!False)")
"""Layers that are not causal unless they are told so, and what tells them."""
WANTS_MASKS = re.compile(
    r"\ballow_is_causal_skip\W{1,3}False|^class \w*Indexer\b|\b(?:attention|attn)_mask\.dtype [!=]= torch\.bool", re.M
)
"""The model asks for a mask tensor in any case, selects keys, or makes another mask of the one that it gets."""
FUSED = "_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn"


def _model_of(config_class: Any) -> Any:
    """A model class of this class of configs, None where there is none in its package."""
    return _search(config_class, len(sys.modules))


@functools.lru_cache
def _search(config_class: Any, _loaded: int) -> Any:
    """As `_model_of`, among `_loaded` modules: looked for again only where there are more."""
    package = config_class.__module__.rpartition(".")[0]
    modules = [sys.modules[name] for name in list(sys.modules) if package and name.startswith(f"{package}.modeling_")]
    for module in modules:
        for found in list(vars(module).values()):
            own = isinstance(found, type) and issubclass(found, PreTrainedModel) and found.__module__ == module.__name__
            if own and config_class in (found.config_class, *get_args(found.config_class)):  # which may be a union
                return found
    return None


@functools.cache
def _code(model: Any) -> str:
    """Of the model's module; empty where it cannot be read."""
    try:
        return inspect.getsource(sys.modules[model.__module__])
    except (OSError, TypeError):
        return ""


@functools.cache
def _takes_attention(model: Any) -> bool:
    """As `takes_attention`. Transformers refuses no model of a registered name. One for which it refuses all of its own
    fused attention, or "sdpa" though nothing is asked for that "sdpa" lacks, wants masks that are added to scores."""
    fused = any(getattr(model, name, False) for name in FUSED)
    takes = model._can_set_attn_implementation() and fused
    takes = takes and bool(model._supports_sdpa or BEYOND_SDPA.search(_code(model)))
    if not takes:
        warnings.warn(
            f"evoattn: transformers has no fused attention for all of {model.__name__}; it gets the masks of "
            'attn_implementation="eager".',
            RuntimeWarning,
            stacklevel=2,
        )
    return takes


@functools.cache
def _hands_on_windows(model: Any) -> bool:
    code = _code(model)
    return bool(HANDS_ON.search(code) and MAKES_WINDOWS.search(code))


@functools.cache
def _says_causal(model: Any) -> bool:
    code = _code(model)
    return NOT_CAUSAL not in code or CAUSAL.search(code) is not None


@functools.cache
def _wants_masks(model: Any) -> bool:
    return WANTS_MASKS.search(_code(model)) is not None


# What is asked within a trace is a constant of it. It takes the class of a config: for torch 2.11's compiler a config
# itself is no constant, and it ends with an error of its own.


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_exporting() -> bool:
    """`torch.compiler.is_exporting()`, which in compiled code of torch 2.11 is always true."""
    return bool(torch.compiler.is_exporting())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def takes_attention(config_class: Any) -> bool:
    """Whether the layers of a model of this config call the attention that they are asked for, and say what they need
    of it. True where its code is not known. Warns once of each model for which it is not so."""
    model = _model_of(config_class)
    return model is None or _takes_attention(model)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def calls_interface(config_class: Any) -> bool:
    """Whether a model of this config calls transformers' attention interface. True where its code is not known."""
    model = _model_of(config_class)
    return model is None or bool(model._can_set_attn_implementation())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def hands_on_windows(config_class: Any) -> bool:
    """Whether the sliding windows of this config's masks are those that layers hand to their attention, so that no mask
    tensor is needed for them. Some models do the one or the other only. False where the code is not known."""
    model = _model_of(config_class)
    return model is not None and _hands_on_windows(model)


def says_causal(config: Any) -> bool:
    """Whether a layer of a model of this config says that it is causal where it is. Those of UMT5's decoder and of some
    others do not, nor PaliGemma's, whose prefixes see all of themselves: they need a mask tensor, which "sdpa" does not
    give them. True where the code is not known."""
    if _attribute(config, "use_bidirectional_attention") is True:
        return False
    found: bool = _code_says_causal(type(config))
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _code_says_causal(config_class: Any) -> bool:
    model = _model_of(config_class)
    return model is None or _says_causal(model)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def wants_masks(config_class: Any) -> bool:
    """Whether a model of this config reads mask tensors itself, as an indexer does that selects keys, or adds to them,
    as Doge does, so that it needs them and nothing else may take their place. False where the code is not known."""
    model = _model_of(config_class)
    return model is not None and _wants_masks(model)


def window_of(config: Any) -> int | None:
    """What a config calls its sliding window; None where it has none, or one for each layer."""
    window = _attribute(config, "sliding_window")
    return window if isinstance(window, int) else None


def _attribute(config: Any, name: str) -> Any:
    """None where there is no such thing, or one for each of layers that differ."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None
