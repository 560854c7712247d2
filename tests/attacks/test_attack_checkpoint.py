"""Checkpoints of strangers: whatever stands in their files, a build ends at once, with one line and exit code 2."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoints import trained_head, write_checkpoint, write_tokenizer

from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.checkpoints.safetensors import INDEX, WEIGHTS
from draftwood.builder.tokenizer import convert_tokenizer
from draftwood.models.acceptance_head import DESCRIPTION, read_head, write_head
from draftwood.models.acceptance_head import WEIGHTS as HEAD_WEIGHTS
from draftwood.models.errors import CheckpointError
from draftwood.models.head_config import HeadConfig

DEEP = "[" * 100_000 + "]" * 100_000
LONG_NUMBER = '{"vocab_size": ' + "9" * 100_000 + "}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


@pytest.fixture(autouse=True)
def nothing_waits_for_ever() -> Any:
    """A read that blocks ends the test instead of the suite."""

    def ended(*_: Any) -> None:
        raise TimeoutError("a file of a checkpoint was waited for")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def listener(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as each, pytest.MonkeyPatch.context() as patch:
        patch.chdir(file.parent)  # a socket's path is short
        each.bind(file.name)


def huge(file: Path) -> None:
    with file.open("wb") as handle:
        handle.truncate(300 << 20)  # a hole


ODD: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": listener,
    "device": lambda file: file.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "link to itself": lambda file: file.symlink_to(file.name),
    "300 MB": huge,
}


@pytest.mark.parametrize("kind", ODD)
def test_files_that_are_no_plain_ones_are_refused(kind: str, folder: Path, tmp_path: Path) -> None:
    """config.json, the weights, the index and its shards, what belongs to the tokenizer, and the head's files."""
    write_tokenizer(folder)
    head = tmp_path / "head"
    head.mkdir()
    write_head(head, trained_head(HeadConfig(32)))
    cases: list[tuple[Path, Callable[[], object]]] = [
        (folder / "config.json", lambda: Checkpoint(folder)),
        (folder / WEIGHTS, lambda: Checkpoint(folder)),
        (folder / INDEX, lambda: Checkpoint(folder)),
        (folder / "tokenizer.json", lambda: convert_tokenizer(folder, tmp_path)),
        (folder / "tokenizer_config.json", lambda: convert_tokenizer(folder, tmp_path)),
        (folder / "chat_template.jinja", lambda: convert_tokenizer(folder, tmp_path)),
        (head / DESCRIPTION, lambda: read_head(head, 32)),
        (head / HEAD_WEIGHTS, lambda: read_head(head, 32)),
    ]
    for file, opened in cases:
        there = file.exists()
        if there:
            file.rename(tmp_path / "kept")
        ODD[kind](file)
        with pytest.raises(CheckpointError, match=file.name):
            opened()
        file.rmdir() if kind == "folder" else file.unlink()
        if there:
            (tmp_path / "kept").rename(file)
        opened()


@pytest.mark.parametrize("content", [DEEP, '{"a":' * 50_000 + "1" + "}" * 50_000, LONG_NUMBER])
def test_deep_and_endless_json_is_refused(content: str, folder: Path, tmp_path: Path) -> None:
    write_tokenizer(folder)
    for name, opened in (
        ("tokenizer_config.json", lambda: convert_tokenizer(folder, tmp_path)),
        ("tokenizer.json", lambda: convert_tokenizer(folder, tmp_path)),
        ("config.json", lambda: Checkpoint(folder)),
    ):
        (folder / name).write_text(content)
        with pytest.raises(CheckpointError, match=name):
            opened()
        (folder / name).unlink()
        (tmp_path / name).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ({"model.norm.weight": "../other.safetensors"}, "leaves the checkpoint folder"),
        ({"model.norm.weight": "/etc/passwd"}, "leaves the checkpoint folder"),
        ({"model.norm.weight": "a/../../b"}, "leaves the checkpoint folder"),
        ({"model.norm.weight": "x" * 5000}, "is no path|is missing"),
        ({"model.norm.weight": "a\0b"}, "is no path|is missing"),
        ({"model.norm.weight": "."}, "is missing"),
        ({"model.norm.weight": 5}, "must name a file for each tensor"),
        ({"model.norm.weight": ["a"]}, "must name a file for each tensor"),
        ({"model.norm.weight": None}, "must name a file for each tensor"),
        ({}, "is missing; the checkpoint is incomplete"),
        ({str(number): f"{number}.safetensors" for number in range(1025)}, "1025 files, more than 1024"),
    ],
    ids=range(11),
)
def test_a_hostile_index_is_refused(weight_map: dict[str, Any], named: str, folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=named):
        Checkpoint(folder)


