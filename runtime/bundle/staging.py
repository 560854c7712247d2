"""Writes folders atomically: a folder is written beside its final place, and renamed when everything succeeded.

A process holds a lock on the folder that it writes. The system releases the lock when the process ends for any reason.
Therefore the next process that writes to the same place can recognise left-over folders, and removes them.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...models.errors import DraftwoodError

# None: numpy raises an OSError without a number if it could not write everything.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)


@contextmanager
def staging_folder(output: Path, marker: str, refusal: type[DraftwoodError]) -> Iterator[Path]:
    """A temporary folder beside `output`. It replaces `output` if the block succeeds, and is removed otherwise.

    marker: a file that identifies an older result, which may be replaced. Where `output` is a symbolic link, the folder
    that it leads to is replaced, and the link stays. Raises `refusal` if `output` is neither an older result nor an
    empty folder, if it cannot be written, and instead of any OSError of the block.
    """
    try:
        output = output.resolve()
    except (OSError, RuntimeError) as error:  # links that lead to each other
        raise refusal(f"{output} leads nowhere ({error}): choose another --output") from error
    if output.exists() and not replaceable(output, marker):
        raise refusal(f"{output} exists and has no {marker}: choose another --output, or remove it yourself")
    # The folder is locked before it gets the name by which other processes find left-over folders.
    unnamed, staging = sibling(output, "new"), sibling(output, "partial")
    lock: int | None = None
    try:
        try:
            remove_left_over(output)
            unnamed.mkdir(parents=True)
            lock = try_lock(unnamed)
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
    return "free some space" if error.errno in NO_ROOM else otherwise


def remove_left_over(output: Path) -> None:
    """Remove the folders that killed processes left beside `output`, which may have gigabytes. An older result whose
    process was killed before the new one had its name gets its own name back."""

    def left_over(kind: str) -> list[Path]:
        return sorted(output.parent.glob(f".{glob.escape(output.name)}.{kind}-*"))

    locks = {folder: try_lock(folder) for folder in left_over("partial")}
    for folder, lock in locks.items():
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    if None in locks.values():
        return  # another process writes here, and may be renaming both
    for old in left_over("old"):
        if not output.exists() and not old.is_symlink():
            old.rename(output)
        remove(old)


def try_lock(folder: Path) -> int | None:
    """Lock a folder. Returns a descriptor that holds the lock until it is closed; None if another process holds the
    lock, the folder is gone, or the system has no such locks (Windows and some network file systems)."""
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
    """Rename `staging` to `output`. An older folder is renamed first, and restored if this does not succeed."""
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
            remove(old)


def remove(folder: Path) -> None:
    """Remove a folder, or a link to one, as far as the system lets."""
    with suppress(OSError):
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder, ignore_errors=True)


def sibling(output: Path, kind: str) -> Path:
    """An unused name beside `output`, so that a rename stays on the same file system."""
    return output.with_name(f".{output.name}.{kind}-{secrets.token_hex(4)}")
