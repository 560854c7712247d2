"""The parts of a conversation between which a target writes: what its chat template puts before a question, between
question and answer, and between an answer and the next question."""

from __future__ import annotations

from typing import NamedTuple

from ...models.errors import ConfigError, RequestError
from ...runtime.text.tokenizer import Tokenizer

FIRST, REPLY, SECOND = "QXJ1", "RYK2", "SZL3"  # texts that no template contains


class Layout(NamedTuple):
    """Token ids. A base model's text has no questions: `before` is its first token, and the others are empty."""

    before: list[int]  # before the first question
    after: list[int]  # between a question and its answer
    between: list[int] | None  # between an answer and the next question; None where a text has one question

    @property
    def is_chat(self) -> bool:
        return bool(self.after)


def layout_of(tokenizer: Tokenizer, asked: bool = False) -> Layout:
    """The layout of a model's texts. asked: the user gives the questions. Raises ConfigError for a model with neither a
    usable chat template nor, unless there are questions, a begin-of-text token."""
    if not tokenizer.has_chat_template:
        if tokenizer.bos_token_id is None:
            if asked:
                return Layout([], [], None)
            raise ConfigError(
                "this target has no chat template and no begin-of-text token, so it cannot begin a text: give it "
                "--prompts FILE"
            )
        return Layout([tokenizer.bos_token_id], [], None)
    question = {"role": "user", "content": FIRST}
    try:
        before, after = split(tokenizer.apply_chat_template([question]), FIRST)
    except RequestError as error:
        raise ConfigError(f"{error}; give the target a template that takes one question of the user") from error
    try:
        answered = [question, {"role": "assistant", "content": REPLY}, {"role": "user", "content": SECOND}]
        text = tokenizer.apply_chat_template(answered)
        between = encode(tokenizer, split(split(text, REPLY)[1], SECOND)[0])
    except (RequestError, ConfigError):  # the template refuses a second question
        between = None
    return Layout(encode(tokenizer, before), encode(tokenizer, after), between)


def split(text: str, mark: str) -> tuple[str, str]:
    """The text before and after the only `mark`."""
    before, found, after = text.partition(mark)
    if not found or mark in after:
        raise ConfigError("the target's chat template does not copy a question into its text: correct the template")
    return before, after


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """A part of a template, which contains the special tokens."""
    return tokenizer.encode(text, add_special_tokens=False)


def questions_of(tokenizer: Tokenizer, prompts: list[str]) -> list[list[int]]:
    """The user's prompts as token ids, to stand after `Layout.before`. Raises ConfigError where all are empty."""
    found = [ids for prompt in prompts if (ids := tokenizer.encode(prompt, add_special_tokens=False))]
    if prompts and not found:
        raise ConfigError("all --prompts are empty: give some text, or leave them out")
    return found
