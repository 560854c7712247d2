"""LangChain's ChatOpenAI against the server: structured outputs by both methods, tools, streams and a tool's answer.

python -m benchmarks.clients.langchain bundles/smollm2 --python venv/bin/python --output benchmarks/results

langchain-openai is installed apart; `langchain_calls.py` runs with the interpreter of that environment.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from benchmarks.clients.environment import served, version_of
from benchmarks.tools.record import add_output, write_results

CALLS = Path(__file__).with_name("langchain_calls.py")
PACKAGES = ("langchain-openai", "langchain-core", "openai")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--python", type=Path, required=True, help="the interpreter of another environment")
    add_output(parser, "clients_langchain")
    arguments = parser.parse_args()
    with served(arguments.bundle) as url:
        command = [arguments.python, CALLS, url, arguments.bundle.name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    versions = {package: version_of(package, arguments.python) for package in PACKAGES}
    results = json.loads(done.stdout)
    print(json.dumps(results, indent=1))
    write_results(arguments.output, arguments.name, {"versions": versions, "results": results})


if __name__ == "__main__":
    main()
