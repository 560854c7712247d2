"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import Field

from ....models.errors import RequestError
from ...prompt import Prompt, is_batch
from ...sampling.params import LARGEST_COUNT, MAX_LOGPROBS
from .protocol import MAX_CHOICES, NEUTRAL, GenerationBody, TokenIds

MAX_PROMPTS = 4096  # as many as a conversation may have messages
COMPLETION_TOKENS = 16  # the default max_tokens of OpenAI's /v1/completions


class CompletionBody(GenerationBody):
    """POST /v1/completions. prompt: one or several texts or lists of token ids."""

    neutral = {**NEUTRAL, "add_special_tokens": (True,)}  # noqa: RUF012 - as the base class declares it

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: int | None = Field(
        None, ge=0, le=LARGEST_COUNT, description="default 16, as OpenAI's; 0 reads the prompt alone"
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = Field(False, description="the text begins with the prompt, whose tokens then have logprobs, too")
    best_of: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="generate this many choices and return the n most probable ones"
    )

    @property
    def differs(self) -> bool:
        return self.echo

    @property
    def num_logprobs(self) -> int | None:
        return 0 if self.logprobs is None and self.num_choices > self.n else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        if self.prompt_logprobs is not None:
            return self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            return self.logprobs
        return 0 if self.max_tokens == 0 else None

    @property
    def num_choices(self) -> int:
        return max(self.best_of or 1, self.n)

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of must be at least n, which is {self.n}, not {self.best_of}")
        if self.echo and None not in (self.logprobs, self.prompt_logprobs) and self.logprobs != self.prompt_logprobs:
            raise RequestError(
                "echo shows the prompt with logprobs alternatives: send prompt_logprobs with this number"
            )
        if self.stream and self.num_choices > self.n:
            raise RequestError("best_of cannot be streamed, because the best choices are known at the end")

    @property
    def prompts(self) -> list[Prompt]:
        """The list of prompts."""
        prompt = cast(Prompt | list[Prompt], self.prompt)
        return cast(list[Prompt], prompt) if prompt and is_batch(prompt) else [cast(Prompt, prompt)]
