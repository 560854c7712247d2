"""LLM: text in, text out, whole or as a stream, over one engine bundle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import closing
from functools import cache
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Literal, NamedTuple, TypeGuard, cast, overload

from ..models.bindings import TARGET
from ..models.errors import ConfigError
from .bundle.bundle import EngineBundle
from .bundle.costs import stored_costs
from .bundle.fit import fitted
from .decoding.chunk import TokenChunk
from .decoding.decoder import SpeculativeDecoder, count_one
from .decoding.loop import MAX_RUNNING, Job, Loop, drive
from .decoding.round import Observer
from .decoding.scheduler import Scheduler
from .decoding.stats import SpecDecodeStats
from .engines.backends import describe_backend
from .engines.base import Engine
from .engines.passes import Steps
from .engines.shared.memory import CacheBudget, cache_budget, check_text_memory
from .engines.shared.pool import PooledEngine
from .prompt import check_prompt, too_long_error
from .sampling.random import seeded_streams
from .sampling.sampler import Sampler, SamplingParams
from .speculation.config import SpeculativeConfig
from .speculation.planning.controller import Experience
from .speculation.planning.cost import CostModel, assumed
from .text.conversation import Conversation, is_conversations, to_template
from .text.result import GenerationResult, result_of
from .text.tokenizer import Tokenizer
from .text.writer import StreamChunk, TextWriter

PREFIX_CACHE_SLOTS = 1024  # unless told otherwise
Prompt = str | Sequence[int]  # text, or token ids that are taken as they are
Speculation = SpeculativeConfig | None | Literal["own"]  # of one request: None decodes plainly, "own" is the LLM's


class Engines(NamedTuple):
    """What a request runs on; without a draft it decodes plainly. sharing: says how many requests' passes run together
    just now."""

    target: Engine
    draft: Engine | None
    sharing: Callable[[], int] = count_one


class Shared(NamedTuple):
    """What many requests run on: engines, those whose caches are shared, and what requests may fill of these."""

    engines: Engines
    pools: tuple[PooledEngine, ...]
    budget: CacheBudget

    def close(self) -> None:
        """Free the shared caches; the engines stay open."""
        for pool in self.pools:
            pool.close()


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
        return drive(self.job(prompt, params, observe, speculative))

    def job(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        observe: Observer | None = None,
        speculative: Speculation = "own",
        engines: Engines | None = None,
    ) -> Job[StreamChunk]:
        """`stream` as a job for a loop. engines: what to run on instead of this LLM's own, such as those of `share`."""
        config = self.resolved(speculative)
        tokens = self.encode(prompt)
        sampler = Sampler(params, tokens, self.bundle.manifest.eos_token_ids, self._target.spec.model.vocab_size)
        stats = SpecDecodeStats()
        steps = self._rounds(tokens, sampler, stats, config, observe, engines)

        @cache
        def writer() -> TextWriter:  # made by the thread that decodes: it reads the prompt's end
            return TextWriter(self.tokenizer, tokens, params)

        return Job(steps=steps, write=lambda chunk: writer().write(chunk, stats), stats=stats)

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
        """Whether its engines' caches grow, so that several requests can share one."""
        return describe_backend(self._target.spec.backend).grows

    def share(self, requests: int, kv_cache_bytes: int | None = None, prefix_cache_slots: int = 0) -> Shared:
        """What up to so many requests at a time run on: engines whose passes serve several, where they can.

        kv_cache_bytes: see `cache_budget`. prefix_cache_slots: see PooledEngine.share_prefixes; 0: no request takes
        over the rows of another. Raises ConfigError when there is no memory for a single request.
        """
        own = [engine for engine in (self._target, self._draft) if engine is not None]
        if not self.is_pooled:
            return Shared(self.engines, (), CacheBudget(None, self._target.spec.capacity, self._target.spec.max_width))
        budget = cache_budget([engine.spec for engine in own], kv_cache_bytes)
        pools = []
        for engine in own:
            full = requests * engine.spec.capacity
            pool = PooledEngine(engine, full if budget.allocated is None else min(full, budget.allocated))
            if prefix_cache_slots:
                pool.share_prefixes(prefix_cache_slots)
            pools.append(pool)
        return Shared(Engines(pools[0], pools[1] if len(pools) > 1 else None), tuple(pools), budget)

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
        while (decoder := self._idle_decoder()) is not None:
            decoder.close()
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
        return self._encode(prompt) if isinstance(prompt, str) else check_prompt(list(prompt), self.bundle)

    def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text, which is not read at all where its length alone says that it cannot fit."""
        limit = self.bundle.manifest.max_length
        if len(text) >= limit and (least := self.tokenizer.fewest_tokens(text)) >= limit:
            raise too_long_error(f"at least {least}", limit)
        check_text_memory(text)
        return check_prompt(self.tokenizer.encode(text, add_special_tokens), self.bundle)

    def _complete(self, prompt: list[int], params: SamplingParams, observe: Observer | None = None) -> GenerationResult:
        return result_of(prompt, list(self.stream(prompt, params, observe)))

    def _complete_all(
        self, prompts: Sequence[list[int]], params: SamplingParams, observe: Observer | None
    ) -> list[GenerationResult]:
        """The same for each of several prompts."""
        shares = self.is_pooled or self.max_batch is not None
        if len(prompts) > 1 and observe is None and shares:
            return self._complete_together(prompts, params)
        return [self._complete(prompt, params, observe) for prompt in prompts]

    def _complete_together(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[GenerationResult]:
        """The same for several prompts, which share passes."""
        at_most = min(self.max_batch or MAX_RUNNING, len(prompts))
        shared = self.share(at_most, prefix_cache_slots=PREFIX_CACHE_SLOTS)
        with closing(shared):
            loop: Loop[Job[StreamChunk], StreamChunk]
            loop = Loop(Scheduler(at_most, len(prompts)), shared.pools, shared.budget)
            engines = shared.engines._replace(sharing=lambda: loop.num_sharing)
            texts: dict[Job[StreamChunk], list[StreamChunk]] = {}
            for prompt in prompts:
                job = self.job(prompt, params, engines=engines)
                job.num_slots = shared.budget.needed(len(prompt), params.max_tokens)
                texts[job] = []
            for job, chunk in loop.run(list(texts)):
                texts[job].append(chunk)
        return [result_of(prompt, chunks) for prompt, chunks in zip(prompts, texts.values(), strict=True)]

    def _rounds(
        self,
        prompt: list[int],
        sampler: Sampler,
        stats: SpecDecodeStats,
        config: SpeculativeConfig | None,
        observe: Observer | None,
        engines: Engines | None,
    ) -> Steps[TokenChunk]:
        # An idle decoder keeps its caches for the next text; not where there are only so many caches.
        reusable = engines is None and config == self.speculative and self.max_batch is None
        idle = self._idle_decoder() if reusable else None
        decoder = idle or self._new_decoder(config, engines or self.engines)
        try:
            yield from decoder.steps(prompt, sampler, seeded_streams(sampler.params.seed), stats, observe)
        finally:
            if reusable:
                self._idle.append(decoder)
            else:
                decoder.close()

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
