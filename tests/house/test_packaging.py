"""What users install: every product file under `draftwood`, nothing beside it, and a package that works by itself."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import pytest
from bundling import ROOT

from draftwood.plugins.native.cache import CACHE
from draftwood.plugins.native.compile import CARRIED
from draftwood.plugins.native.processor import X86

ON_X86 = sys.platform == "linux" and platform.machine() in X86
on_x86 = pytest.mark.skipif(not ON_X86, reason="wheels carry kernels for Linux on x86-64")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A freshly built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, so that nothing left over from an earlier build in this checkout can slip in or hide a missing file.
    ignored = shutil.ignore_patterns(".*", "build", "bundles", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT, folder / "source", ignore=ignored)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stdout + done.stderr, "a file is packaged by accident"
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as content:
        return message_from_string(content.read("draftwood-0.1.0.dist-info/METADATA").decode())


def test_the_wheel_holds_nothing_at_top_level_but_the_package(names: set[str]) -> None:
    assert {name.split("/")[0] for name in names} == {"draftwood", "draftwood-0.1.0.dist-info"}


def test_the_wheel_holds_every_source_file(names: set[str]) -> None:
    floors = ("builder", "cli", "models", "plugins", "runtime")
    files = [file.relative_to(ROOT).as_posix() for floor in floors for file in (ROOT / floor).rglob("*.py")]
    assert {f"draftwood/{name}" for name in ("__init__.py", "__main__.py", "py.typed", *files)} <= names
    assert {f"draftwood/{floor}/py.typed" for floor in floors} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_the_wheel_holds_what_a_demo_a_server_and_the_kernels_need(names: set[str]) -> None:
    pair = {file.relative_to(ROOT).as_posix() for file in (ROOT / "models" / "demo").glob("*/*.safetensors")}
    pair |= {
        f"models/demo/{role}/{name}"
        for role in ("target", "draft", "smollm2")
        for name in ("config.json", "tokenizer.json")
    }
    kernels = {file.relative_to(ROOT).as_posix() for file in (ROOT / "plugins" / "native" / "kernels").glob("*.[ch]")}
    kernels |= {file.relative_to(ROOT).as_posix() for file in (ROOT / "plugins" / "device_round").glob("ptx/*.ptx")}
    kernels |= {f"plugins/native/kernels/{each.file.name}" for each in CARRIED} if ON_X86 else set()
    folder = ROOT / "runtime" / "serving" / "http" / "page"  # with its libraries and their licences
    page = {file.relative_to(ROOT).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert len(pair) == 10 and len(kernels) > 6 and len(page) > 20
    assert {f"draftwood/{name}" for name in (*pair, *kernels, *page, "models/demo/prompts.jsonl")} <= names


@on_x86
def test_the_wheel_is_for_a_glibc_that_has_what_its_kernels_use(wheel: Path) -> None:
    (needed,) = re.findall(r"-py3-none-manylinux_2_(\d+)_x86_64\.whl$", wheel.name)
    assert 2 < int(needed) <= int(platform.libc_ver()[1].split(".")[1])


def test_the_metadata_is_ready_for_an_index(metadata: Message) -> None:
    text = str(metadata.get_payload())
    assert metadata["Description-Content-Type"] == "text/markdown" and text.startswith("# Draftwood")
    assert all(link.startswith("https://") for link in re.findall(r"\]\((.*?)\)", text)), "an index has no other files"
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    extras = set(metadata.get_all("Provides-Extra", []))
    assert set(re.findall(r"draftwood\[([\w,-]+)\]", text)) <= extras
    named = {name for row in re.findall(r"^\| (`.*?`) \|", text, re.M) for name in re.findall(r"`(.*?)`", row)}
    assert named == extras
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in text


def test_the_metadata_carries_the_conditions_of_the_constraints(metadata: Message) -> None:
    """A user who installs the wheel has no constraints.txt."""
    needed = metadata.get_all("Requires-Dist", [])
    for condition in ("numpy<2", "sentencepiece<0.2.3"):
        assert condition in (ROOT / "constraints.txt").read_text().split()
        assert f'{condition}; extra == "triton"' in needed


def test_the_demo_pair_is_small_enough_for_git() -> None:
    files = [file for role in ("target", "draft") for file in (ROOT / "models" / "demo" / role).iterdir()]
    assert sum(file.stat().st_size for file in files if file.is_file()) <= 20_000_000


class Installed(NamedTuple):
    """An environment of its own, into which the wheel was installed. It has no torch and no compiler, and the packages
    that it depends on are those of this environment. folder: elsewhere, not in the repository."""

    folder: Path
    site: Path

    def said(self, program: str, *arguments: str) -> str:
        """What a program of the environment prints."""
        programs, others = self.folder / "venv" / "bin", ("PYTHONPATH", "CC")
        environment = {name: value for name, value in os.environ.items() if name not in others}
        environment |= {"PATH": str(programs), CACHE: str(self.folder / "cache")}
        command = [str(programs / program), *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, "--no-compile", str(wheel)], check=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    paths = [path for path in sys.path if path.endswith("site-packages")]
    (site / "zz-dependencies.pth").write_text("\n".join([*paths, "import sys; sys.modules['torch'] = None"]))
    return Installed(folder, site)


def test_an_installed_wheel_decodes_a_bundle(installed: Installed, tiny_bundle: Path) -> None:
    where = installed.said(
        "python", "-c", "import draftwood, draftwood.cli; print(draftwood.__file__, draftwood.cli.__file__)"
    )
    assert all(Path(file).is_relative_to(installed.site) for file in where.split())
    generate = ["generate", str(tiny_bundle), "--prompt", "x", "--max-tokens", "4", "--json"]
    assert '"num_tokens": ' in installed.said("draftwood", *generate)


@on_x86
def test_an_installed_wheel_builds_with_the_kernels_that_it_carries(installed: Installed, tiny_pair: Path) -> None:
    generate = ["generate", str(tiny_pair / "target"), "--prompt", "x", "--max-tokens", "4", "--json"]
    assert '"num_tokens": ' in installed.said("draftwood", *generate)
    assert '"backend": "native"' in next(installed.folder.glob("cache/bundles/*/manifest.json")).read_text()
    assert not list(installed.folder.glob("cache/*.so")), "nothing was compiled"


@on_x86
@pytest.mark.full
def test_a_fresh_environment_serves_a_model(wheel: Path, tiny_pair: Path, tmp_path: Path) -> None:
    """With the packages of the index that the wheel asks for, and no others."""
    venv.create(tmp_path / "venv", with_pip=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    fresh = Installed(tmp_path, site)
    fresh.said("pip", "install", "-q", str(wheel))
    assert not {"torch", "onnx", "onnxruntime"} & {folder.name for folder in site.iterdir()}
    generate = ["generate", str(tiny_pair / "target"), "--prompt", "x", "--max-tokens", "4", "--json"]
    assert '"num_tokens": ' in fresh.said("draftwood", *generate)
    code = "from draftwood.runtime.serving.app import create_app; import llguidance, gguf, sentencepiece"
    assert fresh.said("python", "-c", code) == ""


@pytest.mark.full
def test_an_installed_wheel_needs_nothing_of_the_repository(installed: Installed) -> None:
    assert installed.said("python", "-m", "draftwood", "--version").startswith("draftwood 0.1.0")
    assert re.search(r"auto .*\d", installed.said("draftwood", "demo", "--output", "bundles/demo"))
    code = "from draftwood import LLM; print(LLM(model='bundles/demo').generate(['x'])[0].outputs[0].finish_reason)"
    assert installed.said("python", "-c", code).strip() in ("stop", "length")
