"""One real server for the tests of what it answers, its clients, and the texts that it should answer with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Served, served, with_infilling, with_thoughts

from draftwood.runtime import LLM, SpeculativeConfig

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if mood is defined %}[{{ mood }}]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
FIXED = ("--speculative", "budget=fixed")  # proposals that do not depend on how fast this machine is
Complete = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def chat_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_infilling(tiny_bundle, tmp_path_factory.mktemp("served"), TEMPLATE)


@pytest.fixture(scope="session")
def api(chat_bundle: Path) -> Iterator[Served]:
    """The server. Its model is "tiny"."""
    with served(chat_bundle, *FIXED) as running:
        yield running


@pytest.fixture(scope="session")
def thinking_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_thoughts(tiny_bundle, tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="session")
def thinker(thinking_bundle: Path) -> Iterator[Served]:
    """A server whose model "tiny" thinks and calls tools, and which keeps two responses."""
    with served(thinking_bundle, *FIXED, "--stored-responses", "2") as running:
        yield running


@pytest.fixture(scope="session")
def http(api: Served) -> Iterator[Any]:
    httpx = pytest.importorskip("httpx", reason="needs httpx")
    with httpx.Client(base_url=api.root, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def post(thinker: Served) -> Iterator[Any]:
    """Posts fields to the server that thinks."""
    httpx = pytest.importorskip("httpx", reason="needs httpx")
    with httpx.Client(base_url=thinker.root, timeout=120) as client:
        yield lambda path, **body: client.post(path, json=body)


@pytest.fixture(scope="session")
def client(api: Served) -> Iterator[Any]:
    """OpenAI's own client."""
    openai = pytest.importorskip("openai", reason="needs the openai package")
    with openai.OpenAI(base_url=api.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def served_llm(chat_bundle: Path) -> Iterator[LLM]:
    """What the server should answer."""
    with LLM(chat_bundle, SpeculativeConfig(budget="fixed")) as llm:
        yield llm


@pytest.fixture(scope="session")
def complete(http: Any) -> Complete:
    """The answer to a greedy completion of "hello" with these fields, or to a chat if they have messages."""

    def ask(**fields: Any) -> dict[str, Any]:
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        prompt = {} if "messages" in fields else {"prompt": "hello"}
        body = {**prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        content: dict[str, Any] = answer.json()
        return content

    return ask


@pytest.fixture(scope="session")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prompts in the order in which a model of `tritonserver` began their texts."""
    return tmp_path_factory.mktemp("begun") / "prompts"


@pytest.fixture(scope="session")
def tritonserver(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory, begun: Path) -> Iterator[Any]:
    from triton_client import BEGUN, triton

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BEGUN, str(begun))
        with triton(tiny_bundle, tmp_path_factory.mktemp("triton") / "models") as running:
            yield running


@pytest.fixture
def triton_api(tritonserver: Any) -> Iterator[Any]:
    """Triton's own client."""
    from tritonclient.grpc import InferenceServerClient

    with InferenceServerClient(tritonserver.grpc) as opened:
        yield opened
