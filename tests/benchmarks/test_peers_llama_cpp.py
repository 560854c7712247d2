"""The programs of llama.cpp and ik_llama.cpp, over servers that only count: conversion, slots, and what is read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_llama_server
import pytest

from benchmarks.peers.programs.ik_llama_cpp import UNKNOWN, IkLlamaCpp
from benchmarks.peers.programs.llama_cpp import CONTEXT, LlamaCpp
from benchmarks.peers.protocol import MANY, PLAIN, PeerOptions

Start = Callable[..., LlamaCpp]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    pair = tmp_path / "pair"
    for role in ("target", "draft", "draft-full"):
        (pair / role).mkdir(parents=True)
    started: list[LlamaCpp] = []

    def start(kind: type[LlamaCpp], precision: str = "fp32", variant: str = "") -> LlamaCpp:
        work = tmp_path / ("ik_llama.cpp" if kind is IkLlamaCpp else "llama.cpp")
        (work / "build" / "bin").mkdir(parents=True)
        source = f"#!{sys.executable}\n{Path(fake_llama_server.__file__).read_text(encoding='utf-8')}"
        for name in ("llama-server", "llama-quantize"):
            (work / "build" / "bin" / name).write_text(source, encoding="utf-8")
            (work / "build" / "bin" / name).chmod(0o755)
        monkeypatch.setattr(kind, "_converter", lambda self: [sys.executable, fake_llama_server.__file__])
        started.append(kind(PeerOptions(pair, precision, work, 1, (3,), variant)))
        return started[-1]

    yield start
    for program in started:
        program.close()


@pytest.mark.parametrize(("variant", "kind"), [("", "Q4_0"), ("pure", "Q4_0"), ("q4_k_m", "Q4_K_M")])
def test_the_target_and_the_full_draft_are_quantised(start: Start, variant: str, kind: str) -> None:
    program = start(LlamaCpp, "int4", variant)
    (folder,) = program._options.work.joinpath("models").iterdir()
    files = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    assert files == {"target.gguf": f"{kind} of target", "draft.gguf": f"{kind} of draft-full"}
    assert (program.version, program.methods, program.at_a_time) == ("version: fake", [PLAIN, "draft:3"], MANY)


def test_texts_are_asked_for_at_the_same_time_and_counted_together(start: Start) -> None:
    program = start(LlamaCpp)
    assert program.generate(PLAIN, [[1] * CONTEXT, [2]], 2).texts == [[2, 3], [3, 4]]  # a slot has room for both
    alone = program.generate(PLAIN, [[5, 10]], 3)
    assert alone.texts == [[11, 12, 13]] and alone.counters == {"own_seconds": 0.51} and alone.seconds > 0
    together = program.generate("draft:3", [[10], [20], [30]], 2)  # the server waits for three requests
    assert together.texts == [[11, 12], [21, 22], [31, 32]]
    assert together.counters == {"own_seconds": 0.53, "drafted": 12, "accepted": 3}
    with pytest.raises(ValueError, match="method 'lookup:3' is not one of plain, draft:3"):
        program.generate("lookup:3", [[1]], 2)


def test_ik_llama_cpp_tells_its_tokens_by_the_text(start: Start) -> None:
    program = start(IkLlamaCpp)
    together = program.generate("draft:3", [[10], [20], [30]], 2)
    assert together.texts == [[11, 12], [21, UNKNOWN], [31, 32]]  # the text of the second one lacks a token
    assert together.counters["accepted"] == 3 and together.num_tokens == 6
