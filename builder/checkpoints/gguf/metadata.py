"""Values of a GGUF file's metadata, read by key and type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ....models.errors import CheckpointError, shown

Value = TypeVar("Value", int, float, bool, str, "list[Any]", "np.ndarray[Any, Any]")
AGAIN = "convert the model again with a current convert_hf_to_gguf.py"
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list of texts",
    np.ndarray: "a list of numbers",
}


class Metadata:
    """The metadata of a file. It remembers which keys were read, so that the others can be refused by name."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file, self._values = file, values
        self._asked: set[str] = set()

    def get(self, key: str, kind: type[Value]) -> Value | None:
        """A value, or None when the key is absent. Raises CheckpointError for a value of another type."""
        self._asked.add(key)
        value = self._values.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise CheckpointError(f"{self.file}: {key} must be {KINDS[kind]}, found {shown(value)}; {AGAIN}")
        found: Value = value
        return found

    def need(self, key: str, kind: type[Value]) -> Value:
        """A value that must be there. Raises CheckpointError."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.file}: its metadata lacks {key}; {AGAIN}")
        return value

    def unread(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix` and were not read."""
        return sorted(key for key in self._values if key.startswith(prefix) and key not in self._asked)
