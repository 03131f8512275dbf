"""Models that choose among attention classes of their own by the name of the implementation, as Falcon, GPT-J and SAM's
image encoder do, and know no other names."""

import functools
import inspect
import re
import sys
import warnings
from typing import Any

import torch
from transformers import PreTrainedModel

CHOOSE = "get_correct_attn_implementation"
"""The method by which a model, and each model within it, settles what its attention is called before it builds its
layers: the only place where a name can be exchanged."""


def look_after(name: str) -> None:
    """Have models that would raise `KeyError` for this name take what transformers chooses for them without one,
    "sdpa" or "eager", and a warning say so."""
    choose = getattr(PreTrainedModel, CHOOSE, None)
    if choose is None or getattr(choose, "looks_after", None) == name:
        return

    @functools.wraps(choose)
    def chosen(self: Any, requested_attention: str | None, *arguments: Any, **others: Any) -> str:
        if requested_attention != name or not _chooses_a_class(self.__class__):
            kept: str = choose(self, requested_attention, *arguments, **others)
            return kept
        found: str = choose(self, None, *arguments, **others)
        served = ", whose calls evoattn.enable() serves" if found == "sdpa" else ""
        warnings.warn(
            f'evoattn: {type(self).__name__} has attention classes of its own, none for "{name}"; it runs '
            f'attn_implementation="{found}"{served}.',
            RuntimeWarning,
            stacklevel=2,
        )
        return found

    chosen.looks_after = name  # type: ignore[attr-defined]
    setattr(PreTrainedModel, CHOOSE, chosen)


@functools.cache
def _chooses_a_class(model: Any) -> bool:
    """Whether layers of this model, those of models within it aside, are taken from a table by the name of an
    implementation."""
    return any(_reads_a_table(base) for base in model.__mro__ if issubclass(base, PreTrainedModel))


def _reads_a_table(model: Any) -> bool:
    """As `_chooses_a_class`, of the code of this class alone. False where it cannot be read."""
    module = sys.modules.get(model.__module__)
    things: dict[str, Any] = {} if module is None else vars(module)
    tables = {name for name, thing in things.items() if _is_table(thing)}
    seen: set[str] = set()
    to_read = [model] if tables else []
    while to_read:
        try:
            names = set(re.findall(r"\w+", inspect.getsource(to_read.pop()))) - seen
        except (OSError, TypeError):
            continue
        if names & tables:
            return True
        seen |= names
        found = (things[name] for name in names if _is_layer(things.get(name)))
        to_read += [layer for layer in found if not issubclass(layer, PreTrainedModel)]
    return False


def _is_layer(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, torch.nn.Module)


def _is_table(thing: object) -> bool:
    return isinstance(thing, dict) and "eager" in thing and all(map(_is_layer, thing.values()))
