"""The cache of compiled kernels: made once, by whoever comes first, and nothing else in it is ever loaded."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_parts import no_compiler

from draftwood.plugins.native import cache
from draftwood.plugins.native.compile import FLAGS, CompilerError, choose_prefetch, compile_kernels, compiler
from draftwood.plugins.native.processor import KernelError

LOOK = """
from draftwood.plugins.native import cache, library
flags = tuple(flag.replace("-O3", "-O1") for flag in cache.FLAGS)  # in a third of the time
print(path := cache.kernels(flags))
library.NativeLibrary(path)
"""


@pytest.fixture(scope="module")
def made() -> Path:
    """Kernels that a cache holds already."""
    return cache.kernels()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache."""
    monkeypatch.setenv(cache.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def filled(folder: Path, made: Path) -> Path:
    """A cache with kernels in it: copied, so that nothing is compiled."""
    folder.mkdir(mode=0o700)
    return Path(shutil.copy2(made, folder))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, made: Path) -> list[Path]:
    """What was compiled: here, copied."""
    done: list[Path] = []

    def compile_kernels(path: Path, flags: tuple[str, ...] = FLAGS) -> None:
        done.append(path)
        path.write_bytes(made.read_bytes())

    monkeypatch.setattr(cache, "compile_kernels", compile_kernels)
    return done


@pytest.mark.parametrize("umask", [0o022, 0o000, 0o077])
def test_kernels_are_compiled_once_into_a_folder_of_ones_own(
    folder: Path, compilations: list[Path], umask: int
) -> None:
    """No umask makes them writable for others."""
    before = os.umask(umask)
    try:
        first = cache.kernels()
        assert cache.kernels() == first and len(compilations) == 1
    finally:
        os.umask(before)
    assert [file.name for file in folder.iterdir()] == [first.name], "nothing unfinished is left"
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(first.stat().st_mode) == 0o700
    assert cache.open_kernels().instructions is not None


