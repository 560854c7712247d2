"""The files of a state folder: replaced atomically, the time spent on text among them, and the lock of the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ...models.errors import ConfigError
from ...models.plain_files import read_object
from ...runtime.bundle.staging import try_lock


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for the only process that writes to it. Raises ConfigError when another process does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}; choose another --state") from error
    lock = try_lock(folder)
    if lock is None and os.name == "posix":
        raise ConfigError(f"another process works in {folder}: wait for it, or choose another --state")
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Replace a file. Raises ConfigError, see `replace_file`."""
    write_text(file, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_text(file: Path, text: str) -> None:
    """Replace a file. Raises ConfigError, see `replace_file`."""
    replace_file(file, lambda partial: partial.write_text(text, encoding="utf-8"))


def replace_file(file: Path, write: Callable[[Path], object]) -> None:
    """Replace a file by what `write` writes to another path. Raises ConfigError when there is no room; the older file
    is then kept."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        write(partial)
        os.replace(partial, file)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(
            f"{file} cannot be written ({error}): free some space and run the same command again; what was written "
            "before is kept"
        ) from error


def read_seconds(file: Path) -> float:
    """The seconds that earlier runs spent on text; 0 where there is no such file. Raises ConfigError."""
    if not file.is_file():
        return 0.0
    try:
        seconds = read_object(file, own=True).get("seconds")
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds <= 1e10:
            raise ValueError(f"its seconds are {seconds!r}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not readable ({error}): remove it; the texts beside it stay usable") from error
    return float(seconds)
