"""Folders that are written all or nothing."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from draftwood.models.errors import CheckpointError
from draftwood.runtime.staging import staging_folder


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