def test_processes_that_compile_at_once_do_not_disturb_each_other(folder: Path) -> None:
    """With the machine's compiler, in processes that begin together."""
    environment = {**os.environ, cache.CACHE: str(folder)}
    command, pipe = [sys.executable, "-c", LOOK], subprocess.PIPE
    started = [subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    finished = [(process.communicate(timeout=300), process.returncode) for process in started]
    assert all(code == 0 for _, code in finished), finished
    assert {Path(output.strip()).parent for (output, _), _ in finished} == {folder}
    assert all(file.suffix == ".so" for file in folder.iterdir())
    assert all("compiling the native kernels" in errors for (_, errors), _ in finished[:1])


@pytest.mark.parametrize("damage", [b"", b"\x7fELF and no more"])
def test_a_damaged_library_is_made_anew_and_never_loaded(filled: Path, compilations: list[Path], damage: bytes) -> None:
    whole = filled.read_bytes()
    filled.write_bytes(damage + whole[len(damage) + 100 :])
    assert cache.kernels().read_bytes() == whole and len(compilations) == 1


def test_a_whole_file_that_cannot_be_loaded_is_made_anew(folder: Path, made: Path, compilations: list[Path]) -> None:
    folder.mkdir(mode=0o700)
    (folder / "other").write_bytes(b"no library")
    digest = cache.content_digest(folder / "other")
    useless = folder / f"{made.stem.rpartition('-')[0]}-{digest}.so"
    (folder / "other").rename(useless)
    useless.chmod(0o700)
    assert cache.kernels() == useless
    cache.open_kernels()
    assert not useless.exists() and len(compilations) == 1


def test_what_others_could_have_written_is_not_loaded(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (filled.parent, filled):
        before = path.stat().st_mode
        for bit in (stat.S_IWGRP, stat.S_IWOTH):
            path.chmod(before | bit)
            with pytest.raises(KernelError, match=rf"can be written by others.*: chmod go-w {path}, or set "):
                cache.kernels()
        path.chmod(before)
    assert cache.kernels() == filled
    filled.parent.parent.chmod(0o777)
    with pytest.raises(KernelError, match=f"whoever writes to .*: chmod go-w {filled.parent.parent}"):
        cache.kernels()
    filled.parent.parent.chmod(0o1777)
    assert cache.kernels() == filled, "as in /tmp, where nobody may rename what is another's"
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert cache.kernels() == filled, "root may write anywhere"
    if os.geteuid() == 0:
        os.chown(filled, 54321, -1)
        with pytest.raises(KernelError, match=r"belongs to another user \(54321\).*: remove it"):
            cache.kernels()
        os.chown(filled, 0, -1)
        above = filled.parent.parent
        above.chmod(0o770)
        assert cache.kernels() == filled, "the group of this user"
        os.chown(above, -1, 54321)
        with pytest.raises(KernelError, match=f"can be replaced by whoever writes to {above}"):
            cache.kernels()
        os.chown(above, 54321, -1)
        with pytest.raises(KernelError, match=f"lies in {above}, which belongs to another user"):
            cache.kernels()


def test_a_link_in_the_cache_is_not_followed(filled: Path, tmp_path: Path) -> None:
    filled.rename(tmp_path / "elsewhere.so")
    filled.symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(KernelError, match="no plain file"):
        cache.kernels()


def test_a_link_to_the_cache_is_followed_once(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[Path]
) -> None:
    """Its owner could turn it elsewhere between the look at the folder and the loading."""
    link = tmp_path / "link"
    link.symlink_to(filled.parent)
    monkeypatch.setenv(cache.CACHE, str(link))
    assert cache.kernels() == filled and not compilations
    link.unlink()
    link.symlink_to(link)
    monkeypatch.setattr(cache, "private_folder", lambda: tmp_path)
    assert cache.kernels().parent == tmp_path


def test_what_a_killed_compilation_left_is_removed(folder: Path, compilations: list[Path]) -> None:
    folder.mkdir(mode=0o700)
    left, running = folder / ".compiling-left", folder / ".compiling-running"
    for work in (left, running):
        work.mkdir()
        (work / "kernels.so").write_bytes(b"half")
    os.utime(left, (0, 0))
    made = cache.kernels()
    assert {running, made} == set(folder.iterdir()) and len(compilations) == 1


def test_the_family_of_the_processor_decides_where_weights_are_read_ahead_to(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    for family, flags in (("25", ("-DFETCHED=2",)), ("26", ())):
        cpuinfo.write_text(f"processor : 0\nvendor_id : AuthenticAMD\ncpu family : {family}\n\nprocessor : 1\n")
        assert choose_prefetch(cpuinfo) == flags
    assert choose_prefetch(tmp_path / "none") == ()


def write_compiler(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return path


def test_another_compiler_processor_or_flag_has_files_of_its_own(
    made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {(cache.source_digest(FLAGS), cache.compiler_digest()), (cache.source_digest(("-O1",)), "")}
    identities = {cache.kernel_identity(), cache.kernel_identity(("-O1",))}
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags : fpu\nmodel : 3\ncpu MHz : 1.0\n")
    with monkeypatch.context() as patch:
        patch.setattr(cache, "CPUINFO", cpuinfo)
        identities.add(cache.kernel_identity())
        cpuinfo.write_text("processor : 1\nflags : fpu\nmodel : 3\ncpu MHz : 2.0\n")
        identities.add(cache.kernel_identity())
        patch.setattr(cache, "CPUINFO", tmp_path / "none")
        identities.add(cache.kernel_identity())
    monkeypatch.setenv("CC", str(write_compiler(tmp_path / "cc", "echo another")))
    names.add((cache.source_digest(FLAGS), cache.compiler_digest()))
    identities.add(cache.kernel_identity())
    assert len(names) == 3 and len(identities) == 5


def test_without_a_compiler_the_kernels_that_are_there_serve(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may be built with a compiler and run without."""
    no_compiler(monkeypatch)
    assert cache.kernels() == filled
    cache.check_available()
    filled.unlink()
    for ask in (cache.kernels, cache.check_available):
        with pytest.raises(CompilerError, match=r"install gcc or clang, or pip install .*\[native\]'; or .*on"):
            ask()
    assert len(cache.kernel_identity()) == 12


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (None, r"install gcc or clang, or pip install .*\[native\]'"),
        ("no-such-compiler -m64", "set CC to a C compiler"),
        ("gcc '-O2", r"is no command .*: correct it, or unset CC"),
        ("false", "do not compile with false"),
        ("./full", "free some space, or set DRAFTWOOD_CACHE"),
    ],
)
def test_a_compiler_that_does_not_compile_is_named(
    command: str | None, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    write_compiler(Path("full"), "echo '/tmp/x.s: No space left on device' >&2; exit 1")
    no_compiler(monkeypatch)
    if command is not None:
        monkeypatch.setenv("CC", command)
    with pytest.raises(CompilerError, match=message):
        compile_kernels(tmp_path / "kernels.so")


def test_a_package_may_bring_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    no_compiler(monkeypatch)
    monkeypatch.setattr("draftwood.plugins.native.compile.importlib.util.find_spec", lambda name: object())
    assert compiler()[-2:] == ["ziglang", "cc"]


@pytest.fixture
def fresh_fallback() -> Iterator[None]:
    cache.private_folder.cache_clear()
    yield
    cache.private_folder.cache_clear()


@pytest.mark.usefixtures("fresh_fallback")
@pytest.mark.parametrize("home", ["missing", "a file"])
def test_where_nothing_can_be_kept_a_process_has_its_own(
    home: str,
    compilations: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if home == "missing":
        monkeypatch.delenv(cache.CACHE, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv(cache.CACHE, str(tmp_path / "file" / "cache"))
    first = cache.kernels()
    assert cache.kernels() == first and len(compilations) == 1
    said = [record for record in caplog.records if "every process compiles" in record.message]
    assert len(said) == 1 and cache.CACHE in said[0].message
    assert not (tmp_path / "nowhere").exists()
    shutil.rmtree(first.parent)


@pytest.mark.usefixtures("fresh_fallback")
def test_where_no_folder_can_be_written_the_error_says_so(
    compilations: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.CACHE, str(tmp_path / "file" / "cache"))

    def nowhere(**names: str) -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("draftwood.plugins.native.cache.tempfile.mkdtemp", nowhere)
    with pytest.raises(CompilerError, match=r"no folder to compile .*: set DRAFTWOOD_CACHE to one that can be written"):
        cache.kernels()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(cache.CACHE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for system, places in (("linux", ".cache/draftwood"), ("darwin", "Library/Caches/draftwood")):
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert cache.cache_folder() == tmp_path / places
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert cache.cache_folder() == Path("/var/cache/me/draftwood")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_folder() == tmp_path / ".cache/draftwood"
    monkeypatch.setenv(cache.CACHE, "relative")
    assert cache.cache_folder() == Path.cwd() / "relative"


def test_a_wheel_needs_no_compiler_and_fills_no_cache(
    folder: Path, made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What cannot be loaded is passed over."""
    broken, good = tmp_path / "broken.so", Path(shutil.copy2(made, tmp_path))
    broken.touch()
    no_compiler(monkeypatch)
    without = cache.kernel_identity()
    monkeypatch.setattr(cache, "carried", lambda: [broken, good])
    cache.check_available()
    assert cache.open_kernels().instructions and not folder.exists() and broken.exists()
    assert cache.kernel_identity() != without
