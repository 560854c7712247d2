"""Whether pip finds releases for every extra where torch is a CUDA build, which fixes the release of Triton.

It asks the package index; only `make full` does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from bundling import ROOT

# Not `tensorrt`: its package on the index fetches wheels from NVIDIA's own index while it is built.
EXTRAS = ("cpu", "gpu", "hub", "native", "kernel", "tensorrt-rtx", "triton", "structured", "serve")
INDEX = "https://pypi.org/simple"  # its torch for Linux is the CUDA build


def requirements(extra: str) -> list[str]:
    """Of an extra, from pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf"^{extra} = \[(.*)\]", text, re.MULTILINE)
    assert found is not None
    return re.findall(r'"([^"]+)"', found[1])


@pytest.mark.full
@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_resolves_beside_a_cuda_build_of_torch(extra: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
    command += ["--index-url", INDEX, "-c", str(ROOT / "constraints.txt"), *requirements("build"), *requirements(extra)]
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert done.returncode == 0, done.stderr
    (chosen,) = re.findall(r"^Would install (.*)", done.stdout, re.MULTILINE)
    assert re.search(r"\bnvidia-", chosen), "this is no CUDA build of torch, so that nothing was checked"
