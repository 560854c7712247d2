"""The npm clients of OpenAI and Anthropic, which get what a POST gets, whole and as a stream."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from bundling import ROOT
from serving import CITY, USER, Served

PACKAGES = {"openai": "6.49.0", "@anthropic-ai/sdk": "1.14.0"}
FORCED = {"thinking_token_budget": 5, "logit_bias": {"286": 100}, "temperature": 0, "model": "tiny"}
FUNCTION = {"name": "weather", "parameters": CITY}
TOLD = {**FORCED, "tool_choice": "required", "parallel_tool_calls": False}
LATER = {"id", "call_id", "created", "created_at", "usage", "metrics", "parsed", "parsed_arguments", "output_text"}
CALLS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "chat",
        "/v1/chat/completions",
        {**TOLD, "messages": [USER], "max_tokens": 300, "tools": [{"type": "function", "function": FUNCTION}]},
    ),
    (
        "responses",
        "/v1/responses",
        {**TOLD, "input": "hello", "max_output_tokens": 300, "tools": [{"type": "function", **FUNCTION}]},
    ),
    (
        "messages",
        "/v1/messages",
        {
            **FORCED,
            "messages": [USER],
            "max_tokens": 300,
            "tools": [{"name": "weather", "input_schema": CITY}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    ),
]


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest, thinker: Served) -> dict[str, Any]:
    """What the script says of CALLS, and of one for another model."""
    if shutil.which("npm") is None:
        pytest.skip("needs Node and npm")
    folder = request.config.cache.mkdir("node_clients")  # type: ignore[union-attr]
    wanted = [f"{name}@{version}" for name, version in PACKAGES.items()]
    if {name: installed(folder, name) for name in PACKAGES} != PACKAGES:
        command = ["npm", "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", *wanted]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"npm installs nothing here: {done.stderr[-200:]}")
    calls = [(api, body) for api, _, body in CALLS]
    calls.append(("messages", {**CALLS[2][2], "model": "claude"}))
    done = subprocess.run(
        ["node", str(ROOT / "tests" / "support" / "node_clients.mjs"), str(folder)],
        input=json.dumps({"root": thinker.root, "calls": calls}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def installed(folder: Path, name: str) -> str | None:
    package = folder / "node_modules" / name / "package.json"
    return str(json.loads(package.read_text())["version"]) if package.is_file() else None


def lasting(value: Any) -> Any:
    """An answer without what differs between two, and what the clients add."""
    if isinstance(value, list):
        return [lasting(each) for each in value]
    if isinstance(value, dict):
        return {name: lasting(each) for name, each in value.items() if name not in LATER and each is not None}
    return value


@pytest.mark.parametrize("number", range(len(CALLS)), ids=[api for api, _, _ in CALLS])
def test_calls_and_thoughts_come_whole_and_as_a_stream(told: Any, post: Any, number: int) -> None:
    _, path, body = CALLS[number]
    expected, answer = post(path, **body).json(), told["answers"][number]
    assert lasting(answer["whole"]) == lasting(expected), answer
    assert lasting(answer["final"]) == lasting(expected)
    assert len(answer["kinds"]) > 3 and '"weather"' in json.dumps(answer["final"])


def test_the_rest(told: Any) -> None:
    assert told["kept"] and told["input_tokens"] > 3
    error = told["answers"][len(CALLS)]
    assert (error["kind"], error["status"]) == ("NotFoundError", 404) and "this server has 'tiny'" in error["message"]
