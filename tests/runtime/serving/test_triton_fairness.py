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
client_errors = pytest.importorskip("tritonclient.utils", reason="tritonclient, the [triton] extra, is not installed")
pytest.importorskip("tritonclient.grpc", reason="tritonclient, the [triton] extra, is not installed")

from triton_client import BEGUN, ENDLESS, FAULTS, OWN, SLOW, Call, ask, inputs, metric, post  # noqa: E402 - after the skips

from draftwood.runtime.decoding.queue import max_client_places  # noqa: E402
from draftwood.runtime.requests.async_llm import MAX_WAITING  # noqa: E402
from draftwood.runtime.serving.triton.contract import ModelSettings  # noqa: E402
from draftwood.runtime.serving.triton.repository import Placement, write_model  # noqa: E402
from draftwood.runtime.serving.triton.server import Distribution, TritonServer  # noqa: E402

MODEL = "fair"
Refused = client_errors.InferenceServerException
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
    ("many", "one"),
    [
        (streaming(client="many"), streaming(client="one")),
        (streaming(client="many"), streaming(user="one")),
        (streaming(), streaming(client="one")),
        (streaming(sequence=7), streaming(sequence=8)),
        (streaming(sequence="many"), streaming(sequence="one")),
        (posting(client="many"), posting(user="one")),
    ],
    ids=["client", "user", "nameless", "sequence number", "sequence text", "HTTP"],
)
def test_one_request_does_not_wait_for_all_of_anothers(
    server: TritonServer, begun: Path, many: Send, one: Send
) -> None:
    assert order(server, begun, [*[("m", many)] * 4, ("o", one)]) == "mommm"


def test_who_gives_no_name_shares_one(server: TritonServer, begun: Path) -> None:
    assert order(server, begun, [*[("m", streaming())] * 3, ("o", streaming())]) == "mmmo"


def test_a_name_decides_before_a_sequence_does(server: TritonServer, begun: Path) -> None:
    many = [("m", streaming(client="many", sequence=number)) for number in (1, 2, 3)]
    assert order(server, begun, [*many, ("o", streaming(sequence=9))]) == "momm"


def test_nobody_fills_the_queue_alone(server: TritonServer) -> None:
    """Those without a name are one client, too: it gets half of the places, and another still finds one."""
    share = max_client_places(MAX_WAITING)
    short = inputs("hello", max_tokens=1, seed=SLOW, end_id=-1)

    def waiting() -> float:
        return metric(server, "draftwood_requests_waiting", model=MODEL)

    with ThreadPoolExecutor(share + 4) as threads:
        with Call(server.grpc, MODEL, inputs("hello", max_tokens=900, stream=True, seed=ENDLESS, end_id=-1)) as longer:
            longer.next()
            many = [threads.submit(ask, server, MODEL, short) for _ in range(share + 3)]
            wait_for(lambda: sum(each.done() for each in many) == 3 and waiting() == share)
            other = threads.submit(ask, server, MODEL, short, client="other")
            wait_for(lambda: waiting() == share + 1)
        refused = [error for each in many if (error := each.exception())]
        assert len(refused) == 3 and all("of this client are waiting" in str(error) for error in refused)
        other.result()


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"client": ""}, "client must be text that is not empty, not ''"),
        ({"client": 7}, "client must be text that is not empty, not 7"),
        ({"user": True}, "client must be text that is not empty, not True"),
        ({"client": "a", "user": "b"}, "client is given twice"),
    ],
)
def test_a_bad_name_is_refused(server: TritonServer, parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(Refused, match=named):
        ask(server, MODEL, inputs("hello", max_tokens=1), **parameters)
