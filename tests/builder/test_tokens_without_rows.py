"""Tokenizers with more tokens than the model has rows: added tokens may lack one, and texts with them are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import VOCAB_SIZE, write_checkpoint, write_tokenizer
from steps import noted, quiet
from tokenizers import Tokenizer as TokenizerJson

from draftwood import LLM, SamplingParams
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.distillation import distill
from draftwood.builder.distillation.options import DistillOptions
from draftwood.builder.head.train import train_head
from draftwood.builder.head.training import HeadTraining
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.models.errors import CheckpointError, ConfigError, RequestError
from draftwood.runtime.sampling.structured import StructuredOutput

REFUSED = rf"holds '<image>', which is token {VOCAB_SIZE}, and the model has {VOCAB_SIZE} tokens: remove it"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows every token but an added one, as CodeLlama-34b does."""
    folder = write_checkpoint(
        tmp_path_factory.mktemp("added") / "folder", intermediate_size=64, max_position_embeddings=64
    )
    write_tokenizer(folder)
    tokenizer = TokenizerJson.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_bundle_refuses_prompts_with_such_a_token_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    told: list[str] = []

    build(BuildOptions(folder, None, tmp_path / "bundle", "native", "fp32"), noted(told))
    assert any(f"has {VOCAB_SIZE + 1} tokens and the model {VOCAB_SIZE}: a prompt with one of" in each for each in told)
    with LLM(str(tmp_path / "bundle")) as llm:
        with pytest.raises(RequestError, match=f"prompt token {VOCAB_SIZE} is not a token id"):
            llm.generate("a<image>", SamplingParams(max_tokens=2))
        form = SamplingParams(max_tokens=9, temperature=0, structured=StructuredOutput(regex="(men|kit)"))
        assert llm.generate("a", form)[0].outputs[0].text in ("men", "kit")
        plain = llm.generate("a", SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].text
        words = SamplingParams(max_tokens=4, temperature=0, bad_words=["<image>", f"{plain[0]}<image>"])
        assert llm.generate("a", words)[0].outputs[0].text == plain


def test_a_calibration_with_such_a_token_is_refused(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the <image> rain " * 20)
    options = BuildOptions(folder, None, tmp_path / "bundle", "native", "int4", calibration=text)
    with pytest.raises(ConfigError, match=f"the text for calibration, .*text.txt, {REFUSED}"):
        build(options, quiet)


def test_trainings_with_such_a_token_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["the rain", "the <image>"]
    with pytest.raises(ConfigError, match=f"a prompt {REFUSED}"):
        train_head(HeadTraining(folder, folder, tmp_path / "head", max_new_tokens=8), prompts, quiet)

    def tokenizer_only(checkpoint: Checkpoint, folder: Path, begin: object) -> None:
        folder.mkdir(parents=True)
        checkpoint.write_tokenizer(folder)

    monkeypatch.setattr(distill, "compile_target", tokenizer_only)
    options = DistillOptions(folder, tmp_path / "draft", 30, state=tmp_path / "state", questions=tuple(prompts))
    with pytest.raises(ConfigError, match=f"a prompt {REFUSED}"):
        distill.write_training_text(options, Checkpoint(folder), quiet, distill.Watch())


@pytest.mark.parametrize(("size", "draft_size"), [(270, None), (270, 270), (VOCAB_SIZE, 270)])
def test_the_tokenizer_of_another_model_is_refused(size: int, draft_size: int | None, tmp_path: Path) -> None:
    target, draft = (
        None if vocab_size is None else write_tokenizer(write_checkpoint(tmp_path / role, vocab_size=vocab_size))
        for role, vocab_size in (("target", size), ("draft", draft_size))
    )
    assert target is not None
    with pytest.raises(CheckpointError, match=f"has a token {VOCAB_SIZE - 1}, and the model has 270 tokens: they belo"):
        build(BuildOptions(target, draft, tmp_path / "bundle", "native"), quiet)
