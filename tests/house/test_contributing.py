"""The examples of CONTRIBUTING.md, run as a reader would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from bundling import ROOT

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
