"""A training that begins with an earlier draft, and what is said of one that had too little time or text."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from distilling import COLUMNS, distilled, options, written
from safetensors.torch import load_file, save_file

from draftwood.builder import torch_settings
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.distillation import distill as distill_module
from draftwood.builder.distillation.card import EARLIER
from draftwood.builder.distillation.distill import DistillResult
from draftwood.builder.distillation.draft import check_beginning, is_tied, read_start
from draftwood.builder.distillation.loss import estimate
from draftwood.builder.distillation.network import DraftNetwork
from draftwood.builder.distillation.state import TextStore
from draftwood.cli.main import main
from draftwood.models.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")
UNSIZED = {"hidden": None, "vocabulary": None}  # the earlier draft has its own sizes


def test_a_training_begins_with_an_earlier_draft(draft: Path, target: Path, tmp_path: Path) -> None:
    """Its first estimate, in the state of the earlier one, is that of the earlier draft; the rest is as usual."""
    state = tmp_path / "state"
    shutil.copytree(draft.with_name("draft.state") / "texts", state / "texts")
    given = options(target, tmp_path / "next", state=state, text_minutes=0, start=draft, **UNSIZED)
    figures = distilled(given).figures
    assert distilled(given).figures["tokens_seen"] == figures["tokens_seen"], "no time is left"
    with pytest.raises(ConfigError, match="began with another --from, or with none"):
        distilled(options(target, tmp_path / "other", state=state, text_minutes=0))
    earlier = json.loads((draft / "distillation.json").read_text())
    assert figures["vocabulary"] == 64 and figures["hidden"] == 32
    assert figures["started_from"] == {name: earlier[name] for name in EARLIER}
    start = read_start(draft, Checkpoint(target))._replace(earlier={})
    assert check_beginning(state / "training", start, continued=True) == figures["started_from"]
    assert "began with an earlier draft" in (tmp_path / "next" / "README.md").read_text()
    first = json.loads((state / "training.json").read_text())["curve"][0]["loss"]
    assert first == pytest.approx(estimate_of(draft, target, state), rel=1e-3)  # both are rounded to bf16
    assert (
        load_file(draft / "model.safetensors")["d2t"].tolist()
        == load_file(tmp_path / "next" / "model.safetensors")["d2t"].tolist()
    )


def test_the_vocabulary_is_chosen_anew_where_a_size_is_given(draft: Path, target: Path, tmp_path: Path) -> None:
    """More tokens than before, each with the row that the embedding has for it."""
    state = tmp_path / "state"
    shutil.copytree(draft.with_name("draft.state") / "texts", state / "texts")
    sizes = {**UNSIZED, "vocabulary": 96}
    given = options(target, tmp_path / "next", state=state, text_minutes=0, minutes=1, start=draft, **sizes)
    figures = distilled(given).figures
    earlier = json.loads((draft / "distillation.json").read_text())
    assert figures["vocabulary"] == 96 and figures["vocabulary_coverage"] > earlier["vocabulary_coverage"]
    checkpoint = Checkpoint(tmp_path / "next")
    kept, fewer = checkpoint.kept_tokens, Checkpoint(draft).kept_tokens
    assert kept is not None and fewer is not None and set(kept) > set(fewer) and is_tied(checkpoint, kept)


def estimate_of(draft: Path, target: Path, state: Path) -> float:
    """The held-out loss of a finished draft."""
    start = read_start(draft, Checkpoint(target))
    network = DraftNetwork(start.config, 32, start.kept)
    start.load(network)
    return estimate(network, distill_module.held_out_batches(TextStore(state / "texts", 320, COLUMNS), 32)).loss


def test_a_draft_that_a_training_cannot_begin_with_is_refused(draft: Path, target: Path, tmp_path: Path) -> None:
    given = options(target, tmp_path / "next", **UNSIZED)
    with pytest.raises(ConfigError, match="hidden cannot be given beside --from"):
        replace(given, start=draft, hidden=32)
    with pytest.raises(ConfigError, match="no draft that a training can begin with"):
        distilled(replace(given, start=target))
    other = write_checkpoint(tmp_path / "other", "gqa", vocab_size=64)
    with pytest.raises(ConfigError, match="reads 64 tokens, and the target has 320"):
        distilled(replace(given, start=other))
    untied = tmp_path / "untied"
    shutil.copytree(draft, untied)
    tensors = load_file(untied / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.ones(64, 32, dtype=torch.bfloat16)}, untied / "model.safetensors")
    config = json.loads((untied / "config.json").read_text()) | {"tie_word_embeddings": False}
    (untied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="no draft that a training can begin with"):
        distilled(replace(given, start=untied))
    assert not (tmp_path / "next.state").exists()


def test_bf16_is_for_processors_that_multiply_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for listed, expected in ({"avx2", "fma"}, False), ({"avx2", "avx512_bf16"}, True):
        monkeypatch.setattr(torch_settings, "available", lambda wanted, listed=listed: listed | set(wanted))
        assert torch_settings.is_half_fast(torch.device("cpu")) is expected


def test_a_target_that_finishes_no_text_in_time_is_named(target: Path, tmp_path: Path) -> None:
    """A second passes with each step of the loop, and every text needs more than six tokens. The same command says the
    same again."""
    given = options(target, tmp_path / "draft", minutes=1, text_minutes=0.1)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"finished no text in 6 seconds, .*: give more --minutes .* --requests"):
            distilled(given)


def test_too_little_text_is_refused(target: Path, tmp_path: Path) -> None:
    store = TextStore(tmp_path / "state" / "texts", 320, COLUMNS)
    given = options(target, tmp_path / "draft", minutes=5, text_minutes=0, state=tmp_path / "state")
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


def test_the_end_says_when_a_draft_had_too_little_training(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = "takes some 30 minutes, and this one had 1: the same command with more --minutes goes on"
    unimproved = "has not improved on its beginning yet, which was written: give more --minutes"
    for minutes, steps, said in (("1", 9, short), ("1", 0, unimproved), ("480", 0, unimproved), ("480", 9, "")):
        figures = {"acceptance": {"acceptance_0": 0.01}, "text_tokens": 900, "steps": steps}
        result = DistillResult(tmp_path / "draft", figures)
        monkeypatch.setattr(distill_module, "distill", lambda *_, result=result: result)
        assert main(["distill", "--target", str(target), "--output", str(result.output), "--minutes", minutes]) == 0
        shown = capsys.readouterr().out
        assert said in shown and "temperature 0: 0.01" in shown
        assert bool(said) == ("give more --minutes" in shown or "with more --minutes" in shown)
