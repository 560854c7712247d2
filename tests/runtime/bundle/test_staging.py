"""Folders that are written all or nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from draftwood.models.errors import CheckpointError
from draftwood.runtime.bundle.staging import staging_folder, try_lock


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def write(output: Path, name: str, content: str = "") -> None:
    with staging_folder(output, "head.json", CheckpointError) as staging:
        (staging / name).write_text(content)


def test_an_older_result_is_replaced_as_a_whole(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "head"
    write(output, "head.json", "old")
    (output / "left over").write_text("")
    write(output, "head.json", "new")
    assert (output / "head.json").read_text() == "new" and names(output) == ["head.json"]
    assert names(output.parent) == ["head"]


def test_an_interrupt_right_behind_the_rename_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> None:
        rename(self, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "head", "head.json")
    assert names(tmp_path) == []


def test_an_empty_folder_is_replaced_and_anything_else_is_not(tmp_path: Path) -> None:
    output = tmp_path / "head"
    output.mkdir()
    write(output, "thesis.txt")
    with pytest.raises(CheckpointError, match=r"exists and has no head\.json: choose another --output"):
        write(output, "head.json")
    assert names(output) == ["thesis.txt"]


@pytest.mark.parametrize(
    ("code", "message"),
    [(errno.ENOSPC, "no room to write .*free some space"), (errno.EACCES, "was not written: .*weights.bin")],
)
def test_what_the_system_refuses_is_one_error_and_leaves_the_older_result(
    code: int, message: str, tmp_path: Path
) -> None:
    output = tmp_path / "head"
    write(output, "head.json", "old")
    with pytest.raises(CheckpointError, match=message), staging_folder(output, "head.json", CheckpointError):
        raise OSError(code, "refused", "weights.bin")
    assert (output / "head.json").read_text() == "old" and names(tmp_path) == ["head"]


@pytest.mark.parametrize("steps", [1, 2])
def test_an_interruption_while_folders_change_places_loses_neither(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C right after the first rename leaves the older folder, after the second one the new."""
    output, done = tmp_path / "head", list[str]()
    write(output, "head.json", "old")
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        if output in (self, target):
            done.append(self.name)
            if len(done) == steps:
                raise KeyboardInterrupt
        return moved

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        write(output, "head.json", "new")
    assert (output / "head.json").read_text() == {1: "old", 2: "new"}[steps] and names(tmp_path) == ["head"]


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    output = tmp_path / "head"
    held, others = tmp_path / ".head.partial-1", tmp_path / ".heads.partial-0"
    for folder in (tmp_path / ".head.partial-0", held, others):
        folder.mkdir()
        (folder / "weights.bin").write_text("")
    lock = try_lock(held)
    assert lock is not None and try_lock(held) is None
    write(output, "head.json")
    assert names(tmp_path) == [held.name, others.name, "head"]
    os.close(lock)
    write(output, "head.json")
    assert names(tmp_path) == [others.name, "head"]


def test_an_older_result_whose_process_was_killed_gets_its_name_back(tmp_path: Path) -> None:
    """Between the two renames the only whole result has another name."""
    output, old = tmp_path / "head", tmp_path / ".head.old-0"
    write(old, "head.json", "old")
    with pytest.raises(KeyboardInterrupt), staging_folder(output, "head.json", CheckpointError):
        raise KeyboardInterrupt
    assert names(tmp_path) == ["head"] and (output / "head.json").read_text() == "old"
    write(old, "head.json", "older")
    write(output, "head.json", "new")
    assert names(tmp_path) == ["head"] and (output / "head.json").read_text() == "new"


def test_what_a_link_leads_to_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a link that a killed process of an older release renamed is no result that could come back."""
    first, link = tmp_path / "first", tmp_path / "head"
    write(first, "head.json", "old")
    link.symlink_to(first)
    (tmp_path / ".head.old-0").symlink_to(first)
    write(link, "head.json", "new")
    assert link.is_symlink() and (first / "head.json").read_text() == "new"
    link.unlink()
    write(link, "head.json", "newest")
    assert names(tmp_path) == ["first", "head"] and (first / "head.json").read_text() == "new"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write(Path(), "head.json")
    assert names(tmp_path / "here") == ["head.json"]
    link = tmp_path / "round"
    link.symlink_to(link)
    with pytest.raises(CheckpointError, match=r"round.*choose another --output"):
        write(link, "head.json")


def test_a_folder_is_locked_while_it_is_written(tmp_path: Path) -> None:
    with staging_folder(tmp_path / "head", "head.json", CheckpointError) as staging:
        (staging / "head.json").write_text("")
        assert try_lock(staging) is None
        write(tmp_path / "head", "head.json", "another's")
        assert staging.exists()
    assert names(tmp_path) == ["head"]
