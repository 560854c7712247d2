"""Folders that are written all or nothing: made beside their place, and renamed when everything succeeded.

A process holds a lock on the folder it fills, which the system drops however the process ends. So the next one that
writes to the same place knows what is left over there, and removes it.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..models.errors import DraftwoodError

# The last: an OSError without a number is numpy's, which wrote less than it should.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)


@contextmanager
def staging_folder(output: Path, marker: str, refusal: type[DraftwoodError]) -> Iterator[Path]:
    """A temporary folder beside `output` that takes its place when the block ends well, and vanishes otherwise.

    marker: the file by which an older result is known, which is replaced. Raises `refusal` when `output` is something
    else than that or an empty folder, when it cannot be written, and instead of any OSError of the block.
    """
    if output.exists() and not replaceable(output, marker):
        raise refusal(f"{output} exists and has no {marker}: choose another --output, or remove it yourself")
    # Locked before it has the name by which others find what is left over.
    unnamed, staging = sibling(output, "new"), sibling(output, "partial")
    lock: int | None = None
    try:
        try:
            remove_left_over(output)
            unnamed.mkdir(parents=True)
            lock = locked(unnamed)
            unnamed.rename(staging)
        except OSError as error:
            raise refusal(f"cannot write beside {output}: {error.strerror}; choose another --output") from error
        yield staging
        move_into_place(staging, output)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise refusal(
                f"no room to write {output} ({error.strerror or error}): free some space or choose an --output on "
                "another disk"
            ) from error
        raise refusal(f"{output} was not written: {error}") from error
    finally:
        for folder in (unnamed, staging):
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def advice(error: OSError, otherwise: str) -> str:
    """What to do about a file that cannot be written."""
    return "free some space" if error.errno in NO_ROOM else otherwise


def remove_left_over(output: Path) -> None:
    """What processes that were killed left beside `output`: gigabytes, where models are large."""
    for folder in output.parent.glob(f".{glob.escape(output.name)}.partial-*"):
        if (lock := locked(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock until it is closed. None where another process holds it, the folder is
    gone, or the system has no such locks, as Windows and some network file systems."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def replaceable(output: Path, marker: str) -> bool:
    return output.is_dir() and ((output / marker).is_file() or not any(output.iterdir()))


def move_into_place(staging: Path, output: Path) -> None:
    """Rename; an older folder steps aside first and comes back should the rename fail, or be interrupted."""
    if not output.exists():
        staging.rename(output)
        return
    old = sibling(output, "old")
    try:
        output.rename(old)
        staging.rename(output)
    except BaseException:
        if old.exists() and not output.exists():
            old.rename(output)
        raise
    finally:
        if output.exists():
            shutil.rmtree(old, ignore_errors=True)


def sibling(output: Path, kind: str) -> Path:
    """An unused name beside `output`, so that a rename never crosses a file system."""
    return output.with_name(f".{output.name}.{kind}-{secrets.token_hex(4)}")
