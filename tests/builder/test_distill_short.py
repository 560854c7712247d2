"""Distillations that had too little time or text: what they say about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from distilling import COLUMNS, distilled, options, written

from draftwood.builder.distillation import distill as distill_module
from draftwood.builder.distillation.distill import DistillResult
from draftwood.builder.distillation.options import DistillOptions
from draftwood.builder.distillation.state import TextStore
from draftwood.cli.main import main
from draftwood.models.errors import ConfigError


def test_a_target_that_finishes_no_text_in_time_is_named(distill_target: Path, tmp_path: Path) -> None:
    """A second passes with each step of the loop, and every text needs more than six tokens. The same command says the
    same again."""
    given = options(distill_target, tmp_path / "draft", minutes=1, text_minutes=0.1)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"finished no text in 6 seconds, .*: give more --minutes .* --requests"):
            distilled(given)


def test_too_little_text_is_refused(distill_target: Path, tmp_path: Path) -> None:
    store = TextStore(tmp_path / "state" / "texts", 320, COLUMNS)
    given = options(distill_target, tmp_path / "draft", minutes=5, text_minutes=0, state=tmp_path / "state")
    with pytest.raises(ConfigError, match="holds no text, and --text-minutes 0 writes none"):
        distilled(given)
    store.add(written(0, 1))
    with pytest.raises(ConfigError, match=r"none of the 1 texts in .* is held out .*: give more --minutes"):
        distilled(given)
    with pytest.raises(ConfigError, match=r"is held out .*: give more --prompts"):
        distilled(replace(given, questions=("hello",)))
    store.add(written(1, 32))
    with pytest.raises(ConfigError, match="has 40 tokens of text, too few for one step of 2 x 32"):
        distilled(given)


@pytest.mark.parametrize(
    ("minutes", "steps", "said"),
    [
        ("1", 9, "takes some 30 minutes, and this one had 1: the same command with more --minutes goes on"),
        ("1", 0, "has not improved on its beginning yet, which was written: give more --minutes"),
        ("480", 0, "has not improved on its beginning yet, which was written: give more --minutes"),
        ("480", 9, ""),
    ],
)
def test_the_end_says_when_a_draft_had_too_little_training(
    minutes: str,
    steps: int,
    said: str,
    distill_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = {"acceptance": {"acceptance_0": 0.01}, "text_tokens": 900, "steps": steps}

    def finished(options: DistillOptions, *rest: Any) -> DistillResult:
        return DistillResult(options.output, figures)

    monkeypatch.setattr(distill_module, "distill", finished)
    given = ["--target", str(distill_target), "--output", str(tmp_path / "draft"), "--minutes", minutes]
    assert main(["distill", *given]) == 0
    shown = capsys.readouterr().out
    assert said in shown and "temperature 0: 0.01" in shown
    assert bool(said) == ("give more --minutes" in shown or "with more --minutes" in shown)
