"""LLM: text in, text out, whole or as a stream, over one engine bundle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeGuard, cast, overload

from ..models.bindings import DRAFT, TARGET
from ..models.errors import ConfigError, RequestError
from .bundle import EngineBundle
from .cost import CostModel, assumed, differences, fingerprint, read_costs
from .decoder import SpeculativeDecoder, TokenChunk, TokenLogprob
from .detokenizer import IncrementalDetokenizer, StopChecker
from .fit import fitted
from .metrics import SpecDecodeStats
from .random import seeded_streams
from .rounds import Observer
from .sampling import Sampler, SamplingParams
from .speculation.config import SpeculativeConfig
from .tokenizer import Tokenizer

Prompt = str | Sequence[int]  # text, or token ids that are taken as they are
Speculation = SpeculativeConfig | None | Literal["own"]  # of one request: None decodes plainly, "own" is the LLM's


class TextPiece(NamedTuple):
    """Text of one token, or the part of it that is certain by now, and whether the draft proposed it."""

    text: str
    drafted: bool


class StreamChunk(NamedTuple):
    """What one round added. `text` may be empty while a character or a possible stop string is incomplete.

    finish_reason: None while more follows, else "stop" or "length". stats: the request's own, still counting.
    """

    text: str
    token_ids: list[int]
    pieces: list[TextPiece]
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    stats: SpecDecodeStats


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One finished text. token_ids: the output's, ending with the token that ended it; a stop string is not part of
    `text`. finish_reason: "stop" (end of text, stop token, stop string) or "length" (max_tokens, context limit)."""

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: SpecDecodeStats
    logprobs: list[TokenLogprob]
    prompt_token_ids: list[int]

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-ready."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {
            "stats": self.stats.to_dict(),
            "logprobs": [logprob._asdict() for logprob in self.logprobs],
        }


