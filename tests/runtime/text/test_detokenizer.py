"""Text as it comes equals text decoded at once; stop strings are found wherever the pieces are cut."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from checkpoints import write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from draftwood.runtime.text.detokenizer import BegunStop, IncrementalDetokenizer, StopChecker
from draftwood.runtime.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def sentencepiece(stories: Path) -> Tokenizer:
    return Tokenizer.load(stories / "target")


def test_a_letter_of_a_text_that_nearly_stops_takes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop string that repeats itself, and a text that is one of its beginnings again and again: the steps are as
    many as letters, not their product."""
    steps = 0
    border = BegunStop._border

    def counted(begun: BegunStop, size: int) -> int:
        nonlocal steps
        steps += 1
        return border(begun, size)

    monkeypatch.setattr(BegunStop, "_border", counted)
    checker = StopChecker(["a" * 999 + "b", "a" * 500 + "c"])
    text = "a" * 3000
    assert "".join(checker.push(letter).text for letter in text) + checker.finish() == text
    assert steps < 2 * 2 * len(text)


def words(longest: int) -> list[str]:
    return ["".join(letters) for length in range(1, longest + 1) for letters in product("ab", repeat=length)]


@given(data=st.data())
def test_special_tokens_that_are_not_skipped_stand_between_the_texts_around_them(
    byte_level: Tokenizer, data: st.DataObject
) -> None:
    """A character never spans a special token."""
    parts = data.draw(st.lists(st.lists(st.integers(3, byte_level.vocab_size - 1), max_size=6), min_size=1, max_size=4))
    name = byte_level.decode([2], skip_special_tokens=False)
    assert name and 2 in byte_level.special_token_ids
    tokens = [token for part in parts for token in (*part, 2)]
    before = byte_level.encode("x")
    shown = IncrementalDetokenizer(byte_level, before, skip_special_tokens=False)
    written = "".join(shown.push(tokens)) + shown.finish()
    begin = len(byte_level.decode(before))
    assert written == "".join(byte_level.decode(before + part)[begin:] + name for part in parts)


def test_a_shown_special_token_keeps_the_leading_space_after_it(sentencepiece: Tokenizer) -> None:
    before, tokens = sentencepiece.encode("Once"), sentencepiece.encode("upon a")[1:]
    shown = IncrementalDetokenizer(sentencepiece, before, skip_special_tokens=False)
    assert "".join(shown.push([*tokens[:1], 2, *tokens[1:]])) == " upon\n</s>\n a".replace("\n", "")


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("others", [[], ["bab"], ["aab", "b"]])
def test_the_first_stop_string_ends_a_text(keeps: bool, others: list[str]) -> None:
    """Every text of six letters with every stop string of up to four, however the text is cut into pieces: of those
    that are complete at the end of a piece, the one that begins first."""
    for text, stop in product([word for word in words(6) if len(word) == 6], words(4)):
        for size in (1, 2, 6):
            checker, written, stopped, end = StopChecker([stop, *others], keeps), "", False, 0
            while not stopped and end < 6:
                end += size
                delta, stopped = checker.push(text[end - size : end])
                written += delta
            found = [(text[:end].find(each), each) for each in (stop, *others) if each in text[:end]]
            assert stopped == bool(found)
            begin, first = min((begin, begin + len(each)) for begin, each in found) if found else (6, 6)
            assert (written if stopped else written + checker.finish()) == text[: first if keeps else begin]
