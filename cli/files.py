"""Files of commands. Whether output files can be written is checked at the beginning of a command."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..models.errors import RequestError
from ..runtime.bundle.bundle import COSTS, MANIFEST, EngineBundle
from ..runtime.bundle.staging import advice


def read(file: Path, option: str) -> str:
    """The text of an input file. Raises RequestError that names the option."""
    try:
        return file.read_text(encoding="utf-8-sig")  # editors of Windows put a byte order mark before a text
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{option} {file} cannot be read ({reason}): give a text file in UTF-8") from error


def check_writable(file: Path, option: str, inputs: Iterable[Path | None] = ()) -> None:
    """Raises RequestError that names the option if `file` cannot be written, or is one of the command's input files.
    Leaves no file behind, also where a link points to a file that does not exist yet."""
    if any(each is not None and same_file(file, each) for each in inputs):
        raise RequestError(f"{option} {file} would replace a file that this command reads: choose another one")
    existed = file.exists()
    try:
        with file.open("a"):
            pass
        if not existed:
            os.unlink(os.path.realpath(file))
    except OSError as error:
        raise unwritable(file, option, error) from error


def same_file(one: Path, other: Path) -> bool:
    """Whether two names are those of one file, which exists."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def files_of(bundle: EngineBundle) -> list[Path]:
    """The files that a bundle is read from."""
    return [bundle.folder / name for name in (MANIFEST, COSTS, *bundle.manifest.files)]


def write(file: Path, option: str, text: str) -> None:
    """Write `text`. Raises RequestError if the disk is full, or the folder was removed after the check."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(file, option, error) from error


def unwritable(file: Path, option: str, error: OSError) -> RequestError:
    fix = advice(error, "choose a file in an existing folder")
    return RequestError(f"{option} {file} cannot be written ({error.strerror}): {fix}")
