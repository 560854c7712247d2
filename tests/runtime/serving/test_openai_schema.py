"""The OpenAPI document, taken at its word: whatever it allows or forbids, no request makes the server fail."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from serving import served

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
from schemathesis import GenerationMode  # noqa: E402 - only where it is installed
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance  # noqa: E402

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]
WRITTEN = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/completions/explain",
    "/v1/chat/completions/explain",
    "/infill",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/tokenize",
    "/detokenize",
)
NEEDED = {"messages": [{"role": "user", "content": "x"}], "prompt": None, "tokens": None, "input": "x"}
READ = (
    "/v1/models",
    "/v1/models/{name}",
    "/v1/responses/{name}",
    "/api/ps",
    "/api/tags",
    "/api/version",
    "/health",
    "/health/ready",
    "/metrics",
    "/version",
)


@pytest.fixture(scope="module")
def document(chat_bundle: Path) -> Iterator[Any]:
    """The document of a server whose model is called "0"; generated bodies are made to name it."""
    with served(chat_bundle, "--served-model-name", "0") as running:
        yield schemathesis.openapi.from_url(f"{running.root}/openapi.json", wait_for_schema=5)


def test_every_operation_is_tried(document: Any) -> None:
    assert {result.ok().path for result in document.get_all_operations()} == {*WRITTEN, *READ}


@pytest.mark.parametrize("path", WRITTEN)
def test_no_body_makes_the_server_fail(document: Any, path: str) -> None:
    examples = 8 if path.endswith("/explain") else 25  # the bodies are those of the endpoint that is explained
    allowed = statuses(document[path]["POST"], GenerationMode.POSITIVE, examples)
    forbidden = statuses(document[path]["POST"], GenerationMode.NEGATIVE, examples)
    assert 200 in allowed <= {200, 400, 429} and 400 in forbidden


@pytest.mark.parametrize("path", READ)
def test_no_reading_makes_the_server_fail(document: Any, path: str) -> None:
    assert statuses(document[path]["GET"], GenerationMode.POSITIVE, 4) <= {200, 404}


def statuses(operation: Any, mode: GenerationMode, examples: int) -> set[int]:
    """The statuses of generated requests. Every answer is checked against the document. Every other body has only
    the fields that it needs, and a conversation that makes sense: at random hardly any does."""
    seen: set[int] = set()
    turns = count()

    @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def answered(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "0"
        if next(turns) % 2 and isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            case.body = {name: NEEDED[name] or value for name, value in case.body.items() if name in NEEDED}
        seen.add(case.call_and_validate(checks=CHECKS, timeout=120).status_code)

    answered()
    return seen
