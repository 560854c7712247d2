"""The compiled kernels: those that the installed wheel carries for processors like this one, else its own, compiled at
first use from the C of the installed package and kept for each user. None come from a bundle: a bundle is data.

A file's name holds what it was compiled from and for, by which compiler, and the digest of its own content. So files of
many releases, compilers and processors (a home folder on a network) lie beside each other, a finished file appears at
once and whole, however many processes compile, and a damaged one is known before it is loaded. The folder may be
deleted at any time.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from .compile import CARRIED, FLAGS, SOURCE, CompilerError, choose_prefetch, compile_kernels, compiler, compiler_version
from .library import INTERFACE, NativeLibrary
from .processor import CPUINFO, VECTORS, WITHOUT, KernelError, available, check_processor

CACHE = "DRAFTWOOD_CACHE"  # the environment variable that names another folder
PROCESSOR = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features", "isa")
DIGITS = 16  # of a digest in a name; a file's own digest has all of them
UNFINISHED, UNFINISHED_S = ".compiling-", 3600.0  # name and age, in s, of what a killed process has left
log = logging.getLogger("draftwood.native")


def open_kernels() -> NativeLibrary:
    """The kernels for this processor. Raises CompilerError, or KernelError where they are of no use."""
    check_processor()
    for carried_one in carried():
        with suppress(KernelError):
            return NativeLibrary(carried_one)
    path = kernels()
    try:
        library = NativeLibrary(path)
    except KernelError:  # it is whole, and yet of no use here
        with suppress(OSError):
            path.unlink()
        library = NativeLibrary(kernels())
    if VECTORS.isdisjoint(library.instructions):  # a system that does not list its processor's
        raise KernelError(f"the compiler finds too few instructions on this processor, {WITHOUT}")
    return library


def carried() -> list[Path]:
    """The libraries of the wheel that this processor can run, the best first; none in a checkout. One that is compiled
    for this very processor is no faster: on Zen 4 a pass takes 0.98 to 1.06 of the time of the wheel's."""
    prefetch = choose_prefetch()
    suited = [each.file for each in CARRIED if set(each.needs) <= available(each.needs)]
    fast = [each.file for each in CARRIED if each.prefetch == prefetch]
    return [file for file in sorted(suited, key=lambda file: file not in fast) if file.is_file()]


def kernels(flags: tuple[str, ...] = FLAGS) -> Path:
    """The library, compiled unless cached. Raises CompilerError, and KernelError for a cache that others can write."""
    folder = cache_folder()
    if folder is not None and (found := cached(folder, flags)) is not None:
        return found
    compiler()  # whoever has none learns it before anything is made
    if folder is not None:
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_strangers(folder)
            remove_unfinished(folder)
            with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder) as work:
                return compiled(Path(work), folder, flags)
    try:
        own = private_folder()
        return cached(own, flags) or compiled(own, own, flags)
    except OSError as error:
        raise CompilerError(
            f"no folder to compile the native kernels in ({error}): set {CACHE} to one that can be written"
        ) from error


def check_available(flags: tuple[str, ...] = FLAGS) -> None:
    """Raises KernelError where the processor lacks something, CompilerError where nothing cached or compiled serves."""
    check_processor()
    folder = cache_folder()
    if carried():
        return
    if folder is None or cached(folder, flags) is None:
        compiler()


def kernel_identity(flags: tuple[str, ...] = FLAGS) -> str:
    """What makes a pass of these kernels as fast as it is: their source, flags, processor and compiler, as 12
    hexadecimal digits. Compiles nothing."""
    found = carried()
    try:
        made_by = content_digest(found[0]) if found else compiler_digest()
    except CompilerError:
        made_by = "none"
    return hashlib.sha256(f"{source_digest(flags)} {made_by}".encode()).hexdigest()[:12]


def cache_folder() -> Path | None:
    """Where this user's kernels are kept; None where there is no home folder. Without links: whoever owns a link could
    turn it elsewhere after the folder was looked at."""
    with suppress(OSError, RuntimeError):  # a link that leads to itself
        return None if (folder := named_folder()) is None else folder.resolve()
    return None


def named_folder() -> Path | None:
    if chosen := os.environ.get(CACHE):
        return Path(chosen).absolute()
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "win32":
        base, places = os.environ.get("LOCALAPPDATA"), ("AppData", "Local")
    elif sys.platform == "darwin":
        base, places = None, ("Library", "Caches")
    else:
        base, places = os.environ.get("XDG_CACHE_HOME"), (".cache",)
    if base and Path(base).is_absolute():
        return Path(base) / "draftwood"
    return home.joinpath(*places, "draftwood") if home.is_dir() else None