def tampered(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the header of the weights, whose data stays."""
    content = (folder / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


NORM = "model.norm.weight"
TAMPERED: dict[str, Callable[[dict[str, Any]], object]] = {
    "overlapping": lambda header: header[NORM].update(data_offsets=header["lm_head.weight"]["data_offsets"]),
    "beyond the end": lambda header: header[NORM].update(data_offsets=[1 << 40, (1 << 40) + 128]),
    "backwards": lambda header: header[NORM].update(data_offsets=[128, 0]),
    "negative": lambda header: header[NORM].update(data_offsets=[-128, 0]),
    "a shape that overflows": lambda header: header[NORM].update(shape=[1 << 40, 1 << 40]),
    "another shape of the same size": lambda header: header["lm_head.weight"]["shape"].reverse(),
    "an unknown type": lambda header: header[NORM].update(dtype="Q4"),
    "an integer type": lambda header: header[NORM].update(dtype="I32"),
    "a tensor that is gone": lambda header: header.pop(NORM),
    "no object": lambda header: header.update({NORM: [1, 2]}),
}


@pytest.mark.parametrize("kind", TAMPERED)
def test_tampered_weights_are_refused(kind: str, folder: Path) -> None:
    tampered(folder, TAMPERED[kind])
    with pytest.raises(CheckpointError, match=r"not a readable safetensors file|has shape|is I32|is missing"):
        Checkpoint(folder)


@pytest.mark.parametrize("size", [0, 1, 7, 1 << 32, (1 << 64) - 1])
def test_a_header_of_any_claimed_size_is_refused(size: int, folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", size) + content[8:])
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    "change",
    [
        *({name: value} for name in ("hidden_size", "layers") for value in (10**9, -1, True, "3", None, 2.0)),
        *({name: value} for name in ("reject_weight", "temperature") for value in (True, 0, 1e300, 10**400, "1", None)),
        {"tied": 1},
        {"format": DEEP[:10_000]},
    ],
    ids=lambda change: repr(change)[:40],
)
def test_a_hostile_head_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    write_head(tmp_path, trained_head(HeadConfig(32)))
    content = json.loads((tmp_path / DESCRIPTION).read_text())
    (tmp_path / DESCRIPTION).write_text(json.dumps({**content, **change}))
    with pytest.raises(CheckpointError, match=r"head\.json") as refused:
        read_head(tmp_path, 32)
    assert len(str(refused.value)) < 2000


def test_the_command_refuses_in_one_line(folder: Path, tmp_path: Path) -> None:
    """A real process that may neither wait nor compute for long."""
    limit = partial(resource.setrlimit, resource.RLIMIT_CPU, (60, 60))
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "num_hidden_layers": 10**9}))
    waiting = tmp_path / "waiting"
    waiting.mkdir()
    os.mkfifo(waiting / "config.json")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0))
    sources = ((folder, "num_hidden_layers must be"), (waiting, "no plain file"), (tmp_path / "bad.gguf", "claims"))
    for source, named in sources:
        command = [sys.executable, "-m", "draftwood", "build", "--output", str(tmp_path / "out")]
        command += ["--target", str(source), "--draft", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, preexec_fn=limit)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("draftwood: error: ") and named in done.stderr and done.stderr.count("\n") == 1
