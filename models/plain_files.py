"""Files that a stranger may have made: only plain ones of a bounded size are read. Links are followed, since every file
of a hub's cache is one."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_JSON = 16 << 20  # bytes of a file of settings
MOST_TOKENIZER = 256 << 20  # bytes of tokenizer.json or tokenizer.model; the largest published ones have 35 MB


def check_plain(file: Path, most: int | None = None) -> None:
    """Raises OSError, among them FileNotFoundError, and ValueError for a folder, a pipe, a socket or a device, whose
    reader may wait for ever, and for more than `most` bytes."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no plain file, but a folder, pipe, socket or device")
    if most is not None and found.st_size > most:
        raise ValueError(f"it has {found.st_size} bytes, and at most {most} are read")


def read_plain(file: Path, most: int) -> bytes:
    """The content of a plain file of at most `most` bytes. Raises as `check_plain` does."""
    check_plain(file, most)
    # What was checked may have been replaced since: a pipe must not block this, nor a growing file fill the memory.
    with os.fdopen(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as handle:
        content = handle.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    return content


def read_object(file: Path, most: int = MOST_JSON) -> dict[str, Any]:
    """The object in a JSON file. Raises as `read_plain` does, and ValueError for anything else."""
    try:
        content = json.loads(read_plain(file, most).decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    return content
