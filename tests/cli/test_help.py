"""Help that fits on a screen, and answers to the words of other programs."""

from __future__ import annotations

import pytest

from draftwood.cli.main import COMMANDS, ELSEWHERE, OPTIONS, main

MAX_LINES = 25
NAMES = [command.__name__.rpartition(".")[2].replace("_", "-") for command in COMMANDS]


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, error = capsys.readouterr()
    assert ended.value.code == (2 if error else 0)
    return out + error


def test_draftwood_alone_is_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said([], capsys)
    assert shown == said(["--help"], capsys) and all(f"\n    {name} " in shown for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_a_command_fits_on_a_screen(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    short, full = said([name, "--help"], capsys), said([name, "--help-all"], capsys)
    assert len([line for line in short.splitlines() if line.startswith(" ")]) <= MAX_LINES
    further = short.count("--help-all shows ")
    assert ("\nfurther options, " in full) == bool(further) and "\nfurther options, " not in short


@pytest.mark.parametrize("name", ["chat", "generate", "serve", "triton"])
def test_speculation_has_the_same_options_everywhere(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said([name, "--help-all"], capsys)
    options = ("--speculative", "--no-speculation", "--grow", "--max-draft-len", "--max-total-draft-tokens")
    assert all(option in shown for option in options) and "--merge" not in shown


@pytest.mark.parametrize("word", ELSEWHERE)
def test_the_commands_of_other_programs_are_answered(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"write {ELSEWHERE[word]}" in said([word, "x"], capsys)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_options_of_other_programs_are_answered(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert OPTIONS[option] in said(["serve", option, "x"], capsys)
    assert "did you mean" not in said(["serve", option, "x"], capsys)
