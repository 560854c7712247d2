"""Vocabularies: tokens that the model has no row for are refused in texts, and a trimmed draft keeps the tokens that a
text or the order of ids says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE, write_checkpoint, write_tokenizer
from distilling import written as written_text
from hypothesis import given
from hypothesis import strategies as st
from steps import noted, quiet
from tokenizers import Tokenizer as TokenizerJson

from draftwood import LLM, SamplingParams
from draftwood.builder import kept_tokens
from draftwood.builder.checkpoints.checkpoint import Checkpoint
from draftwood.builder.distillation import distill
from draftwood.builder.distillation.options import DistillOptions
from draftwood.builder.head.train import train_head
from draftwood.builder.head.training import HeadTraining
from draftwood.builder.kept_tokens import (
    expected_counts,
    frequencies,
    is_ascii_character,
    most_frequent,
    offsets,
    pieces,
)
from draftwood.builder.options import BuildOptions
from draftwood.builder.pipeline import build
from draftwood.models.errors import CheckpointError, ConfigError, RequestError
from draftwood.runtime.sampling.structured import StructuredOutput
from draftwood.runtime.text.tokenizer import Tokenizer

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
        distill.write_training_text(options, Checkpoint(folder), 0, quiet, distill.Watch())


@pytest.mark.parametrize(("size", "draft_size"), [(270, None), (270, 270), (VOCAB_SIZE, 270)])
def test_the_tokenizer_of_another_model_is_refused(size: int, draft_size: int | None, tmp_path: Path) -> None:
    target, draft = (
        None if vocab_size is None else write_tokenizer(write_checkpoint(tmp_path / role, vocab_size=vocab_size))
        for role, vocab_size in (("target", size), ("draft", draft_size))
    )
    assert target is not None
    with pytest.raises(CheckpointError, match=f"has a token {VOCAB_SIZE - 1}, and the model has 270 tokens: they belo"):
        build(BuildOptions(target, draft, tmp_path / "bundle", "native"), quiet)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def written(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file


def test_a_text_decides_by_frequency(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = written(tmp_path / "a.txt", "zzzz QQQ zz §§ x")
    kept = set(most_frequent(tokenizer, 9, VOCAB_SIZE, text, (2,)).tolist())
    counted = tokenizer.encode("zzzz QQQ zz §§", add_special_tokens=False)
    assert {0, 1, 2, *counted} <= kept and len(kept) == 9


def test_without_a_text_the_ids_decide(tokenizer: Tokenizer) -> None:
    kept = most_frequent(tokenizer, 200, VOCAB_SIZE, None, ())
    names = {index: token for token, index in tokenizer.vocabulary().items()}
    characters = {index for index, name in names.items() if is_ascii_character(name)}
    assert {0, 1, 2} | characters <= set(kept.tolist())
    others = [index for index in kept.tolist() if index not in characters]
    skipped = sorted(set(range(VOCAB_SIZE)) - set(kept.tolist()))
    assert max(others) < min(skipped) and (np.diff(kept) > 0).all()
    assert 287 in most_frequent(tokenizer, 10, VOCAB_SIZE, None, (287, VOCAB_SIZE + 5, -1)), "it ends a text"
    every = most_frequent(tokenizer, VOCAB_SIZE, VOCAB_SIZE + 40, None, ())
    assert every.tolist() == list(range(VOCAB_SIZE)), "rows that no token has are the last"


def test_every_string_of_json_lines_counts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = {"prompt": "hello", "turns": ["again", {"content": "more"}], "number": 7}
    lines = written(tmp_path / "a.jsonl", json.dumps(row) + "\n\n" + json.dumps("last") + "\n")
    plain = sum(
        frequencies(tokenizer, VOCAB_SIZE, written(tmp_path / t, t)) for t in ("hello", "again", "more", "last")
    )
    assert np.array_equal(frequencies(tokenizer, VOCAB_SIZE, lines), plain)


def test_long_texts_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_tokens, "PIECE", 8)
    text = "one\ntwo\nthree four five six\nseven"
    assert list(pieces([text, ""])) == ["one\ntwo\n", "three fo", "ur five ", "six\n", "seven"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe", "cannot be read"),
        ("a.txt", b"", "holds no text"),
        ("a.jsonl", b'{"a": 1}\n', "holds no text"),
        ("a.jsonl", b'{"a": "b"}\n{"a"\n', "line 2 is no JSON"),
        ("a.jsonl", b"[" * 100_000, "cannot be read"),
        ("a.txt", b"eleven byte" * 10_000, "more than the 100000 that are read"),
    ],
)
def test_a_text_that_cannot_be_counted_is_refused(
    tokenizer: Tokenizer, name: str, content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_tokens, "MAX_TEXT", 100_000)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        frequencies(tokenizer, VOCAB_SIZE, tmp_path / name)


def test_a_number_of_tokens_without_room_is_refused() -> None:
    assert kept_tokens.kept_tokens(np.array([3, 5, 1, 4, 2, 0]), 3, {0, 77}, "--x").tolist() == [0, 3, 5]
    with pytest.raises(ConfigError, match=r"--x 2 leaves no room .* beside the 3 special ones: ask for at least 4"):
        kept_tokens.kept_tokens(np.arange(9), 2, {1, 5, 7}, "--x")


def test_counts_are_the_targets_probabilities() -> None:
    text = written_text(0, 1)
    counts = expected_counts([text], 320)
    expected = np.zeros(320)
    for place in range(len(text.tokens)):
        if text.kinds[place]:
            np.add.at(expected, text.ids[place].astype(int), np.exp(text.logprobs[place].astype(float)))
    np.testing.assert_allclose(counts, expected)


@given(st.sets(st.integers(0, 400), min_size=1))
def test_offsets_give_the_kept_tokens(tokens: set[int]) -> None:
    kept = np.array(sorted(tokens))
    assert (np.arange(len(kept)) + offsets(kept) == kept).all()