class LLM:
    """A bundle, opened. Usable from several threads; each request decodes over caches of its own."""

    def __init__(
        self,
        bundle: str | Path,
        speculative: SpeculativeConfig | None = SpeculativeConfig(),  # noqa: B008 - frozen
        threads: int = 0,
        draft_threads: int = 1,
        provider: str = "cpu",
    ) -> None:
        """Check and open a bundle.

        speculative: how to speculate; None decodes plainly and leaves the draft closed. threads: of the target's
        engine, 0 lets the backend choose. draft_threads: one is fastest for a small draft, which has less to compute
        than threads cost to wake. provider: "cpu" or "cuda". Raises BundleError, EngineError or ConfigError.

        `stale_costs` then says how this machine differs from the one whose costs the bundle holds; draftwood profile
        measures anew.
        """
        self.bundle = EngineBundle.open(Path(bundle))
        self.tokenizer = Tokenizer.load(self.bundle.folder)
        self.speculative = speculative
        self._target = self.bundle.open_engine(TARGET, threads, provider)
        self._draft = None
        self._costs: CostModel | None = None
        self.stale_costs: list[str] = []
        if speculative is not None:
            self.speculative = fitted(speculative, self.bundle)
            self._draft = self.bundle.open_engine(DRAFT, draft_threads, provider)
            measured = read_costs(self.bundle.folder)
            self._costs = measured or assumed(self._target.spec.model, self._draft.spec.model)
            if measured is not None:
                here = fingerprint(self._target.spec.backend, threads, draft_threads)
                self.stale_costs = differences(measured.machine, here)
        self._idle: deque[SpeculativeDecoder] = deque()

    @overload
    def generate(
        self, prompts: list[Prompt], params: SamplingParams = ..., observe: Observer | None = ...
    ) -> list[GenerationResult]: ...
    @overload
    def generate(
        self, prompts: Prompt, params: SamplingParams = ..., observe: Observer | None = ...
    ) -> GenerationResult: ...
    def generate(
        self,
        prompts: Prompt | list[Prompt],
        params: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        observe: Observer | None = None,
    ) -> GenerationResult | list[GenerationResult]:
        """Complete a prompt, or each prompt of a list, in order. Every prompt is checked before the first one runs.

        observe: is shown every round of every prompt, see `rounds.Round`; it changes no token. Raises RequestError when
        a prompt is empty, too long, or holds a token the model does not have.
        """
        if is_batch(prompts):
            requests = [self.encode(prompt) for prompt in prompts]
            return [self._complete(request, params, observe) for request in requests]
        return self._complete(self.encode(cast(Prompt, prompts)), params, observe)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        observe: Observer | None = None,
        speculative: Speculation = "own",
    ) -> Iterator[StreamChunk]:
        """Complete a prompt; one chunk per round. Everything is checked before the first chunk is asked for, and no
        cache is held until then. speculative: how this one request speculates. Raises RequestError or ConfigError."""
        return self._stream(self.encode(prompt), params, self.resolved(speculative), observe)

    def resolved(self, speculative: Speculation) -> SpeculativeConfig | None:
        """How a request really speculates: "own" by name, limits fitted to the engines. Raises ConfigError."""
        if speculative == "own":
            return self.speculative
        if speculative is None or speculative == self.speculative:
            return speculative
        if self._draft is None:
            raise ConfigError("this LLM was opened without its draft: open it with a SpeculativeConfig")
        return fitted(speculative, self.bundle)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams = SamplingParams(),  # noqa: B008
    ) -> GenerationResult:
        """Answer a conversation of {"role", "content"} messages. Raises RequestError without a chat template."""
        return self._complete(self.encode_chat(messages), params)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation as a prompt, written with the model's own chat template."""
        text = self.tokenizer.apply_chat_template(messages)
        return self._checked(self.tokenizer.encode(text, add_special_tokens=False))

    def plain_decoder(self) -> SpeculativeDecoder:
        """Plain decoding over the target that is already open: what every other way must agree with."""
        manifest = self.bundle.manifest
        return SpeculativeDecoder(self._target, None, None, manifest.max_length, manifest.eos_token_ids)

    @property
    def kv_cache_bytes(self) -> int:
        """What the caches of one request may grow to, at four bytes per number: an upper bound."""
        engines = [self._target] if self._draft is None else [self._target, self._draft]
        models = [(engine.spec.capacity, engine.spec.model) for engine in engines]
        return sum(4 * capacity * 2 * m.num_layers * m.num_kv_heads * m.head_dim for capacity, m in models)

    def close(self) -> None:
        """Release both engines."""
        self._idle.clear()
        self._target.close()
        if self._draft is not None:
            self._draft.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt as the tokens that are decoded behind. Raises RequestError like `generate`."""
        if isinstance(prompt, str):
            return self._checked(self.tokenizer.encode(prompt))
        return self._checked(list(prompt))

    def _checked(self, tokens: list[int]) -> list[int]:
        vocab_size = self._target.spec.model.vocab_size
        limit = self.bundle.manifest.max_length
        if not tokens:
            raise RequestError("the prompt is empty and this tokenizer adds no begin-of-text token: give it some text")
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise RequestError(f"prompt token {token!r} is not a token id between 0 and {vocab_size - 1}")
        if len(tokens) >= limit:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens and this bundle holds {limit} for prompt and output together: "
                "shorten it, or rebuild with a larger --max-length"
            )
        return tokens

    def _complete(self, prompt: list[int], params: SamplingParams, observe: Observer | None = None) -> GenerationResult:
        chunks = list(self._stream(prompt, params, self.speculative, observe))
        return GenerationResult(
            text="".join(chunk.text for chunk in chunks),
            token_ids=[token for chunk in chunks for token in chunk.token_ids],
            finish_reason=chunks[-1].finish_reason or "length",
            stats=chunks[-1].stats,
            logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
            prompt_token_ids=prompt,
        )

    def _stream(
        self, prompt: list[int], params: SamplingParams, config: SpeculativeConfig | None, observe: Observer | None
    ) -> Iterator[StreamChunk]:
        eos = self.bundle.manifest.eos_token_ids
        sampler = Sampler(params, prompt, eos, self._target.spec.model.vocab_size)
        return self._rounds(prompt, sampler, config, observe)

    def _rounds(
        self, prompt: list[int], sampler: Sampler, config: SpeculativeConfig | None, observe: Observer | None
    ) -> Iterator[StreamChunk]:
        stats = SpecDecodeStats()
        writer = TextWriter(self.tokenizer, prompt, sampler.params)
        decoder = self._idle.pop() if self._idle else None
        if decoder is None or config != self.speculative:  # then the new caches replace the idle ones
            decoder = self._new_decoder(config)
        try:
            for chunk in decoder.generate(prompt, sampler, seeded_streams(sampler.params.seed), stats, observe):
                written = writer.write(chunk, stats)
                yield written
                if written.finish_reason is not None:
                    return
        finally:
            if config == self.speculative:
                self._idle.append(decoder)

    def _new_decoder(self, config: SpeculativeConfig | None) -> SpeculativeDecoder:
        manifest = self.bundle.manifest
        draft = None if config is None else self._draft
        return SpeculativeDecoder(self._target, draft, config, manifest.max_length, manifest.eos_token_ids, self._costs)


class TextWriter:
    """Chunks of tokens -> chunks of text: whole characters only, and nothing of a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        self._stop = StopChecker(params.stop)
        self._min_tokens = params.min_tokens
        self._count = 0
        self._held: deque[TextPiece] = deque()  # decoded, but perhaps the beginning of a stop string

    def write(self, chunk: TokenChunk, stats: SpecDecodeStats) -> StreamChunk:
        """The text of one chunk. A stop string ends it at the token that completed it."""
        released, reason = "", chunk.finish_reason
        kept = len(chunk.token_ids)
        for index, delta in enumerate(self._detokenizer.push(chunk.token_ids)):
            self._count += 1
            self._held.append(TextPiece(delta, index < chunk.num_drafted))
            if self._count <= self._min_tokens:
                released += delta
                continue
            text, stopped = self._stop.push(delta)
            released += text
            if stopped:
                kept, reason = index + 1, "stop"
                break
        else:
            if reason is not None:
                rest = self._detokenizer.finish()
                self._held.append(TextPiece(rest, False))
                text, stopped = self._stop.push(rest)
                released += text if stopped else text + self._stop.finish()
                reason = "stop" if stopped else reason
        stats.num_tokens -= len(chunk.token_ids) - kept
        pieces = list(self._take(len(released)))
        return StreamChunk(released, chunk.token_ids[:kept], pieces, chunk.logprobs[:kept], reason, stats)

    def _take(self, length: int) -> Iterator[TextPiece]:
        """The pieces that make up the next `length` characters."""
        while length > 0:
            piece = self._held.popleft()
            if len(piece.text) > length:
                self._held.appendleft(TextPiece(piece.text[length:], piece.drafted))
                piece = TextPiece(piece.text[:length], piece.drafted)
            length -= len(piece.text)
            if piece.text:
                yield piece


def is_batch(prompts: Prompt | list[Prompt]) -> TypeGuard[list[Prompt]]:
    """A list of prompts, unlike a list of token ids. An empty list has no prompts."""
    return isinstance(prompts, list) and not any(isinstance(item, int) for item in prompts)
