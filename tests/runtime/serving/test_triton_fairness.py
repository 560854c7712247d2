"""Clients of a real tritonserver get places in turn, whatever they call themselves by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import wait_for

from draftwood.runtime import EngineError

pytest.importorskip("pytriton", reason="nvidia-pytriton, the [triton] extra, is not installed")
pytest.importorskip("tritonclient.grpc", reason="tritonclient, the [triton] extra, is not installed")

from triton_client import BEGUN, ENDLESS, FAULTS, OWN, SLOW, Call, ask, inputs, metric, post

from draftwood.runtime.serving.triton.contract import ModelSettings
from draftwood.runtime.serving.triton.repository import Placement, write_model
from draftwood.runtime.serving.triton.server import Distribution, TritonServer

MODEL = "fair"
Send = Callable[[TritonServer, str], object]  # by the prompt


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prompts in the order in which the model began their texts."""
    return tmp_path_factory.mktemp("begun") / "prompts"


@pytest.fixture(scope="module")
def server(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory, begun: Path) -> Iterator[TritonServer]:
    """A model that decodes one request at a time."""
    try:
        Distribution.find()
    except EngineError as error:
        pytest.skip(str(error))
    repository = tmp_path_factory.mktemp("fair")
    folder = write_model(tiny_bundle, repository, MODEL, ModelSettings("", OWN, max_running=1), Placement(), False)
    with (folder / "1" / "model.py").open("a", encoding="utf-8") as file:
        file.write(FAULTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BEGUN, str(begun))
        with TritonServer(repository, models=[MODEL], exit_timeout=1) as running:
            yield running


def streaming(**options: Any) -> Send:
    """Over gRPC."""
    return lambda server, prompt: ask(server, MODEL, inputs(prompt, max_tokens=2, seed=SLOW, end_id=-1), **options)


def posting(**fields: Any) -> Send:
    body = {"max_tokens": 2, "seed": SLOW, "end_id": -1, **fields}
    return lambda server, prompt: post(server, f"{MODEL}/generate", {"text_input": prompt, **body})


def order(server: TritonServer, begun: Path, requests: list[tuple[str, Send]]) -> str:
    """Whose texts were begun one after the other: they came in this order, while a longer one was decoded."""
    sent: list[Future[object]] = []

    def all_wait() -> bool:
        return metric(server, "draftwood_requests_waiting", model=MODEL) == len(sent)

    with ThreadPoolExecutor() as threads:
        with Call(server.grpc, MODEL, inputs("hello", max_tokens=900, stream=True, seed=ENDLESS, end_id=-1)) as longer:
            longer.next()
            begun.write_text("")
            for name, request in requests:
                sent.append(threads.submit(request, server, name))
                wait_for(all_wait)
        for each in sent:
            each.result()
    return begun.read_text().replace("\n", "")


@pytest.mark.parametrize(
    ("many", "one", "expected"),
    [
        (streaming(client="many"), streaming(user="one"), "mommm"),
        (streaming(sequence="many"), streaming(sequence="one"), "mommm"),
        (posting(client="many"), posting(user="one"), "mommm"),
        (streaming(client="many", sequence=9), streaming(sequence=9), "mommm"),  # a name decides before a sequence
    ],
    ids=["gRPC", "sequence", "HTTP", "both"],
)
def test_one_request_does_not_wait_for_all_of_anothers(
    server: TritonServer, begun: Path, many: Send, one: Send, expected: str
) -> None:
    assert order(server, begun, [*[("m", many)] * 4, ("o", one)]) == expected
