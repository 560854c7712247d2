"""Folders that are written all or nothing: made beside their place, and renamed when everything succeeded."""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..models.errors import DraftwoodError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def staging_folder(output: Path, marker: str, refusal: type[DraftwoodError]) -> Iterator[Path]:
    """A temporary folder beside `output` that takes its place when the block ends well, and vanishes otherwise.

    marker: the file by which an older result is known, which is replaced. Raises `refusal` when `output` is something
    else than that or an empty folder, when it cannot be written, and instead of any OSError of the block.
    """
    if output.exists() and not replaceable(output, marker):
        raise refusal(f"{output} exists and has no {marker}: choose another --output, or remove it yourself")
    staging = sibling(output, "partial")
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise refusal(f"cannot write beside {output}: {error.strerror}; choose another --output") from error
    try:
        yield staging
        move_into_place(staging, output)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise refusal(
                f"no room to write {output} ({error.strerror}): free some space or choose an --output on another disk"
            ) from error
        raise refusal(f"{output} was not written: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def replaceable(output: Path, marker: str) -> bool:
    return output.is_dir() and ((output / marker).is_file() or not any(output.iterdir()))


def move_into_place(staging: Path, output: Path) -> None:
    """Rename; an older folder steps aside first and comes back should the rename fail."""
    if not output.exists():
        staging.rename(output)
        return
    old = sibling(output, "old")
    output.rename(old)
    try:
        staging.rename(output)
    except OSError:
        old.rename(output)
        raise
    shutil.rmtree(old, ignore_errors=True)


def sibling(output: Path, kind: str) -> Path:
    """An unused name beside `output`, so that a rename never crosses a file system."""
    return output.with_name(f".{output.name}.{kind}-{secrets.token_hex(4)}")
