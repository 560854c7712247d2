"""JSON files of strangers: plain files of a bounded size, read without a link, a wait or a surprise."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

MOST_BYTES = 16 << 20


def read_object(file: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """The object in a file of at most so many bytes. Raises OSError, among them FileNotFoundError, and ValueError for
    anything but a plain file with one JSON object of finite numbers."""
    # A pipe without a writer would block when it is opened.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with os.fdopen(os.open(file, flags), "rb") as handle:
        found = os.fstat(handle.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no plain file")
        if found.st_size > most:
            raise ValueError(f"it has {found.st_size} bytes, more than {most}")
        text = handle.read(most + 1)
    try:
        content = json.loads(text.decode("utf-8"), parse_constant=refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    return content


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is no number")
