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
FUNCTION = {"name": "weather", "parameters": CITY}
FORCED = {"model": "tiny", "temperature": 0, "thinking_token_budget": 5, "logit_bias": {"286": 100}}
OPENAI = {**FORCED, "tool_choice": "required", "parallel_tool_calls": False}
CHAT = {"messages": [USER], "max_tokens": 300}
ANY = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {**OPENAI, **CHAT, "tools": [{"type": "function", "function": FUNCTION}]},
    "responses": {**OPENAI, "input": "x", "max_output_tokens": 300, "tools": [{"type": "function", **FUNCTION}]},
    "messages": {**FORCED, **CHAT, **ANY, "tools": [{"name": "weather", "input_schema": CITY}]},
}
OTHER = {"messages": {**BODIES["messages"], "model": "claude"}}
LATER = {"id", "call_id", "created", "created_at", "usage", "metrics", "parsed", "parsed_arguments", "output_text"}


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest, thinker: Served) -> dict[str, Any]:
    """What the script says of BODIES and of OTHER."""
    if shutil.which("npm") is None:
        pytest.skip("needs Node and npm")
    folder = request.config.cache.mkdir("node_clients")
    wanted = [f"{name}@{version}" for name, version in PACKAGES.items()]
    if {name: installed(folder, name) for name in PACKAGES} != PACKAGES:
        command = ["npm", "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", *wanted]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"npm installs nothing here: {done.stderr[-200:]}")
    calls = [*BODIES.items(), *OTHER.items()]
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


@pytest.mark.parametrize("api", BODIES)
def test_calls_and_thoughts_come_whole_and_as_a_stream(told: Any, post: Any, api: str) -> None:
    expected, answer = post(f"/v1/{api}", **BODIES[api]).json(), told["answers"][[*BODIES].index(api)]
    assert lasting(answer["whole"]) == lasting(expected), answer
    assert lasting(answer["final"]) == lasting(expected)
    assert len(answer["kinds"]) > 3 and '"weather"' in json.dumps(answer["final"])


def test_other_calls_and_errors(told: Any) -> None:
    assert told["kept"] and told["input_tokens"] > 3
    error = told["answers"][-1]
    assert (error["kind"], error["status"]) == ("NotFoundError", 404) and "this server has 'tiny'" in error["message"]
