"""Prompts: the forms in which they are given, and the token ids that a bundle accepts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from threading import Event
from typing import Any, TypedDict, TypeGuard

from ..models.bindings import TARGET
from ..models.errors import RequestError, shown
from .bundle.bundle import EngineBundle
from .engines.shared.memory import check_text_memory
from .sampling.params import token_id
from .text.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A text, in the form of vLLM's inputs."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids, in the form of vLLM's inputs."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int]  # text, or token ids without further encoding
PromptType = Prompt | TextPrompt | TokensPrompt


class PromptTooLongError(RequestError):
    """A prompt that leaves no room for an output."""


def plain_prompt(prompt: PromptType) -> Prompt:
    """The text of a prompt, or a list of its token ids, which are not checked yet. Raises RequestError for a mapping
    without exactly one of them, and for what is neither; the numbers of bytes are no token ids."""
    if not isinstance(prompt, Mapping):
        found = prompt if isinstance(prompt, str) else listed(prompt)
        if found is None:
            raise RequestError(f"a prompt is a text or a list of token ids, not {shown(prompt)}")
        return found
    (name, value), *others = prompt.items() or [("", None)]
    found = None
    if not others and name == ("prompt" if isinstance(value, str) else "prompt_token_ids"):
        found = value if isinstance(value, str) else listed(value)
    if found is None:
        raise RequestError(
            f'a prompt is {{"prompt": text}} or {{"prompt_token_ids": token ids}}, not {shown(dict(prompt))}'
        )
    return found


def listed(token_ids: object) -> list[Any] | None:
    """The items of a list, an array or a generator; None for anything else."""
    if isinstance(token_ids, (bytes, bytearray, memoryview, Mapping)) or not isinstance(token_ids, Iterable):
        return None
    try:
        return token_ids if isinstance(token_ids, list) else list(token_ids)
    except TypeError:  # an array without axes
        return None


def is_batch(prompts: object) -> TypeGuard[Sequence[PromptType]]:
    """Whether the argument is a list of prompts: its items have a length, unlike token ids. An empty list is one."""
    return isinstance(prompts, (list, tuple)) and all(isinstance(item, Sized) for item in prompts)


def encode_text(
    tokenizer: Tokenizer, text: str, limit: int, add_special_tokens: bool, given_up: Event | None
) -> list[int]:
    """The tokens of a text. One whose length alone shows that it has `limit` tokens or more is refused unread."""
    if len(text) >= limit and (least := tokenizer.fewest_tokens(text)) >= limit:
        raise too_long_error(f"at least {least}", limit)
    check_text_memory(text)
    return tokenizer.encode(text, add_special_tokens, given_up)


def check_prompt(tokens: Sequence[int], bundle: EngineBundle) -> list[int]:
    """The tokens as a list of ints. Raises RequestError for an empty or long prompt, or others' token ids."""
    vocab_size, limit = bundle.manifest.engines[TARGET].model.vocab_size, bundle.manifest.max_length
    if not tokens:
        raise RequestError("the prompt is empty and this tokenizer adds no begin-of-text token: give it some text")
    if len(tokens) >= limit:
        raise too_long_error(str(len(tokens)), limit)
    checked = list(map(token_id, tokens))
    for token, given in zip(checked, tokens, strict=True):
        if not 0 <= token < vocab_size:
            raise RequestError(f"prompt token {shown(given)} is not a token id between 0 and {vocab_size - 1}")
    return checked


def too_long_error(tokens: str, limit: int) -> PromptTooLongError:
    """The error for a prompt that leaves no room for output. tokens: its number of tokens, in words."""
    return PromptTooLongError(
        f"the prompt has {tokens} tokens and this bundle holds {limit} for prompt and output together: "
        "shorten it, or rebuild with a larger --max-length"
    )
