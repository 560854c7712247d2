"""LLM: generates text for prompts and conversations with the engines of one bundle, whole or as a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any, Literal, cast

from ..models.bindings import TARGET
from ..models.closing import Closing
from ..models.errors import ConfigError, RequestError
from .batch import complete, params_of
from .bundle.bundle import EngineBundle
from .bundle.cache import Model, bundle_of
from .bundle.costs import assumed_costs, stored_costs
from .bundle.defaults import default_params
from .bundle.fit import fitted
from .bundle.foreign import with_others
from .decoding.decoder import SpeculativeDecoder
from .decoding.prefill import PrefillLimit
from .decoding.request import Request
from .decoding.round import Observer
from .decoding.scheduler import MAX_TURNS, Scheduler
from .decoding.stats import SpecDecodeStats
from .engines.backends import describe_backend
from .engines.base import Engine
from .engines.shared.memory import CacheBudget, cache_budget, pools_over
from .engines.shared.pool import PooledEngine
from .engines.shared.sizes import cache_bytes
from .prompt import PromptType, check_prompt, encode_text, is_batch, plain_prompt
from .sampling.params import SamplingParams
from .sampling.random import seeded_streams
from .sampling.sampler import Sampler
from .sampling.thought import after_thought
from .speculation.config import SpeculativeConfig
from .speculation.planning.budget import DraftBudget
from .speculation.planning.drift import Drift
from .speculation.planning.history import History
from .structured.grammars import Grammars, Prepared
from .text.chat_prompt import write_conversation
from .text.conversation import ASKED, ChatSettings, Conversation, is_conversations
from .text.infill import Infill, Infilling
from .text.reasoning import Reasoning
from .text.result import RequestOutput
from .text.tokenizer import Tokenizer, token_sequences, token_texts
from .text.tools import Tool
from .text.writer import StreamChunk, TextWriter

Speculation = SpeculativeConfig | None | Literal["own"]  # of one request; None decodes plainly, "own" is the LLM's


class LLM(Closing):
    """An open model. Several threads may use it; each request has its own caches."""

    def __init__(
        self,
        model: str | Path,
        speculative: SpeculativeConfig | None = SpeculativeConfig(),  # noqa: B008 - frozen
        threads: int = 0,
        draft_threads: int = 0,
        provider: str = "cpu",
        private_weights: bool = False,
        draft: str | Path | None = None,
        precision: str | None = None,
        max_length: int | None = None,
        **others: Any,
    ) -> None:
        """Check and open a bundle, or a model whose bundle is built first, unless the cache has it. model, draft,
        precision, max_length: see `Model`. others: vLLM's keywords, see `foreign.py`.

        speculative: the default configuration; None decodes plainly and does not open the draft. threads: of the
        target's engine; 0 lets the backend choose. draft_threads: see EngineBundle.open_draft. provider: "cpu" or
        "cuda". private_weights: copy the weights, where otherwise files are mapped. `stale_costs` has the differences
        between this machine and that of the stored cost table; none without speculation. Raises any DraftwoodError but
        RequestError.
        """
        asked, speculative = with_others(Model.of(model, draft, precision, max_length), speculative, others)
        self.bundle = EngineBundle.open(bundle_of(asked), private_weights)
        self.tokenizer = Tokenizer.load(self.bundle.folder)
        self.reasoning = Reasoning.of(self.tokenizer)
        self._default_params = default_params(self.bundle)
        self.speculative, self._provider = speculative, provider
        self.target = self.bundle.open_engine(TARGET, threads, provider)
        self.draft: Engine | None = None
        if speculative is not None:
            self.speculative = fitted(speculative, self.bundle)
            if self.bundle.has_draft or draft_threads:  # which would be ignored
                self.draft = self.bundle.open_draft(threads, draft_threads, provider)
        measured, stale = stored_costs(self.bundle, provider, threads, draft_threads)
        self.stale_costs = [] if speculative is None else stale
        drafts = None if self.draft is None else self.draft.spec
        self.costs = measured or assumed_costs(self.target.spec, drafts, provider)
        self._history = History(Drift(self.costs))
        eos = self.bundle.manifest.eos_token_ids
        self.grammars = Grammars(self.tokenizer, self.target.spec.model.vocab_size, eos)
        self._idle: deque[Scheduler[StreamChunk]] = deque()  # of ended streams
        self.request_numbers = count()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        observe: Observer | None = None,
        speculative: Speculation = "own",
    ) -> list[RequestOutput]:
        """Complete a prompt, or each prompt of a list; one result per prompt. The texts share passes.

        sampling_params: for all prompts, or a list with one for each; None takes the model's. use_tqdm: show a progress
        bar. observe: called with every round (`round.Round`) until it returns True; the texts are written one by one.
        speculative: the configuration of these texts. Raises RequestError or ConfigError before the first text.
        """
        plain = [plain_prompt(prompt) for prompt in (prompts if is_batch(prompts) else [cast(PromptType, prompts)])]
        encoded = [self.encode(prompt) for prompt in plain]
        texts = [prompt if isinstance(prompt, str) else None for prompt in plain]
        return complete(self, texts, encoded, sampling_params, use_tqdm, observe, speculative)

    def stream(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        observe: Observer | None = None,
        speculative: Speculation = "own",
    ) -> Iterator[StreamChunk]:
        """`generate` for one text; yields one chunk per round. The first chunk opens the caches."""
        try:
            scheduler = self._idle.pop()
        except IndexError:  # not checked before: another thread could take the last one in between
            scheduler = self.scheduler(1, slots=CacheBudget(None, self.target.spec.capacity, 0))
        try:
            request = self.request(prompt, sampling_params, scheduler, observe, speculative)
        except BaseException:
            self._idle.append(scheduler)
            raise
        return self._run(scheduler, request)

    def request(
        self,
        prompt: PromptType,
        params: SamplingParams | None,
        scheduler: Scheduler[StreamChunk],
        observe: Observer | None = None,
        speculative: Speculation = "own",
        prepared: Prepared | None = None,
        salt: str | None = None,
    ) -> Request[StreamChunk]:
        """`stream` as a request for a scheduler of this LLM. prepared: `prepare(params)`, if that was called. salt: see
        Engine.new_cache. Raises RequestError, also where the scheduler's cache slots cannot hold the text."""
        (params,) = params_of(params, 1, self.get_default_sampling_params)
        if params.n != 1:
            raise RequestError(f"a stream has one text, and n is {params.n}: leave n out, or call LLM.generate")
        config, tokens = self.resolved(speculative), self.encode(prompt)
        sampler = self.sampler(params, tokens, prepared)
        manifest, stats = self.bundle.manifest, SpecDecodeStats()
        decoder = SpeculativeDecoder(
            scheduler.target or self.target,
            None if config is None else scheduler.draft,
            config,
            manifest.max_length,
            manifest.eos_token_ids,
            self.costs,
            lambda: scheduler.batch_size,
            self._history,
            scheduler.drafts,
        )
        steps = decoder.steps(tokens, sampler, seeded_streams(params.seed), stats, observe, salt)

        @cache
        def writer() -> TextWriter:  # constructed in the decoding thread, because it decodes the end of the prompt
            return TextWriter(self.tokenizer, tokens, params)

        return Request(
            steps=steps,
            write=lambda chunk: writer().write(chunk, stats),
            stats=stats,
            num_slots=scheduler.slots.needed(len(tokens), params.max_tokens),
            num_prompt_tokens=len(tokens),
        )

    def sampler(self, params: SamplingParams, prompt: Sequence[int], prepared: Prepared | None = None) -> Sampler:
        """The sampler of a request. prepared: see `job`. Raises RequestError."""
        grammar, bad_words, thought = prepared or self.prepare(params)
        eos, vocab_size = self.bundle.manifest.eos_token_ids, self.target.spec.model.vocab_size
        form = None if grammar is None else grammar.start()
        constraint = after_thought(thought, form, vocab_size, (*eos, *params.stop_token_ids))
        return Sampler(params, prompt, eos, vocab_size, constraint, bad_words)

    def prepare(self, params: SamplingParams) -> Prepared:
        """The grammar and the banned tokens of a request. Raises RequestError."""
        grammar = None if params.structured is None else self.grammars.compile(params.structured)
        return Prepared(grammar, token_sequences(self.tokenizer, params.bad_words))

    def resolved(self, speculative: Speculation) -> SpeculativeConfig | None:
        """The configuration of a request, with limits that fit the engines. "own" is the LLM's. Raises ConfigError."""
        if speculative == "own":
            return self.speculative
        if speculative is None or speculative == self.speculative:
            return speculative
        config = fitted(speculative, self.bundle)
        if config.drafts and self.draft is None and self.bundle.has_draft:
            raise ConfigError("this model was opened without its draft: leave `speculative` out, or open it with one")
        return config

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        speculative: Speculation = "own",
    ) -> list[RequestOutput]:
        """Answer a conversation of {"role", "content"} messages, or each conversation of a list, see `generate`; the
        other arguments are those of ChatSettings. tools: the chat template tells the model of them; calls are part of
        the text. Raises RequestError without a chat template, and for an invalid conversation."""
        given = messages if is_conversations(messages) else [cast(Conversation, messages)]
        settings = ChatSettings(add_generation_prompt, continue_final_message, chat_template_kwargs or {}, tools or ())
        texts = [self.write_chat(each, settings=settings) for each in given]
        encoded = [self.encode_written(text) for text in texts]
        return complete(self, texts, encoded, sampling_params, use_tqdm, speculative=speculative)

    def get_default_sampling_params(self) -> SamplingParams:
        """The settings of a text without others: the model's own, see `default_params`."""
        return self._default_params

    def encode_chat(self, messages: Conversation, settings: ChatSettings = ASKED) -> list[int]:
        """Encode a conversation as a prompt with the model's chat template."""
        return self.encode_written(self.write_chat(messages, settings=settings))

    def write_chat(self, messages: Conversation, given_up: Event | None = None, settings: ChatSettings = ASKED) -> str:
        """Format a conversation with the chat template. given_up: see ChatTemplate.render."""
        return write_conversation(self.tokenizer, messages, settings, given_up)

    def encode_written(self, conversation: str, given_up: Event | None = None) -> list[int]:
        """Encode the output of `write_chat`. It already contains the special tokens. given_up: see `write_chat`."""
        return check_prompt(self._tokens(conversation, given_up), self.bundle)

    @property
    def is_pooled(self) -> bool:
        """Whether the engines' caches grow, so that several requests can share one cache."""
        return describe_backend(self.target.spec.backend).grows

    def warm_up(self) -> list[Callable[[], None]]:
        """Steps that prepare the engines for a first request, to be called in order. None for engines on a CPU."""
        return [step for engine in self._engines for step in engine.warm_up()]

    def scheduler(
        self,
        max_running: int,
        max_waiting: int = 0,
        kv_cache_bytes: int | None = None,
        prefix_cache_slots: int = 0,
        max_pause_ms: float | None = None,
        slots: CacheBudget | None = None,
    ) -> Scheduler[StreamChunk]:
        """A scheduler over the engines, for up to `max_running` requests at a time. They share passes where the backend
        allows it. The caller closes it before the LLM.

        kv_cache_bytes: see `cache_budget`. prefix_cache_slots: see PooledEngine.share_prefixes; 0: requests share no
        rows. max_pause_ms: see PrefillLimit; None: texts wait for prompts as long as it takes. slots: of all caches;
        None: by the memory. Raises ConfigError when the memory suffices for no request.
        """
        prefill = None if max_pause_ms is None else PrefillLimit(self.costs, max_pause_ms)
        target, draft, pools = self.target, self.draft, list[PooledEngine]()
        if slots is None:
            slots = CacheBudget(None, target.spec.capacity, target.spec.max_width)
            if self.is_pooled:
                specs = [engine.spec for engine in self._engines]
                slots = cache_budget(specs, kv_cache_bytes, self._provider, max_running, prefix_cache_slots)
        if self.is_pooled:
            pools = pools_over(self._engines, max_running, slots.allocated, prefix_cache_slots)
            target, draft = pools[0], pools[1] if len(pools) > 1 else None
        drafts = DraftBudget(Drift(self.costs), None if draft is None else draft.spec.model.draft_context)
        return Scheduler(max_running, max_waiting, target, draft, pools, slots, prefill, drafts)

    @property
    def max_running(self) -> int | None:
        """The most requests that may run at a time; None where caches grow, and memory alone limits them."""
        return None if self.is_pooled else self.max_batch or MAX_TURNS

    @property
    def max_batch(self) -> int | None:
        """The number of caches that a batched TensorRT engine has; None for engines that open caches as needed."""
        spec = self.target.spec
        return None if self.is_pooled or spec.max_batch == 1 else spec.max_batch

    @property
    def kv_cache_bytes(self) -> int:
        """The bytes of one request's caches when they are full."""
        return sum(cache_bytes(engine.spec, engine.spec.capacity) for engine in self._engines)

    @property
    def _engines(self) -> list[Engine]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    def close(self) -> None:
        """Close the engines, and end the processes of chat template and grammars."""
        self.tokenizer.close()
        self.grammars.close()
        for scheduler in self._idle:
            scheduler.close()
        for engine in self._engines:
            engine.close()

    def encode(self, prompt: PromptType, given_up: Event | None = None) -> list[int]:
        """The tokens of a prompt. given_up: see `write_chat`. Raises RequestError like `generate`."""
        plain = plain_prompt(prompt)
        return check_prompt(self._tokens(plain, given_up, True) if isinstance(plain, str) else plain, self.bundle)

    def encode_infill(self, infill: Infill, given_up: Event | None = None) -> list[int]:
        """The prompt for the text between a prefix and a suffix. given_up: see `write_chat`. Raises RequestError."""
        tokens = Infilling(self.tokenizer).encode(infill, lambda text: self._tokens(text, given_up))
        return check_prompt(tokens, self.bundle)

    @cached_property
    def token_text(self) -> Callable[[int], str]:
        return token_texts(self.tokenizer)

    def _tokens(self, text: str, given_up: Event | None = None, add_special_tokens: bool = False) -> list[int]:
        return encode_text(self.tokenizer, text, self.bundle.manifest.max_length, add_special_tokens, given_up)

    def _run(self, scheduler: Scheduler[StreamChunk], request: Request[StreamChunk]) -> Iterator[StreamChunk]:
        """The chunks of a request alone. Its scheduler then serves the next stream."""
        try:
            with closing(scheduler.run([request])) as chunks:
                for _, chunk in chunks:
                    yield chunk
        finally:
            self._idle.append(scheduler)
