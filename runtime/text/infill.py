"""Infilling: a prompt that asks for the text between a prefix and a suffix, by the tokens that a model has learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...models.errors import RequestError
from .tokenizer import INFILL, Tokenizer

PROJECT, CURRENT = "myproject\n", "filename\n"  # llama.cpp's names, where a client sends none
ALONE = "☺"  # before a suffix where a tokenizer puts a blank before each text, as CodeLlama's own code does


class File(NamedTuple):
    """Another file, or a part of it."""

    name: str
    text: str


class Infill(NamedTuple):
    """What stands around the text that is asked for. files: of the same project; equal ones are a shared beginning."""

    prefix: str
    suffix: str
    files: Sequence[File] = ()

    @property
    def size(self) -> int:
        """Its characters."""
        return sum(map(len, (self.prefix, self.suffix, *(part for file in self.files for part in file))))


class Form(NamedTuple):
    """Ids of the tokens, None for those that the model lacks."""

    prefix: int | None
    suffix: int | None
    middle: int | None
    project: int | None
    file: int | None
    end: int | None


FORMS: tuple[tuple[str | None, ...], ...] = (  # in the order of INFILL
    # Qwen2.5-Coder and CodeGemma; StarCoder 2 and Granite; CodeLlama; DeepSeek-Coder
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>", "<fim_pad>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>", None, None, "▁<EOT>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", None, None, None),
)


class Infilling:
    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises RequestError for a model that does not."""
        named = [tokenizer.infill_tokens.get(name) for name in INFILL]
        known = ([tokenizer.added_id(text) for text in form] for form in (named, *FORMS))
        found = next((Form(*ids) for ids in known if None not in ids[:3]), None)
        if found is None:
            raise RequestError(
                "this model does not infill: its tokenizer has no tokens for a prefix, a suffix and the middle. Leave "
                "suffix out, or use a model for code, such as Qwen2.5-Coder"
            )
        self._tokenizer, self._form = tokenizer, found

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end the middle, beside those that end every text."""
        return tuple(token for token in self._form[3:] if token is not None)

    def encode(self, infill: Infill, encode: Callable[[str], list[int]]) -> list[int]:
        """The prompt. encode: a text without special tokens."""
        form, tokens = self._form, self._tokenizer.encode("")
        if infill.files:
            tokens += self._marked(form.project, PROJECT, encode)
            for file in infill.files:
                tokens += self._marked(form.file, f"{file.name}\n", encode) + encode(file.text)
            tokens += self._marked(form.file, CURRENT, encode)
        suffix = encode(infill.suffix)
        if self._tokenizer.byte_values and infill.suffix:
            suffix = encode(ALONE + infill.suffix)[len(encode(ALONE)) :]
        parts = ((form.prefix, encode(infill.prefix)), (form.suffix, suffix), (form.middle, list[int]()))
        return tokens + [token for mark, text in parts for token in (mark, *text) if token is not None]

    @staticmethod
    def _marked(mark: int | None, name: str, encode: Callable[[str], list[int]]) -> list[int]:
        return [mark, *encode(name)] if mark is not None else []
