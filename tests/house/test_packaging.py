"""What users install: every product file under `draftwood`, nothing beside it; and the public names."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile

import pytest
from bundling import ROOT

import draftwood.runtime


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names inside a freshly built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, so that nothing left over from an earlier build in this checkout can slip in or hide a missing file.
    ignored = shutil.ignore_patterns(".*", "build", "bundles", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT, folder / "source", ignore=ignored)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file).namelist()


def test_the_wheel_holds_nothing_at_top_level_but_the_package(wheel: list[str]) -> None:
    assert {name.split("/")[0] for name in wheel} == {"draftwood", "draftwood-0.1.0.dist-info"}


def test_the_wheel_holds_every_source_file(wheel: list[str]) -> None:
    floors = ("builder", "cli", "models", "plugins", "runtime")
    sources = {
        f"draftwood/{file.relative_to(ROOT).as_posix()}" for floor in floors for file in (ROOT / floor).rglob("*.py")
    }
    assert sources <= set(wheel)
    assert {f"draftwood/{floor}/py.typed" for floor in floors} <= set(wheel)
    assert {"draftwood/models/demo/target/model.safetensors", "draftwood/runtime/serving/http/chat.html"} <= set(wheel)


def test_the_public_names_exist_and_are_sorted() -> None:
    names = draftwood.runtime.__all__
    assert all(hasattr(draftwood.runtime, name) for name in names)
    assert len(set(names)) == len(names)


def test_the_demo_pair_is_small_enough_for_git() -> None:
    files = [file for role in ("target", "draft") for file in (ROOT / "models" / "demo" / role).iterdir()]
    assert sum(file.stat().st_size for file in files if file.is_file()) <= 20_000_000
