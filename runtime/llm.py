"""LLM: text in, text out, whole or as a stream, over one engine bundle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import closing
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Literal, NamedTuple, TypeGuard, cast, overload

from ..models.bindings import TARGET
from ..models.errors import ConfigError
from .bundle.bundle import EngineBundle
from .bundle.costs import stored_costs
from .bundle.fit import fitted
from .decoding.decoder import SpeculativeDecoder, Steps, alone, drive
from .decoding.loop import MAX_RUNNING, drive_together
from .decoding.round import Observer
from .decoding.stats import SpecDecodeStats
from .engines.backends import describe_backend
from .engines.base import Engine, ForwardOutput, Pass
from .engines.shared.memory import refuse_without_memory
from .engines.shared.pool import PooledEngine
from .engines.static.engine import StaticEngine
from .prompt import checked_prompt, too_long
from .sampling.random import seeded_streams
from .sampling.sampler import Sampler, SamplingParams
from .speculation.config import SpeculativeConfig
from .speculation.planning.controller import Experience
from .speculation.planning.cost import CostModel, assumed
from .text.conversation import Conversation, is_conversations, to_template
from .text.result import GenerationResult, result_of
from .text.tokenizer import Tokenizer
from .text.writer import StreamChunk, TextWriter

Prompt = str | Sequence[int]  # text, or token ids that are taken as they are
Speculation = SpeculativeConfig | None | Literal["own"]  # of one request: None decodes plainly, "own" is the LLM's


class Engines(NamedTuple):
    """What a request runs on; without a draft it decodes plainly. sharing: says how many requests' passes run together
    just now."""

    target: Engine
    draft: Engine | None
    sharing: Callable[[], int] = alone


class LLM:
    """A bundle, opened. Usable from several threads; each request decodes over caches of its own."""

    def __init__(
        self,
        bundle: str | Path,
        speculative: SpeculativeConfig | None = SpeculativeConfig(),  # noqa: B008 - frozen
        threads: int = 0,
        draft_threads: int = 0,
        provider: str = "cpu",
        private_weights: bool = False,
    ) -> None:
        """Check and open a bundle. private_weights: copy them, where otherwise files are mapped (bundle_watch.py).

        speculative: how to speculate; None decodes plainly and leaves the draft closed. threads: of the target's
        engine, 0 lets the backend choose. draft_threads: 0 takes what is fastest for a small draft, see
        EngineBundle.open_draft. provider: "cpu" or "cuda". Raises BundleError, EngineError or ConfigError.

        `stale_costs` then says how this machine and bundle differ from those whose costs lie beside it; draftwood
        profile measures anew.
        """
        self.bundle = EngineBundle.open(Path(bundle), private_weights)
        self.tokenizer = Tokenizer.load(self.bundle.folder)
        self.speculative = speculative
        self._target = self.bundle.open_engine(TARGET, threads, provider)
        self._draft = None
        self._costs: CostModel | None = None
        self.stale_costs: list[str] = []
        if speculative is not None:
            self.speculative = fitted(speculative, self.bundle)
            self._draft = self.bundle.open_draft(threads, draft_threads, provider)
            measured, self.stale_costs = stored_costs(self.bundle, provider, threads, draft_threads)
            self._costs = measured or assumed(self._target.spec.model, self._draft.spec.model)
        self._experience = Experience()
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
        """Complete a prompt, or each prompt of a list; several share passes. All are checked before any of them runs.

        observe: is shown every round of every prompt, then one after the other, see `round.Round`; it changes no
        token. Raises RequestError when a prompt is empty, too long, or holds a token the model does not have.
        """
        if is_batch(prompts):
            return self._complete_all([self.encode(prompt) for prompt in prompts], params, observe)
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
        return drive(self.steps(prompt, params, observe, speculative))

    def steps(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        observe: Observer | None = None,
        speculative: Speculation = "own",
        engines: Engines | None = None,
    ) -> Steps[StreamChunk]:
        """`stream` for whoever runs the passes: also yields each pass it needs, to be answered with its output.

        engines: what to run on instead of this LLM's own, such as its `pools`.
        """
        config = self.resolved(speculative)
        tokens = self.encode(prompt)
        sampler = Sampler(params, tokens, self.bundle.manifest.eos_token_ids, self._target.spec.model.vocab_size)
        return self._rounds(tokens, sampler, config, observe, engines)

    def resolved(self, speculative: Speculation) -> SpeculativeConfig | None:
        """How a request really speculates: "own" by name, limits fitted to the engines. Raises ConfigError."""
        if speculative == "own":
            return self.speculative
        if speculative is None or speculative == self.speculative:
            return speculative
        if self._draft is None:
            raise ConfigError("this LLM was opened without its draft: open it with a SpeculativeConfig")
        return fitted(speculative, self.bundle)

    @overload
    def chat(self, messages: list[Conversation], params: SamplingParams = ...) -> list[GenerationResult]: ...
    @overload
    def chat(self, messages: Conversation, params: SamplingParams = ...) -> GenerationResult: ...
    def chat(
        self,
        messages: Conversation | list[Conversation],
        params: SamplingParams = SamplingParams(),  # noqa: B008
    ) -> GenerationResult | list[GenerationResult]:
        """Answer a conversation of {"role", "content"} messages, or each conversation of a list, like `generate`.

        Raises RequestError without a chat template, and for what is no conversation, see `conversation.to_template`.
        """
        if is_conversations(messages):
            return self._complete_all([self.encode_chat(each) for each in messages], params, None)
        return self._complete(self.encode_chat(cast(Conversation, messages)), params)

    def encode_chat(self, messages: Conversation) -> list[int]:
        """A conversation as a prompt, written with the model's own chat template."""
        return self.encode_written(self.write_chat(messages))

    def write_chat(self, messages: Conversation, given_up: Event | None = None) -> str:
        """A conversation as the template writes it. given_up: see ChatTemplate.render."""
        return self.tokenizer.apply_chat_template(to_template(messages), given_up=given_up)

    def encode_written(self, conversation: str) -> list[int]:
        """Its tokens; the template has put the special ones in."""
        return self._encode(conversation, add_special_tokens=False)

    def plain_decoder(self) -> SpeculativeDecoder:
        """Plain decoding over the target that is already open: what every other way must agree with."""
        manifest = self.bundle.manifest
        return SpeculativeDecoder(self._target, None, None, manifest.max_length, manifest.eos_token_ids)

    @property
    def is_pooled(self) -> bool:
        """Whether its engines' caches grow, so that `pools` share them."""
        return describe_backend(self._target.spec.backend).grows

    def pools(self, requests: int, slots: int | None = None) -> Engines | None:
        """Engines whose passes serve up to so many requests at a time, see `engines.pool` and `engines.static_pool`;
        None where plans were built for one. slots: of each cache that grows, at most."""
        if not self.is_pooled:
            if self.max_batch is None:
                return None
            target, draft = cast(StaticEngine, self._target), cast(StaticEngine | None, self._draft)
            return Engines(target.pool, None if draft is None else draft.pool)

        def pooled(engine: Engine) -> Engine:
            full = requests * engine.spec.capacity
            return PooledEngine(engine, full if slots is None else min(full, slots))

        return Engines(pooled(self._target), None if self._draft is None else pooled(self._draft))

    @property
    def max_batch(self) -> int | None:
        """Requests that its engines have caches for at a time; None where they make caches as they are needed."""
        spec = self._target.spec
        return None if self.is_pooled or spec.max_batch == 1 else spec.max_batch

    @property
    def engines(self) -> Engines:
        """Its own, for one request at a time."""
        return Engines(self._target, self._draft)

    @property
    def kv_cache_bytes(self) -> int:
        """What the caches of one request may grow to, at four bytes per number: an upper bound."""
        engines = [self._target] if self._draft is None else [self._target, self._draft]
        models = [(engine.spec.capacity, engine.spec.model) for engine in engines]
        return sum(4 * capacity * 2 * m.num_layers * m.num_kv_heads * m.head_dim for capacity, m in models)

    def close(self) -> None:
        """Release both engines, and end the processes that write conversations."""
        self.tokenizer.close()
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
        return self._encode(prompt) if isinstance(prompt, str) else checked_prompt(list(prompt), self.bundle)

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text, which is not read at all where its length alone says that it cannot fit."""
        limit = self.bundle.manifest.max_length
        if len(text) >= limit and (least := self.tokenizer.fewest_tokens(text)) >= limit:
            raise too_long(f"at least {least}", limit)
        refuse_without_memory(text)
        return checked_prompt(self.tokenizer.encode(text, add_special_tokens), self.bundle)

    def _complete(self, prompt: list[int], params: SamplingParams, observe: Observer | None = None) -> GenerationResult:
        return result_of(prompt, list(self.stream(prompt, params, observe)))

    def _complete_all(
        self, prompts: Sequence[list[int]], params: SamplingParams, observe: Observer | None
    ) -> list[GenerationResult]:
        """The same for each of several prompts."""
        pools = self.pools(MAX_RUNNING) if len(prompts) > 1 and observe is None else None
        if pools is not None:
            return self._complete_together(prompts, params, pools)
        return [self._complete(prompt, params, observe) for prompt in prompts]

    def _complete_together(
        self, prompts: Sequence[list[int]], params: SamplingParams, pools: Engines
    ) -> list[GenerationResult]:
        """The same for several prompts, which share passes."""
        at_most = min(self.max_batch or MAX_RUNNING, len(prompts))
        if params.greedy or params.seed is None:  # then plans may know of each other: the text cannot depend on it
            pools = pools._replace(sharing=lambda: at_most)
        texts: list[list[StreamChunk]] = [[] for _ in prompts]
        steps = [self.steps(prompt, params, engines=pools) for prompt in prompts]
        order = [engine for engine in (pools.draft, pools.target) if engine is not None]
        for number, chunk in drive_together(steps, order, at_most):
            texts[number].append(chunk)
        return [result_of(prompt, chunks) for prompt, chunks in zip(prompts, texts, strict=True)]

    def _rounds(
        self,
        prompt: list[int],
        sampler: Sampler,
        config: SpeculativeConfig | None,
        observe: Observer | None,
        engines: Engines | None,
    ) -> Steps[StreamChunk]:
        stats = SpecDecodeStats()
        writer = TextWriter(self.tokenizer, prompt, sampler.params)
        # Other caches take the idle ones' place; and where there are only so many, nobody keeps one he does not use.
        reusable = engines is None and config == self.speculative and self.max_batch is None
        idle = self._idle_decoder() if engines is None else None
        decoder = idle if idle is not None and reusable else self._new_decoder(config, engines or self.engines)
        steps = decoder.steps(prompt, sampler, seeded_streams(sampler.params.seed), stats, observe)
        answer: ForwardOutput | None = None
        try:
            with closing(steps):
                while True:
                    step = steps.send(answer)
                    if isinstance(step, Pass):
                        answer = yield step
                        continue
                    answer = None
                    written = writer.write(step, stats)
                    yield written
                    if written.finish_reason is not None:
                        return
        finally:
            if reusable:
                self._idle.append(decoder)

    def _idle_decoder(self) -> SpeculativeDecoder | None:
        try:
            return self._idle.pop()
        except IndexError:  # asking first would leave time for another thread to take the last one
            return None

    def _new_decoder(self, config: SpeculativeConfig | None, engines: Engines) -> SpeculativeDecoder:
        manifest = self.bundle.manifest
        draft = None if config is None else engines.draft
        return SpeculativeDecoder(
            engines.target,
            draft,
            config,
            manifest.max_length,
            manifest.eos_token_ids,
            self._costs,
            engines.sharing,
            experience=self._experience,
        )


def is_batch(prompts: Prompt | list[Prompt]) -> TypeGuard[list[Prompt]]:
    """A list of prompts, which have a length, unlike a list of token ids. An empty list has no prompts."""
    return isinstance(prompts, list) and all(isinstance(item, Sized) for item in prompts)
