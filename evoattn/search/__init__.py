"""The search. Called, `evoattn.search(problem, budget="1m")` is `evoattn.search.api.search`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evoattn.search.api import SearchResult


class _Room(ModuleType):
    """A package under whose name Python users find a function."""

    def __call__(self, *arguments: Any, **words: Any) -> SearchResult:
        from evoattn.search.api import search

        return search(*arguments, **words)


sys.modules[__name__].__class__ = _Room
