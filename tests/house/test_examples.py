"""The examples, run as a reader would run them: over the demo pair, which gets a chat template for the conversation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bundling import ROOT
from serving import with_chat_template

EXAMPLES = ROOT / "examples"
SCRIPTS = {
    "generate.py": "the same text: True",
    "stream.py": "proposed tokens were accepted",
    "batch.py": '"finish_reason": ',
    "conversation.py": "tokens of the conversation were not read again",
    "structured.py": "all of them allowed by the schema",
    "methods.py": "the same text each time: True",
    "together.py": "the same texts: True",
    "openai_client.py": "tokens were proposed by the draft",
}
NOTEBOOK = "rounds.ipynb"
NEEDS = {"structured.py": "llguidance", "openai_client.py": "openai"}


@pytest.fixture(scope="module")
def bundle(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(demo_bundle, tmp_path_factory.mktemp("examples"))


def test_every_example_is_run_and_listed() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert files == {*SCRIPTS, NOTEBOOK}
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"| [`{name}`]({name}) |" in page for name in files)


@pytest.mark.parametrize("name", [*SCRIPTS, NOTEBOOK])
def test_an_example_runs(name: str, bundle: Path, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    code, said = cells(EXAMPLES / name) if name == NOTEBOOK else (None, SCRIPTS[name])
    command = [sys.executable, *(("-c", code) if code else (str(EXAMPLES / name), str(bundle)))]
    environment = os.environ | {"DRAFTWOOD_BUNDLE": str(bundle)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def cells(notebook: Path) -> tuple[str, str]:
    """The code of a notebook as one program, and what its last cell prints. Its outputs are not stored."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code)
    return "\n".join("".join(cell["source"]) for cell in code), "passes of the target instead of"
