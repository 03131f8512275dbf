"""YAML of plain values from files that may be anybody's: no tags, no key twice, no aliases that multiply, of bounded
size."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES, MAX_ALIASES = 1 << 20, 1000
"""No space comes near. An alias may stand for a list, but not for one with an alias in it: seven such levels would be a
billion values. `<<: *one` may nest: a mapping that starts from another one has each key once however often that is
done."""

MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._aliases = self._anchors_open = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            self._aliases += 1
            merged = isinstance(index, yaml.ScalarNode) and index.value == "<<"
            if (self._anchors_open and not merged) or self._aliases > MAX_ALIASES:
                raise yaml.YAMLError(f"an alias inside an anchored value, or more than {MAX_ALIASES} aliases")
            return super().compose_node(parent, index)
        anchored = self.peek_event().anchor is not None
        self._anchors_open += anchored
        node = super().compose_node(parent, index)
        self._anchors_open -= anchored
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value if key.tag == MERGE else self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for n, key in enumerate(keys) if key in keys[:n]]
        if twice:
            raise yaml.YAMLError(f"the key {twice[0]!r} stands twice in one place (line {node.start_mark.line + 1})")
        return super().construct_mapping(node, deep)


@lru_cache(maxsize=64)
def load(text: str) -> Any:
    """The value of a YAML text, which is parsed once in a process (20 ms for a space): the caller changes nothing in
    it. Raises `yaml.YAMLError` on anything else than plain values, written once."""
    if len(text) > MAX_BYTES:
        raise yaml.YAMLError(f"it is longer than {MAX_BYTES} characters")
    try:
        return yaml.load(text, _Loader)
    except (
        RecursionError,
        ValueError,
        TypeError,
        OverflowError,
    ) as error:  # nested too deep; a date, a number or a key that cannot be
        raise yaml.YAMLError(f"it cannot be read ({type(error).__name__})") from None


def load_file(path: Path) -> Any:
    """As `load`. Raises `OSError` too, and `yaml.YAMLError` on text that is not UTF-8."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    try:
        return load(data.decode())
    except UnicodeDecodeError:
        raise yaml.YAMLError("it is not UTF-8") from None