@cache
def private_folder() -> Path:
    """A folder of this process, gone at its end, where the cache cannot be written."""
    log.warning(
        "%s cannot be written: every process compiles the native kernels anew; set %s to a folder of your own",
        cache_folder() or "the cache folder",
        CACHE,
    )
    folder = Path(tempfile.mkdtemp(prefix="draftwood-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def cached(folder: Path, flags: tuple[str, ...]) -> Path | None:
    """The whole library in a folder, if it has one; damaged ones are removed. Where there is no compiler, whichever
    compiler made it. Raises KernelError when somebody else could have written it."""
    try:
        made_by = compiler_digest()
    except CompilerError:
        made_by = "*"
    for file in sorted(files_of(folder, f"kernels-{source_digest(flags)}-{made_by}-*.so")):
        with suppress(OSError):  # another process removed it, or this user may not read it
            refuse_strangers(folder)
            refuse_strangers(file)
            if content_digest(file) == file.stem.rpartition("-")[2]:
                return file
            file.unlink()
    return None


def files_of(folder: Path, pattern: str) -> Iterator[Path]:
    with suppress(OSError):  # this user may not read the folder
        yield from folder.glob(pattern)


def remove_unfinished(folder: Path) -> None:
    """Remove what processes left that were killed while they compiled, which takes some seconds."""
    for work in folder.glob(f"{UNFINISHED}*"):
        with suppress(OSError):  # another process removed it
            if time.time() - work.stat().st_mtime > UNFINISHED_S:
                shutil.rmtree(work, ignore_errors=True)


def compiled(work: Path, folder: Path, flags: tuple[str, ...]) -> Path:
    """Compile in `work`; returns the finished file in `folder`, where it appears whole."""
    log.warning("compiling the native kernels for this processor, once: they are kept in %s", folder)
    made = work / "kernels.so"
    compile_kernels(made, flags)
    made.chmod(0o700)
    finished = folder / f"kernels-{source_digest(flags)}-{compiler_digest()}-{content_digest(made)}.so"
    return made.replace(finished)


def refuse_strangers(path: Path) -> None:
    """Raises KernelError unless `path`, which leads through no link, is a plain file, or a folder, that nobody but this
    user, or root, can write or replace: what lies there is executed."""
    why, advice = "and kernels are executed", f"or set {CACHE} to a folder of your own"
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise KernelError(f"{path} is no plain file, {why}: remove it, {advice}")
    if not hasattr(os, "getuid"):  # Windows keeps users' folders apart by other means
        return
    if found.st_uid not in (0, os.getuid()):
        raise KernelError(f"{path} belongs to another user ({found.st_uid}), {why}: remove it, {advice}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelError(f"{path} can be written by others, {why}: chmod go-w {path}, {advice}")
    for parent in path.parents:
        above = parent.stat()
        if above.st_uid not in (0, os.getuid()):
            raise KernelError(f"{path} lies in {parent}, which belongs to another user, {why}: {advice[3:]}")
        # A user's own group is taken for one without other members, as most systems make it.
        strangers = stat.S_IWOTH | (0 if above.st_gid in (0, os.getgid()) else stat.S_IWGRP)
        if above.st_mode & strangers and not above.st_mode & stat.S_ISVTX:
            raise KernelError(
                f"{path} can be replaced by whoever writes to {parent}, {why}: chmod go-w {parent}, {advice}"
            )


def source_digest(flags: tuple[str, ...]) -> str:
    """Of the C, the flags, the processor and the interface with Python."""
    digest = hashlib.sha256(repr((flags, processor(), INTERFACE)).encode())
    for source in sorted(SOURCE.parent.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:DIGITS]


def compiler_digest() -> str:
    """Of the compiler's command and version. Raises CompilerError."""
    command = tuple(compiler())
    return hashlib.sha256(repr((command, compiler_version(command))).encode()).hexdigest()[:DIGITS]


def content_digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def processor() -> tuple[str, ...]:
    """Model and instructions of this machine's processors; where Linux does not list them, the machine's name."""
    kind = (sys.platform, platform.machine())
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return (*kind, platform.node())
    return (*kind, *sorted({line for line in lines if line.partition(":")[0].strip() in PROCESSOR}))
