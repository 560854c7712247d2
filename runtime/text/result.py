"""GenerationResult: one finished text with its tokens and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..decoding.chunk import TokenLogprob
from ..decoding.stats import SpecDecodeStats
from .writer import StreamChunk


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One finished text. token_ids: the output tokens, including the token that ended the text; the text of that token
    and stop strings are not part of `text`. finish_reason: "stop" (end of text, stop token, stop string) or "length"
    (max_tokens, context limit); of a `ChatSession` also "interrupted". prompt_logprobs: of every token of the prompt,
    None for the first one; None if they were not asked for."""

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: SpecDecodeStats
    logprobs: list[TokenLogprob]
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-ready."""
        prompt = None if self.prompt_logprobs is None else [item and item._asdict() for item in self.prompt_logprobs]
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {
            "stats": self.stats.to_dict(),
            "logprobs": [logprob._asdict() for logprob in self.logprobs],
            "prompt_logprobs": prompt,
        }


def result_of(prompt: list[int], chunks: Sequence[StreamChunk]) -> GenerationResult:
    """Join all chunks of one text."""
    return GenerationResult(
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        finish_reason=chunks[-1].finish_reason or "length",
        stats=chunks[-1].stats,
        logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
        prompt_token_ids=prompt,
        prompt_logprobs=chunks[0].prompt_logprobs,
    )
