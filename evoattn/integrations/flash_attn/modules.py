"""Modules under FlashAttention's names, for libraries that import them: transformers, diffusers, TransformerEngine."""

import importlib.metadata
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import evoattn
from evoattn.integrations.flash_attn import low_level_2, low_level_3, padding, version_2, version_3

LABEL = f"evoattn.{evoattn.__version__}"
VERSIONS = {"flash-attn": f"2.8.2+{LABEL}", "flash-attn-3": f"3.0.0+{LABEL}"}
"""What `importlib.metadata` says while the modules are installed: the version whose functions these are, and who made
them. Not the newest: TransformerEngine refuses versions over 2.8.3, and a label counts as more than none."""
CONTENTS: dict[str, tuple[ModuleType, ...]] = {
    "flash_attn_interface": (version_3, low_level_3),
    "flash_attn_3": (),
    "flash_attn_3.flash_attn_interface": (version_3, low_level_3),
    "flash_attn": (version_2,),
    "flash_attn.flash_attn_interface": (version_2, low_level_2),
    "flash_attn.bert_padding": (padding,),
    "flash_attn_2_cuda": (low_level_2,),
}
"""What is in each module that `install` makes: all functions of these."""
TOP_LEVEL = {"flash-attn": "flash_attn\nflash_attn_2_cuda\n", "flash-attn-3": "flash_attn_3\nflash_attn_interface\n"}
LOOKED = ("transformers", "diffusers", "transformer_engine")
"""Libraries that look for FlashAttention when they are imported, and remember what they found."""


def install(*, replace: bool = False) -> None:
    """From here on `import flash_attn_interface`, `flash_attn_3` and `flash_attn` give evoattn's functions, in this
    process. Call it before libraries are imported that look for FlashAttention.

    Raises `RuntimeError` where FlashAttention itself is there, unless `replace` is given."""
    if _installed():
        return
    for name in CONTENTS:
        top = name.partition(".")[0]
        if not replace and (top in sys.modules or importlib.util.find_spec(top) is not None):
            raise RuntimeError(f"{top} is there already; install(replace=True) puts evoattn's functions in its place.")
    if early := [name for name in LOOKED if name in sys.modules]:
        warnings.warn(
            f"evoattn: {early[0]} was imported before and may have found that there is no FlashAttention; call "
            "install() first.",
            RuntimeWarning,
            stacklevel=2,
        )
    made = {name: _module(name) for name in CONTENTS}
    for name, module in made.items():
        if name.partition(".")[0] in sys.modules:
            _replaced[name] = sys.modules.get(name)
        sys.modules[name] = module
        package, _, last = name.rpartition(".")
        if package:
            setattr(made[package], last, module)
    sys.meta_path.insert(0, _FINDER)


def uninstall() -> None:
    """Undo `install`. Libraries keep the functions that they imported."""
    for name in CONTENTS:
        if getattr(sys.modules.get(name), "__evoattn__", False):
            del sys.modules[name]
        if (before := _replaced.pop(name, None)) is not None:
            sys.modules[name] = before
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)


_replaced: dict[str, ModuleType | None] = {}


def _installed() -> bool:
    return _FINDER in sys.meta_path


def _module(name: str) -> ModuleType:
    module = ModuleType(name, f"evoattn's functions under the name of FlashAttention's {name}.")
    is_package = any(other.startswith(f"{name}.") for other in CONTENTS)
    module.__spec__ = ModuleSpec(name, None, origin=__file__, is_package=is_package)
    module.__file__ = __file__
    if is_package:
        module.__path__ = []
    distribution = next(one for one, tops in TOP_LEVEL.items() if name.partition(".")[0] in tops.split())
    made: dict[str, Any] = {"__version__": VERSIONS[distribution], "__evoattn__": True}
    for source in CONTENTS[name]:
        made |= {
            key: thing for key, thing in vars(source).items() if getattr(thing, "__module__", "") == source.__name__
        }
    vars(module).update(made)
    return module


class _Distribution(importlib.metadata.Distribution):
    """What `importlib.metadata` reads of an installed package, here of none: version and top-level names."""

    def __init__(self, name: str) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {VERSIONS[name]}\n"
            "Summary: evoattn's functions under FlashAttention's names\n",
            "top_level.txt": TOP_LEVEL[name],
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / str(path)


class _Finder(importlib.metadata.DistributionFinder):
    """Names the distributions while they are installed; finds no modules, as these are loaded."""

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        name = getattr(context, "name", None)
        wanted = None if name is None else re.sub(r"[-_.]+", "-", name).lower()
        yield from (_Distribution(one) for one in VERSIONS if wanted in (None, one))


_FINDER = _Finder()
