"""Which tokens a trimmed draft keeps: counted in a text, or by the order of their ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE, write_tokenizer
from distilling import written as written_text
from hypothesis import given
from hypothesis import strategies as st

from draftwood.builder import kept_tokens
from draftwood.builder.kept_tokens import (
    expected_counts,
    frequencies,
    is_ascii_character,
    most_frequent,
    offsets,
    pieces,
)
from draftwood.models.errors import ConfigError
from draftwood.runtime.text.tokenizer import Tokenizer


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
    monkeypatch.setattr(kept_tokens, "MOST_TEXT", 100_000)
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
