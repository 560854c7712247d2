"""Whether pip finds releases for every extra where torch is a CUDA build, which fixes the release of Triton.

It asks the package index; only `make full` does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from bundling import ROOT

# Not `tensorrt`: its package on the index fetches wheels from NVIDIA's own index while it is built.
EXTRAS = ("onnxruntime", "gpu", "native", "kernel", "tensorrt-rtx", "triton")
INDEX = "https://pypi.org/simple"  # its torch for Linux is the CUDA build
SOURCES = ("tensorrt-rtx", "tensorrt-rtx-cu13")  # have no wheel on the index; their sources only ask for other wheels


def requirements(extra: str) -> list[str]:
    """Of an extra, from pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf"^{extra} = \[(.*)\]", text, re.MULTILINE)
    assert found is not None
    return re.findall(r'"([^"]+)"', found[1])


def refused(answer: str) -> str | None:
    """The name of which pip found no file that it may take."""
    found = re.search(r"No matching distribution found for ([A-Za-z0-9._-]+)", answer)
    return None if found is None or "(from versions: none)" not in answer else found[1]


def is_listed(name: str) -> bool:
    """Whether the index knows a name. Raises HTTPError for another answer than yes or no."""
    try:
        with urlopen(f"{INDEX}/{name}/", timeout=60):
            return True
    except HTTPError as error:
        if error.code != 404:
            raise
        return False


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (
            "ERROR: Could not find a version that satisfies the requirement abacus>=1.7 (from versions: none)\n"
            "ERROR: No matching distribution found for abacus>=1.7",
            "abacus",
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement numpy>9 (from versions: 1.26.4, 2.0.0)\n"
            "ERROR: No matching distribution found for numpy>9",
            None,
        ),
        ("ERROR: ResolutionImpossible: for help visit https://pip.pypa.io/", None),
    ],
)
def test_a_conflict_is_no_missing_name(answer: str, name: str | None) -> None:
    assert refused(answer) == name


@pytest.mark.full
@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_resolves_beside_a_cuda_build_of_torch(extra: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
    command += ["--no-binary", ",".join(SOURCES)]
    command += ["--index-url", INDEX, "-c", str(ROOT / "constraints.txt"), *requirements("train"), *requirements(extra)]
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    if (name := refused(done.stderr)) is not None and not is_listed(name):
        pytest.skip(f"{INDEX} has no {name}")
    assert done.returncode == 0, done.stderr
    (chosen,) = re.findall(r"^Would install (.*)", done.stdout, re.MULTILINE)
    assert re.search(r"\bnvidia-", chosen), "this is no CUDA build of torch, so that nothing was checked"
