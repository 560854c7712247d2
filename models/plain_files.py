"""Reads plain files of a bounded size. Links in a checkpoint are followed, as in a Hub's cache; a bundle has none."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

MAX_JSON = 16 << 20  # bytes of a file of settings
MAX_TOKENIZER = 64 << 20  # bytes of tokenizer.json; the largest published ones have 35 MB


def check_plain(file: Path, most: int | None = None) -> None:
    """Check that a path is a plain file of at most `most` bytes. Raises ValueError for a larger file, and for a folder,
    a pipe, a socket or a device, whose reader may wait for ever. Raises OSError, for instance FileNotFoundError."""
    check_status(file.stat(), most)


def check_status(found: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no plain file, but a folder, pipe, socket or device")
    if most is not None and found.st_size > most:
        raise ValueError(f"it has {found.st_size} bytes, more than the {most} that are read")


def open_plain(file: Path, most: int | None = None, own: bool = False) -> BinaryIO:
    """Open a plain file for reading. own, and the errors: see `read_plain`."""
    # A pipe without a writer would block when it is opened.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | (getattr(os, "O_NOFOLLOW", 0) if own else 0)
    handle = os.fdopen(os.open(file, flags), "rb")
    try:
        check_status(os.fstat(handle.fileno()), most)
    except ValueError:
        handle.close()
        raise
    return handle


def read_plain(file: Path, most: int, own: bool = False) -> bytes:
    """The content of a plain file of at most `most` bytes. own: whether this project wrote the file; then a link in its
    place raises OSError. Raises as `check_plain` does."""
    with open_plain(file, most, own) as handle:
        content = handle.read(most + 1)
    if len(content) > most:  # it grew meanwhile
        raise ValueError(f"it has more than {most} bytes")
    return content


def read_object(file: Path, most: int = MAX_JSON, own: bool = False) -> dict[str, Any]:
    """Read the object in a JSON file. own: see `read_plain`; such a file must hold finite numbers only. Raises as
    `read_plain` does, and ValueError for any other content."""
    return parse_object(read_plain(file, most, own), own)


def parse_object(text: bytes, strict: bool) -> dict[str, Any]:
    """The object in a JSON text. strict: numbers are finite, and no object names a field twice, of which another parser
    may take the other one. Raises ValueError."""
    try:
        if strict:
            content = json.loads(text.decode(), parse_constant=refuse_constant, object_pairs_hook=unambiguous)
        else:
            content = json.loads(text.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    return content


def unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("an object of it names a field twice")
    return content


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """The lines of JSON, numbered from 1. JSON may hold what else ends lines in Python, such as U+2028."""
    return ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is no number")
