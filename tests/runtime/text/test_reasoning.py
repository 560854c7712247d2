"""Thoughts are found, and separated from the answer, however the text is cut into pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import with_chat_template, with_thoughts

from draftwood.runtime.sampling.thought import Thought
from draftwood.runtime.text.reasoning import Reasoning, ThoughtPart, ThoughtReader
from draftwood.runtime.text.tokenizer import Tokenizer

ANSWERS = [
    (False, "<think>\na < b\n</think>\n\nYes. </think>", "a < b", "Yes. </think>"),
    (False, "\n<think></think>Yes", "", "Yes"),
    (False, "<th ink", "", "<th ink"),
    (False, "  plain <think>x</think> ", "", "  plain <think>x</think> "),
    (False, "<think>\n cut \n</thi", "cut \n</thi", ""),
    (False, "<think", "", "<think"),
    (True, "\na\n\nb \n</think>\n ", "a\n\nb", ""),
    (True, "<think>a</think>b", "<think>a", "b"),
    (True, "", "", ""),
]


@pytest.mark.parametrize(("begun", "text", "thought", "answer"), ANSWERS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_thought_is_separated_from_the_answer(begun: bool, text: str, thought: str, answer: str, size: int) -> None:
    reader = ThoughtReader(begun)
    found = [part for start in range(0, len(text), size) for part in reader.push(text[start : start + size])]
    found += reader.finish()
    assert "".join(part.text for part in found if isinstance(part, ThoughtPart)) == thought
    assert "".join(part for part in found if isinstance(part, str)) == answer


def test_template_and_tokenizer_say_whether_a_model_thinks(tiny_bundle: Path, tmp_path: Path) -> None:
    marked = with_thoughts(tiny_bundle, tmp_path / "marked")
    plain = with_chat_template(tiny_bundle, tmp_path / "plain", "{{ '</think>' }}")
    with Tokenizer.load(plain) as tokenizer:
        assert Reasoning.of(tokenizer) is None, "it has no token for the mark"
    with Tokenizer.load(marked) as tokenizer:
        reasoning = Reasoning.of(tokenizer)
        assert reasoning is not None and not reasoning.is_special
        opens, closes = (tokenizer.vocabulary()[mark] for mark in ("<think>", "</think>"))
        for end, begun in (("<a>", False), ("<think>", True), ("<think>\n\n", True), ("<think>\n\n</think>\n\n", None)):
            prompt, expected = tokenizer.encode(f"x</think>y{end}"), Thought(opens, closes, bool(begun), 7)
            assert reasoning.thought(prompt, None, 7) == (None if begun is None else expected)
        for continued, goes_on in (("Yes", False), ("<think>", True), ("<think>a", True), ("<think>a</think>b", False)):
            thought = reasoning.thought(tokenizer.encode(continued), continued, None)
            assert thought == (Thought(opens, closes, True) if goes_on else None)
    (marked / "chat_template.jinja").write_text("{{ messages }}")
    with Tokenizer.load(marked) as tokenizer:
        assert Reasoning.of(tokenizer) is None, "its template knows no thoughts"
