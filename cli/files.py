"""Files of commands. Whether output files can be written is checked at the beginning of a command."""

from __future__ import annotations

from pathlib import Path

from ..models.errors import RequestError
from ..runtime.bundle.staging import advice


def read(file: Path, option: str) -> str:
    """The text of an input file. Raises RequestError that names the option."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{option} {file} cannot be read: {error}") from error


def check_writable(file: Path, option: str) -> None:
    """Raises RequestError that names the option if `file` cannot be written. Leaves no file behind."""
    existed = file.exists()
    try:
        with file.open("a"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise unwritable(file, option, error) from error


def write(file: Path, option: str, text: str) -> None:
    """Write `text`. Raises RequestError if the disk is full, or the folder was removed after the check."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(file, option, error) from error


def unwritable(file: Path, option: str, error: OSError) -> RequestError:
    fix = advice(error, "choose a file in an existing folder")
    return RequestError(f"{option} {file} cannot be written ({error.strerror}): {fix}")
