"""openai's client for Node, LiteLLM and curl against the server: texts, streams, tools, schemas and refusals.

python -m benchmarks.clients.sdks bundles/smollm2 --node FOLDER --litellm venv/bin/python --output benchmarks/results

FOLDER is where `npm install openai` ran; litellm is installed apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.clients.environment import served
from benchmarks.tools.record import add_output, write_results

FOLDER = Path(__file__).parent


def output_of(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return done.stdout


def curl(url: str, model: str) -> dict[str, Any]:
    """A text, and the same text as a stream. Raises AssertionError if they differ."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    call = ("curl", "-sS", "--fail", "-N", f"{url}/completions", "-H", "Content-Type: application/json", "-d")
    text = json.loads(output_of(*call, json.dumps(body)))["choices"][0]["text"]
    events = [line for line in output_of(*call, json.dumps({**body, "stream": True})).splitlines() if line]
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert "".join(chunks) == text and len(chunks) > 3
    results = {"completion": text, "streamed chunks": len(chunks)}
    return {"versions": {"curl": output_of("curl", "--version").split()[1]}, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--node", type=Path, required=True, help="a folder with node_modules")
    parser.add_argument("--litellm", type=Path, required=True, help="the interpreter of another environment")
    add_output(parser, "clients_sdks")
    arguments = parser.parse_args()
    name = arguments.bundle.name
    with served(arguments.bundle) as url:
        clients = {
            "openai for Node": json.loads(
                output_of("node", FOLDER / "node_calls.mjs", arguments.node.resolve(), url, name)
            ),
            "LiteLLM": json.loads(output_of(arguments.litellm, FOLDER / "litellm_calls.py", url, name)),
            "curl": curl(url, name),
        }
    print(json.dumps(clients, indent=1))
    write_results(arguments.output, arguments.name, {"clients": clients})


if __name__ == "__main__":
    main()
