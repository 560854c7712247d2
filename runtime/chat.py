"""ChatSession: a conversation with an LLM. What one answer has read or written, the next one does not read again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from threading import Event
from typing import NamedTuple

from ..models.closing import Closing
from ..models.errors import RequestError
from .decoding.request import Request
from .decoding.stats import SpecDecodeStats
from .engines.shared.pool import PREFIX_CACHE_SLOTS
from .llm import LLM, Speculation
from .prompt import PromptTooLongError
from .sampling.params import SamplingParams
from .text.conversation import Conversation, to_template
from .text.result import RequestOutput, output_of
from .text.writer import StreamChunk

INTERRUPTED = "interrupted"  # finish_reason of an answer that the user stopped
RESERVED = 4  # an answer has room for `max_tokens`, or for one part in so many of the context
PAIR = ("user", "assistant")  # the roles of a turn's messages
KEPT = 2  # a conversation that was too long is cut to one part in so many of the context


class Turn(NamedTuple):
    """A message and its answer. finish_reason: as in CompletionOutput, or INTERRUPTED; "stop" if it was loaded."""

    user: str
    answer: str
    finish_reason: str


class ChatSession(Closing):
    """Holds the turns of one conversation, and one KV cache of each engine that all of its answers share.

    turns: the conversation, the first turn first. num_left_out: of the oldest turns, which the model does not read any
    more because the context is full. last: the last answer; None before the first one, and after one that was stopped
    before its first character. stats, num_prompt_tokens: of all answers together, those that were undone included.

    The cache is the prefix cache of `LLM.scheduler`, as in a server: `last.stats.num_cached_tokens` counts the tokens
    of the prompt that were not read again. On engines whose caches do not grow (TensorRT) every answer reads its whole
    prompt. Not for several threads at a time.
    """

    def __init__(self, llm: LLM, system: str | None = None, prefix_cache_slots: int = PREFIX_CACHE_SLOTS) -> None:
        """The LLM stays the caller's to close. system: the system message. prefix_cache_slots: see
        PooledEngine.share_prefixes. Raises RequestError if the model has no chat template, or if the template refuses a
        system message; ConfigError if there is no memory for the caches."""
        self._llm = llm
        self.turns: list[Turn] = []
        self.num_left_out = 0
        self._undone = False  # whether turns that were left out may have room again
        self.last: RequestOutput | None = None
        self.stats = SpecDecodeStats()
        self.num_prompt_tokens = 0
        self.system = system
        self._scheduler = llm.scheduler(1, prefix_cache_slots=prefix_cache_slots)

    @property
    def system(self) -> str | None:
        """The system message. It is never left out."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        """Raises RequestError if the chat template refuses a system message; the old one then stays."""
        self._llm.write_chat([*system_message(text), {"role": "user", "content": "hello"}])
        self._system = text

    @property
    def messages(self) -> list[dict[str, str]]:
        """The whole conversation as {"role", "content"} messages, the turns that are left out included."""
        return [*system_message(self.system), *messages_of(self.turns)]

    def send(
        self,
        text: str,
        params: SamplingParams | None = None,
        speculative: Speculation = "own",
        stop: Event | None = None,
    ) -> Iterator[StreamChunk]:
        """Answer a message; one chunk per round. The turn belongs to the conversation when the chunks end.

        params.max_tokens is lowered to what the memory has room for. stop: once it is set, by a signal handler or
        another thread, the answer ends before the next pass. What was written by then stays in the conversation as an
        INTERRUPTED answer; closing the iterator does the same. If nothing was written, or if an error ends the answer,
        the conversation stays as it was.

        If the context is full, or the memory for the caches where that is smaller, the oldest turns are left out:
        `num_left_out` has changed when this method returns. So many are left out that half of the room is free, because
        each change of the beginning makes the model read the whole conversation again. Raises RequestError, before
        anything is decoded, also for a message that alone is longer than the room. The iterator does where an earlier
        answer has not ended.
        """
        return self._begin(text, len(self.turns), params, speculative, stop or Event())

    def retry(
        self,
        params: SamplingParams | None = None,
        speculative: Speculation = "own",
        stop: Event | None = None,
    ) -> Iterator[StreamChunk]:
        """Answer the last message again, as `send` does. The new answer replaces the old one, which stays if nothing is
        written. Raises RequestError if there are no turns."""
        if not self.turns:
            raise RequestError("there is nothing to answer again: the conversation has no turns")
        before = len(self.turns) - 1
        return self._begin(self.turns[before].user, before, params, speculative, stop or Event())

    def undo(self) -> Turn | None:
        """Remove and return the last turn, if any. Turns left out return with the next message, to half of the room."""
        if not self.turns:
            return None
        turn = self.turns.pop()
        self.num_left_out = min(self.num_left_out, len(self.turns))
        self._undone = True
        return turn

    def reset(self) -> None:
        """Begin a new conversation. The system message stays."""
        self.turns.clear()
        self.num_left_out = self.num_prompt_tokens = 0
        self.last, self.stats = None, SpecDecodeStats()

    def load(self, messages: Conversation) -> None:
        """Replace the conversation and the system message by those of `messages`, in the form of the property
        `messages`. The next answer reads the whole conversation. Raises RequestError for messages that are no such
        conversation or that the chat template refuses; the conversation then stays."""
        system, turns = read_conversation(messages)
        self._llm.write_chat([*system_message(system), *messages_of(turns), {"role": "user", "content": "hello"}])
        self.reset()
        self.turns[:], self._system = turns, system

    def close(self) -> None:
        self._scheduler.close()

    def _begin(
        self, text: str, num_before: int, params: SamplingParams | None, speculative: Speculation, stop: Event
    ) -> Iterator[StreamChunk]:
        """The answer to a message after the first `num_before` turns; it replaces those after them."""
        params = params or self._llm.get_default_sampling_params()
        prompt = self._fit(text, num_before, params.max_tokens, stop)
        room = self._scheduler.slots.tokens_after(len(prompt))
        params = replace(params, max_tokens=min(params.max_tokens, room))
        request = self._llm.request(prompt, params, self._scheduler, speculative=speculative)
        self.last = None  # a message that was refused above leaves it
        return self._answer(request, text, num_before, prompt, stop)

    def _fit(self, text: str, num_before: int, max_tokens: int, stop: Event) -> list[int]:
        """The prompt with as many turns as context and memory have room for; sets `num_left_out`. Bisects, because a
        conversation that was loaded may have thousands of turns too many, and each attempt renders and tokenizes it."""
        limit = min(self._llm.bundle.manifest.max_length, self._scheduler.slots.tokens_after(0))
        room = limit - min(max_tokens, limit // RESERVED)
        tried = least = min(self.num_left_out, num_before)
        if self._undone:
            tried = least = self._bring_back(least, num_before, text, limit // KEPT, stop)
        most, fitting = num_before, None  # turns that certainly suffice to leave out, and the prompt without them
        while least < most:
            prompt = self._encode_within(room, self.turns[tried:num_before], text, stop)
            if prompt is None:
                least = tried + 1
            else:
                most, fitting = tried, prompt
            room, tried = limit // KEPT, (least + most) // 2
        prompt = self._encode([], text, stop) if fitting is None else fitting
        self.num_left_out, self._undone = most, False
        return prompt

    def _encode_within(self, room: int, turns: list[Turn], text: str, stop: Event) -> list[int] | None:
        """The prompt, or None if it has more than `room` tokens."""
        try:
            prompt = self._encode(turns, text, stop)
        except PromptTooLongError:
            return None
        return prompt if len(prompt) <= room else None

    def _bring_back(self, first: int, num_before: int, text: str, most: int, stop: Event) -> int:
        """The first turn that the model reads after an undo. most: tokens of a prompt up to which turns come back."""
        with suppress(PromptTooLongError):
            while first and len(self._encode(self.turns[first - 1 : num_before], text, stop)) <= most:
                first -= 1
        return first

    def _encode(self, turns: list[Turn], text: str, stop: Event) -> list[int]:
        messages = [*system_message(self.system), *messages_of(turns), {"role": "user", "content": text}]
        return self._llm.encode_written(self._llm.write_chat(messages, stop))

    def _answer(
        self, request: Request[StreamChunk], text: str, num_before: int, prompt: list[int], stop: Event
    ) -> Iterator[StreamChunk]:
        if len(self._scheduler.queue):  # the loop would end that answer, too
            raise RequestError("an earlier answer has not ended: read it to its end, or close it, and ask again")
        chunks: list[StreamChunk] = []
        with closing(self._scheduler.run([request], stop.is_set)) as answers:
            try:
                for _, chunk in answers:
                    chunks.append(chunk)
                    yield chunk
            except GeneratorExit:
                self._remember(text, num_before, prompt, chunks)
                raise
        self._remember(text, num_before, prompt, chunks)

    def _remember(self, text: str, num_before: int, prompt: list[int], chunks: list[StreamChunk]) -> None:
        if not chunks:
            return
        answer = output_of(next(self._llm.request_numbers), None, prompt, [chunks], self._llm.token_text)
        if chunks[-1].finish_reason is None:
            answer = replace(answer, outputs=[replace(answer.outputs[0], finish_reason=INTERRUPTED)])
        self.stats.add(answer.stats)
        self.num_prompt_tokens += len(prompt)
        if answer.text or answer.finish_reason != INTERRUPTED:
            self.last = answer
            self.turns[num_before:] = [Turn(text, answer.text, answer.finish_reason)]


def system_message(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]


def read_conversation(messages: Conversation) -> tuple[str | None, list[Turn]]:
    """The system message and the turns of a conversation. Raises RequestError if anything else is in it."""
    written = to_template(messages) if messages != [] else []
    system = written.pop(0)["content"] if written and written[0]["role"] == "system" else None
    first = len(messages) - len(written)
    for place, message in enumerate(written, first):
        role = PAIR[(place - first) % 2]
        if message["role"] != role or message.keys() != {"role", "content"}:
            raise RequestError(
                f"messages[{place}] is not a text of the {role}: a conversation to go on with has a system message or "
                "none, and then texts of the user, each with the assistant's answer"
            )
    if len(written) % 2:
        raise RequestError("the user's last message has no answer: leave it out, and send it as the next message")
    pairs = zip(written[::2], written[1::2], strict=True)
    return system, [Turn(user["content"], answer["content"], "stop") for user, answer in pairs]


def messages_of(turns: list[Turn]) -> Iterator[dict[str, str]]:
    for turn in turns:
        yield {"role": "user", "content": turn.user}
        yield {"role": "assistant", "content": turn.answer}
