"""Files a command writes at its end: refused at its beginning when they could not be written."""

from __future__ import annotations

from pathlib import Path

from ..models.errors import RequestError
from ..runtime.staging import advice


def check_writable(file: Path, option: str) -> None:
    """Raises RequestError, naming the option, when `file` could not be written; leaves nothing behind."""
    existed = file.exists()
    try:
        with file.open("a"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise unwritable(file, option, error) from error


def write(file: Path, option: str, text: str) -> None:
    """Raises RequestError when the disk is full, or the folder gone since it was checked."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(file, option, error) from error


def unwritable(file: Path, option: str, error: OSError) -> RequestError:
    fix = advice(error, "choose a file in an existing folder")
    return RequestError(f"{option} {file} cannot be written ({error.strerror}): {fix}")
