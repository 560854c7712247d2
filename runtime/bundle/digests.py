"""Digests of files. That of a large one is kept in the user's cache for as long as the file stays as it is, because
reading gigabytes takes seconds, or minutes from a busy disk, at each start."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...plugins.native.cache import cache_folder

READ_BYTES = 1 << 20
LARGE = 1 << 24  # bytes of a file whose digest is kept
SETTLED_NS = 10**9  # after its last change: another one at the same tick of the clock would not be seen
DIGEST = re.compile(r"[0-9a-f]{64}")


class FileRecord(NamedTuple):
    bytes: int
    sha256: str


def file_record(file: Path) -> FileRecord:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while block := handle.read(READ_BYTES):
            digest.update(block)
    return FileRecord(file.stat().st_size, digest.hexdigest())


def known_digest(file: Path) -> str:
    """The SHA-256 of a file, read only if small, or never read as it is. Raises OSError unless it is a plain file."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is no plain file")
    note = note_of(found)
    if note is None:
        return file_record(file).sha256
    with suppress(OSError, UnicodeError):
        if DIGEST.fullmatch(kept := note.read_text()):
            return kept
    settled = time.time_ns() - found.st_ctime_ns > SETTLED_NS
    digest = file_record(file).sha256
    if settled:
        with suppress(OSError):
            note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            note.write_text(digest)
    return digest


def note_of(found: os.stat_result) -> Path | None:
    """Where the digest of a file is kept. Its name changes with every change of the file: nobody can set the time of
    the last one (ctime). None for a small file, and where there is no home folder."""
    cache = cache_folder()
    if found.st_size < LARGE or cache is None:
        return None
    place = [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    return cache / "digests" / hashlib.sha256(repr(place).encode()).hexdigest()[:16]
