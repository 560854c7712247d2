"""A server of several models: requests go to the one that they name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import Served, served

from draftwood.cli.main import main

BODY = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tiny_bundle: Path, no_bos_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(tiny_bundle, folder / "one")
    shutil.copytree(no_bos_bundle, folder / "two")
    (folder / "notes").mkdir()
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(folder, "--max-loaded", "1", "--no-speculation") as running:
        yield running
        running.process.terminate()
        assert running.process.wait(120) == 0


def complete(server: Served, **fields: Any) -> dict[str, Any]:
    status, text = server.ask("/v1/completions", BODY | fields)
    assert status == 200, text
    content: dict[str, Any] = json.loads(text)
    return content


def states(server: Served) -> dict[str, str]:
    return {card["id"]: card["state"] for card in json.loads(server.ask("/v1/models")[1])["data"]}


def test_a_model_is_opened_when_it_is_named_and_closed_for_another(server: Served) -> None:
    assert states(server) == {"one": "closed", "two": "closed"}
    first = {name: complete(server, model=name) for name in ("one", "two")}
    assert {name: answer["model"] for name, answer in first.items()} == {"one": "one", "two": "two"}
    assert first["one"]["usage"]["prompt_tokens"] == first["two"]["usage"]["prompt_tokens"] + 1  # a begin of text
    assert states(server) == {"one": "closed", "two": "open"}
    names = ["one", "two", "one", "two"]
    with ThreadPoolExecutor() as clients:
        answers = list(clients.map(lambda name: complete(server, model=name), names))
    assert [answer["choices"] for answer in answers] == [first[name]["choices"] for name in names]
    metrics = server.ask("/metrics")[1]
    assert all(f'draftwood_generation_tokens_total{{model="{name}"}} 15.0' in metrics for name in ("one", "two"))
    assert server.ask("/health") == (200, "ok")


def test_ollamas_clients_see_all_models(server: Served) -> None:
    complete(server, model="one")
    body = {"model": "one:latest", "prompt": "hello", "raw": True, "stream": False}
    body["options"] = {"num_predict": 2, "ignore_eos": True}
    assert json.loads(server.ask("/api/generate", body)[1])["eval_count"] == 2
    listed, running = (json.loads(server.ask(path)[1])["models"] for path in ("/api/tags", "/api/ps"))
    assert [entry["name"] for entry in listed] == ["one:latest", "two:latest"]
    assert [entry["details"] == {} for entry in listed] == [False, True]
    assert running == listed[:1]
    status, text = server.ask("/api/chat", {"model": "three"})
    assert status == 404 and "'three' does not exist" in json.loads(text)["error"]
    status, text = server.ask("/api/pull", {"model": "one"})
    assert status == 400 and "draftwood serve" in json.loads(text)["error"]
    status, text = server.ask("/v1/responses/resp_1")
    assert status == 404 and "is not stored" in json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("/v1/completions", BODY | {"model": "three"}, 404, "'three' does not exist; this server has 'one two'"),
        ("/v1/completions", BODY, 404, "does not exist"),
        ("/v1/completions", BODY | {"model": ["one"]}, 404, "does not exist"),
        ("/tokenize", {"model": "one", "prompt": "x", "unheard": 1}, 400, "unheard"),
        ("/v1/embeddings", {"model": "one", "input": "x"}, 404, "POST /v1/embeddings"),
        ("/v1/models/three", None, 404, "'three' does not exist"),
    ],
)
def test_what_names_no_model_is_refused(server: Served, path: str, body: Any, status: int, named: str) -> None:
    found, text = server.ask(path, body)
    assert found == status and named in json.loads(text)["error"]["message"]


def test_a_model_that_cannot_be_opened_harms_no_other_one(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "one", tmp_path / "one")
    shutil.copytree(folder / "two", tmp_path / "damaged")
    (tmp_path / "damaged" / "tokenizer.json").write_text("{}")
    with served(tmp_path, "--no-speculation") as running:
        status, text = running.ask("/v1/completions", BODY | {"model": "damaged"})
        assert status == 503 and json.loads(text)["error"]["code"] == "model_not_opened"
        assert complete(running, model="one")["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--draft", "x"), "--draft is of one model"),
        (("--served-model-name", "x"), "--served-model-name is of one model"),
    ],
)
def test_options_of_one_model_are_refused(
    folder: Path, options: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(folder), *options]) == 2 and named in capsys.readouterr().err
    assert main(["serve", *options, str(folder / "one"), str(folder / "two")]) == 2
    assert named in capsys.readouterr().err


def test_what_is_no_set_of_models_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(folder / "one"), str(folder / "one")]) == 2
    assert "same name" in capsys.readouterr().err
    assert main(["serve", str(folder / "one"), "--max-loaded", "1"]) == 2
    assert "--max-loaded is for several models" in capsys.readouterr().err
