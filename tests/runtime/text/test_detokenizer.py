"""Text as it comes equals text decoded at once; stop strings are found wherever the pieces are cut."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from checkpoints import write_tokenizer
from hypothesis import given, settings
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


def streamed(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    deltas = detokenizer.push(tokens)
    assert len(deltas) == len(tokens)
    return "".join(deltas) + detokenizer.finish()


def continuation(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    return tokenizer.decode(prompt + tokens)[len(tokenizer.decode(prompt)) :]


@given(text=st.text(max_size=40), prompt=st.sampled_from(["", "hello", "a b "]))
def test_any_text_streams_whole(byte_level: Tokenizer, text: str, prompt: str) -> None:
    before = byte_level.encode(prompt)
    tokens = byte_level.encode(text, add_special_tokens=False)
    assert streamed(byte_level, before, tokens) == continuation(byte_level, before, tokens)


@given(data=st.data())
def test_any_token_ids_stream_whole(byte_level: Tokenizer, data: st.DataObject) -> None:
    """Invalid UTF-8 included: a byte that never completes a character is handed out in the end."""
    tokens = data.draw(st.lists(st.integers(3, byte_level.vocab_size - 1), max_size=30))
    before = byte_level.encode("x")
    assert streamed(byte_level, before, tokens) == continuation(byte_level, before, tokens)


@settings(max_examples=50)
@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=30))
def test_leading_spaces_and_byte_fallback(sentencepiece: Tokenizer, text: str) -> None:
    before = sentencepiece.encode("Once")
    tokens = sentencepiece.encode(text, add_special_tokens=False)
    assert streamed(sentencepiece, before, tokens) == continuation(sentencepiece, before, tokens)


def test_nothing_incomplete_is_ever_shown(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("é🙂漢", add_special_tokens=False)
    deltas = IncrementalDetokenizer(byte_level, byte_level.encode("x")).push(tokens)
    assert "".join(deltas) == "é🙂漢" and all("\ufffd" not in delta for delta in deltas)


def test_special_tokens_are_silent(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("ab", add_special_tokens=False)
    special = byte_level.bos_token_id
    assert special is not None
    assert streamed(byte_level, tokens, [tokens[0], special, tokens[-1]]) == byte_level.decode([tokens[0], tokens[-1]])


def found_at_once(text: str, stop: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is completed first; of those, the earliest."""
    for end in range(len(text) + 1):
        positions = [text[:end].find(item) for item in stop if item in text[:end]]
        if positions:
            return text[: min(positions)], True
    return text, False


@settings(max_examples=300)
@given(
    text=st.text("abc", max_size=25),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 3), min_size=25, max_size=25),
)
def test_stop_strings_are_found_across_pieces(text: str, stop: list[str], sizes: list[int]) -> None:
    """Piece by piece as a search in the text that has arrived; one character at a time as a search at every end."""
    checker, written, position = StopChecker(stop), "", 0
    for size in sizes:
        piece, position = text[position : position + size], position + size
        delta, stopped = checker.push(piece)
        written += delta
        assert text.startswith(written)
        if stopped:
            seen = text[:position]
            assert written == seen[: min(seen.find(item) for item in stop if item in seen)]
            return
    assert not any(item in text for item in stop)
    assert written + checker.finish() == text


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


@pytest.mark.parametrize("others", [[], ["bab"], ["aab", "b"]])
def test_stop_strings_character_by_character(others: list[str]) -> None:
    """Every text of six letters with every stop string of up to four."""
    for text, stop in product([word for word in words(6) if len(word) == 6], words(4)):
        checker, written, stopped = StopChecker([stop, *others]), "", False
        for character in text:
            delta, stopped = checker.push(character)
            written += delta
            if stopped:
                break
        found = (written if stopped else written + checker.finish(), stopped)
        assert found == found_at_once(text, [stop, *others]), (text, stop)


@pytest.mark.parametrize("prompt", ["hi 🙂🙂", "hi 漢字é漢", "hi \ufffd"])
@pytest.mark.parametrize("text", ["a cat", "🙂🙂 b"])
def test_the_prompts_last_characters_never_reach_the_output(stories: Path, prompt: str, text: str) -> None:
    tokenizer = Tokenizer.load(stories / "target")
    before, tokens = tokenizer.encode(prompt), tokenizer.encode(text, add_special_tokens=False)[1:]
    detokenizer = IncrementalDetokenizer(tokenizer, before)
    streamed = "".join(detokenizer.push(tokens)) + detokenizer.finish()
    assert streamed == tokenizer.decode(before + tokens)[len(tokenizer.decode(before)) :]


def test_a_prompt_ending_in_special_tokens_keeps_the_leading_space(stories: Path) -> None:
    tokenizer = Tokenizer.load(stories / "target")
    before = [*tokenizer.encode("Once"), *[2] * 6]
    assert IncrementalDetokenizer(tokenizer, before).push(tokenizer.encode("upon")[1:2])[0].startswith(" ")


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
    assert written == "".join(continuation(byte_level, before, part) + name for part in parts)


def test_a_shown_special_token_keeps_the_leading_space_behind_it(sentencepiece: Tokenizer) -> None:
    before, tokens = sentencepiece.encode("Once"), sentencepiece.encode("upon a")[1:]
    shown = IncrementalDetokenizer(sentencepiece, before, skip_special_tokens=False)
    assert "".join(shown.push([*tokens[:1], 2, *tokens[1:]])) == " upon\n</s>\n a".replace("\n", "")


@pytest.mark.parametrize("keeps", [False, True])
def test_a_kept_stop_string_is_the_end_of_the_text(keeps: bool) -> None:
    """However the text is cut into pieces."""
    for text, stop in product([word for word in words(6) if len(word) == 6], words(3)):
        for size in (1, 2, 6):
            checker, written = StopChecker([stop], keeps), ""
            for start in range(0, 6, size):
                delta, stopped = checker.push(text[start : start + size])
                written += delta
                if stopped:
                    break
            else:
                written += checker.finish()
            found = text.find(stop)
            assert written == (text if found < 0 else text[: found + keeps * len(stop)])
