"""A bundle whose tokenizer needs a time or memory without bound, served: the text at which it does is refused, and
holds up nobody else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bundling import resigned
from connections import SHORT, Answer, answer_of, opened, posted
from serving import Served, served, wait_for

from draftwood.cli.main import main
from draftwood.runtime.text.tokenizer import ENCODING, TOKENIZER

GROWING = {"type": "Replace", "pattern": {"String": "Ж"}, "content": "Ж" * 100_000}
CUBIC = {"type": "Split", "pattern": {"Regex": "q*q*q*[yY]"}, "behavior": "Isolated", "invert": False}
SLOW_TEXT = ("q" * 330 + "z") * 1000 + "y"
SECONDS = 60  # in which the server ends; the library alone would compute for minutes


def hostile(bundle: Path, folder: Path, **steps: Any) -> Path:
    """A copy whose tokenizer has these steps."""
    copy = folder / "tiny"
    shutil.copytree(bundle, copy)
    content = json.loads((copy / TOKENIZER).read_text())
    (copy / TOKENIZER).write_text(json.dumps(content | steps))
    return resigned(copy)


@pytest.fixture(scope="module")
def server(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    normalizer = {"type": "Sequence", "normalizers": [GROWING] * 10}
    content = json.loads((tiny_bundle / TOKENIZER).read_text())
    split = {"type": "Sequence", "pretokenizers": [CUBIC, content["pre_tokenizer"]]}
    bundle = hostile(tiny_bundle, tmp_path_factory.mktemp("hostile"), normalizer=normalizer, pre_tokenizer=split)
    with served(bundle, "--served-model-name", "small") as running:
        yield running


def asked(server: Served, prompt: str) -> Answer:
    with opened(server, posted({**SHORT, "prompt": prompt})) as client:
        return answer_of(client)


def test_a_text_that_fills_the_memory_is_refused(server: Served) -> None:
    refused = asked(server, "Ж")
    assert refused.status == 400 and b"cannot read the text" in refused.body
    assert asked(server, "hello").status == 200


def test_texts_that_take_for_ever_hold_nobody_up(server: Served) -> None:
    """Of clients that wait, and of clients that left; then the server ends as usual."""
    clients = [opened(server, posted({**SHORT, "prompt": SLOW_TEXT})) for _ in range(3 * ENCODING.processes)]
    assert asked(server, "hello").status == 200
    for client in clients:
        client.close()
    assert asked(server, "hello").status == 200
    wait_for(lambda: server.idle)
    with opened(server, posted({**SHORT, "prompt": SLOW_TEXT})):
        server.process.terminate()
        assert server.process.wait(SECONDS) == 0


@pytest.mark.parametrize(
    "steps",
    [
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [GROWING | {"pattern": {"String": "x"}, "content": "x" * 100_000}] * 10,
            }
        },
        {"decoder": {"type": "Sequence", "decoders": [GROWING] * 10}},
    ],
    ids=["normalizer", "decoder"],
)
def test_a_command_refuses_it(tiny_bundle: Path, tmp_path: Path, capsys: Any, steps: dict[str, Any]) -> None:
    bundle = hostile(tiny_bundle, tmp_path, **steps)
    assert main(["generate", str(bundle), "--prompt", "hello", "--max-tokens", "2"]) == 2
    assert "rebuild the bundle" in capsys.readouterr().err
