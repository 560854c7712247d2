"""The examples of CONTRIBUTING.md, run as a reader would run them; and the copy in which mutants are tried."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bundling import ROOT
from mutation import Tree

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"## ([^\n]+)\n(?:(?!\n## ).)*?```python\n(.*?)```", PAGE, re.DOTALL)


def test_there_are_examples() -> None:
    assert {title for title, _ in EXAMPLES} == {"A verifier", "A grower", "A family of models"}


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_an_example_runs(title: str, code: str) -> None:
    path = os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_every_file_that_is_named_exists() -> None:
    for name in re.findall(r"`((?:runtime|builder|models|plugins|tests)/[\w/.]*\w)`", PAGE):
        assert (ROOT / name).exists(), name


def test_mutants_are_imported_from_their_copy(tmp_path: Path) -> None:
    """Else every one of them would survive."""
    tree = Tree(tmp_path)
    command = [sys.executable, "-c", "import draftwood.runtime.llm as found; print(found.__file__)"]
    done = subprocess.run(command, env=tree.environment, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert Path(done.stdout.strip()).resolve() == tmp_path.resolve() / "runtime" / "llm.py"
