"""Two workers after NVIDIA Dynamo's own front end: one is killed, one is asked to stop, some requests are bad."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple

import pytest
from bundling import DEMO, ROOT
from serving import wait_for

from draftwood.runtime import LLM, SamplingParams

pytest.importorskip("dynamo.frontend", reason="NVIDIA Dynamo (ai-dynamo, see deploy/dynamo) is not installed")

STREAMS, TOKENS = 4, 600
WORKER_OPTIONS = ("--threads", "1", "--max-running", "8")


class Answer(NamedTuple):
    text: str
    finish_reason: str | None
    usage: dict[str, int]


@pytest.fixture
def dynamo(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "0")  # nobody else has to hear of it
    file = ROOT / "deploy" / "dynamo" / "local.py"
    spec = importlib.util.spec_from_file_location("draftwood_local_dynamo", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    with module.LocalDynamo(demo_bundle, DEMO / "target", 2, WORKER_OPTIONS) as running:
        yield running


def prompt(number: int) -> str:
    return f"def f{number}(items):"


def send(dynamo: Any, number: int, tokens: int, **more: Any) -> Any:
    body = {"model": "draftwood", "prompt": prompt(number), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{dynamo.url}/v1/completions", json.dumps(body | more).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=60)


def stream(dynamo: Any, number: int, begun: Callable[[], object] = lambda: None) -> Answer:
    """A whole stream. begun: called once its first text is here."""
    text, reason = "", None
    usage: dict[str, int] = {}
    with send(dynamo, number, TOKENS, stream=True, stream_options={"include_usage": True}) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                assert not line.startswith((b"event: error", b": error")), line
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                first = not text
                text += choice.get("text") or ""
                reason = choice.get("finish_reason") or reason
                if first and text:
                    begun()
    return Answer(text, reason, usage)


def counted(url: str, name: str) -> float:
    """A number of a worker's metrics, over all its labels."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", answer.read().decode(), re.MULTILINE)
    return sum(map(float, found))


def test_requests_of_a_killed_worker_go_on_at_the_other(dynamo: Any, demo_bundle: Path) -> None:
    with LLM(demo_bundle) as llm:
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        expected = [result.text for result in llm.generate([prompt(number) for number in range(STREAMS)], params)]
    all_begun = Barrier(STREAMS + 1, timeout=20)
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(stream, dynamo, number, all_begun.wait) for number in range(STREAMS)]
        all_begun.wait()
        assert all(counted(url, "draftwood_requests_running") == STREAMS / 2 for url in dynamo.metrics)
        dynamo.workers[0].send_signal(signal.SIGKILL)
        answers = [each.result(timeout=60) for each in streams]
    assert [answer.text for answer in answers] == expected
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert {answer.usage["completion_tokens"] for answer in answers} == {TOKENS}
    assert max(answer.usage["prompt_tokens"] for answer in answers) < 20, "what the dead worker wrote is no prompt"
    assert counted(dynamo.metrics[1], "draftwood_requests_total") == STREAMS
    for number in range(STREAMS):  # the dead one's lease has not ended yet
        with send(dynamo, number, 8) as answer:
            assert expected[number].startswith(json.load(answer)["choices"][0]["text"])


def test_a_worker_that_is_asked_to_stop_finishes_what_it_has(dynamo: Any) -> None:
    both_begun = Barrier(3, timeout=20)
    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(stream, dynamo, number, both_begun.wait) for number in range(2)]
        both_begun.wait()
        leaving = dynamo.workers[0]
        leaving.send_signal(signal.SIGTERM)
        wait_for(lambda: dynamo.instances() == 1)
        assert leaving.poll() is None and counted(dynamo.metrics[0], "draftwood_requests_running") == 1
        for number in range(4):
            with send(dynamo, number, 4) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
        assert {each.result(timeout=60).usage["completion_tokens"] for each in streams} == {TOKENS}
    assert leaving.wait(timeout=20) == 0
    assert counted(dynamo.metrics[1], "draftwood_requests_total") == 5, "one stream, and all that came later"


def test_bad_requests_are_told_what_to_change(dynamo: Any) -> None:
    for more, message in (
        ({"best_of": 2}, "best_of"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"prompt": "x " * 2000}, "--max-length"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            send(dynamo, 0, 8, **more)
        assert refused.value.code == 400 and message in refused.value.read().decode()
