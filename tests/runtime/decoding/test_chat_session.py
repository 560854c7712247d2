"""ChatSession: nothing is read twice, every answer is the one of its whole prompt, and a stop leaves all in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from serving import with_chat_template

from draftwood.runtime import (
    LLM,
    ChatSession,
    EngineError,
    RequestError,
    SamplingParams,
    SpeculativeConfig,
    StreamChunk,
)
from draftwood.runtime.chat import INTERRUPTED, Turn
from draftwood.runtime.decoding.stats import SpecDecodeStats, SpeculationSwitch
from draftwood.runtime.engines.base import Pass

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=16, temperature=0.9, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(tiny_bundle, tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, SpeculativeConfig(budget="fixed")) as opened:
        yield opened


def text_of(chunks: Iterator[StreamChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("pooled", [True, False])
def test_answers_are_those_of_whole_prompts_and_read_nothing_twice(
    llm: LLM, pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pooled: False is an engine whose caches do not grow, which reads every prompt."""
    monkeypatch.setattr(LLM, "is_pooled", pooled)
    read = 0  # tokens of prompts that are not cached
    with ChatSession(llm, "Be brief.") as session:
        for number, (params, how) in enumerate([(GREEDY, "own"), (SEEDED, "own"), (GREEDY, None), (GREEDY, "own")]):
            text = text_of(session.send(f"question {number}", params, how))  # type: ignore[arg-type]
            assert session.last is not None and session.last.text == text
            assert session.turns[-1] == Turn(f"question {number}", text, "length")
            whole = llm.encode_chat(session.messages[:-1])
            assert session.last.prompt_token_ids == whole
            alone = list(llm.stream(whole, params, speculative=how))  # type: ignore[arg-type]
            assert session.last.token_ids == [token for chunk in alone for token in chunk.token_ids]
            cached = session.last.stats.num_cached_tokens
            # What is common with the prompt before; tokens of an answer may be others when it is read as text.
            assert (cached >= read > 0 or number == 0) if pooled else cached == 0
            read = len(whole) - 1 if pooled else 0
        assert session.stats.num_tokens == 64 and session.num_prompt_tokens > session.stats.num_cached_tokens
        assert [each["role"] for each in session.messages] == ["system", *["user", "assistant"] * 4]


def test_a_stop_keeps_what_was_written(llm: LLM) -> None:
    with ChatSession(llm) as session:
        stop, shown = Event(), ""
        for chunk in session.send("hello", GREEDY, None, stop):
            shown += chunk.text
            if shown:
                stop.set()
        assert session.turns == [Turn("hello", shown, INTERRUPTED)]
        assert session.last is not None and session.last.finish_reason == INTERRUPTED
        assert 0 < session.stats.num_tokens < 16
        whole = text_of(llm.stream(llm.encode_chat(session.messages[:1]), GREEDY))
        assert whole.startswith(shown) and whole != shown
        chunks = session.send("and", GREEDY)
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]
        assert session.turns[-1].finish_reason == INTERRUPTED
        text_of(session.send("more", GREEDY))
        assert session.last is not None and session.last.finish_reason == "length"
        assert session.last.prompt_token_ids == llm.encode_chat(session.messages[:-1])


def test_a_stop_while_the_prompt_is_read_changes_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of several passes: the second one is not run."""
    stop, passes = Event(), 0
    with ChatSession(llm) as session:
        text_of(session.send("hello", GREEDY))
        before = list(session.turns)
        engine: Any = session._scheduler.target
        forward = engine.forward

        def stopping(wanted: list[Pass]) -> object:
            nonlocal passes
            passes += 1
            stop.set()
            return forward(wanted)

        monkeypatch.setattr(engine, "forward", stopping)
        assert text_of(session.send("x" * 600, GREEDY, None, stop)) == ""
        assert passes == 1 and session.turns == before and session.last is None
        monkeypatch.undo()
        session.retry(SEEDED)  # nobody asks for a chunk
        assert session.turns == before
        assert text_of(session.retry(SEEDED)) == session.turns[0].answer != before[0].answer
        before = list(session.turns)
        stopped = Event()
        stopped.set()
        with pytest.raises(RequestError, match="given up"):
            session.retry(GREEDY, "own", stopped)
        assert session.turns == before, "the old answer is still there"


def test_an_error_in_an_answer_leaves_the_conversation_as_it_was(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*wanted: object) -> object:
        raise EngineError("on purpose")

    with ChatSession(llm) as session:
        text_of(session.send("hello", GREEDY))
        before = list(session.turns)
        with monkeypatch.context() as patch:
            patch.setattr(llm.target, "score", broken)
            for chunks in (session.send("again", GREEDY), session.retry(GREEDY)):
                with pytest.raises(EngineError, match="on purpose"):
                    text_of(chunks)
                assert session.turns == before and session.last is None
        text_of(session.send("again", GREEDY))
        assert len(session.turns) == 2


def test_an_answer_that_is_still_read_is_not_ended_by_another_one(llm: LLM) -> None:
    """The other one got an error about a server's queue, and the first one ended as if the user had stopped it."""
    with ChatSession(llm) as session:
        first, second = session.send("hello", GREEDY), session.send("again", GREEDY)
        shown = next(first).text
        with pytest.raises(RequestError, match="an earlier answer has not ended"):
            next(second)
        shown += text_of(first)
        assert session.turns == [Turn("hello", shown, "length")]


def test_the_oldest_turns_are_left_out_and_the_system_message_is_not(llm: LLM) -> None:
    """The context has 1024 tokens, an answer 16 of them."""
    with ChatSession(llm, "Be brief.") as session:
        seen: list[int] = []
        lengths: list[int] = []  # of the prompts
        for number in range(12):
            text_of(session.send(f"{number} " + "x" * 150, GREEDY))
            seen.append(session.num_left_out)
            assert session.last is not None
            kept = [session.messages[0], *session.messages[1 + 2 * session.num_left_out : -1]]
            assert session.last.prompt_token_ids == llm.encode_chat(kept)
            length = len(session.last.prompt_token_ids)
            assert length + 16 <= 1024
            if number and seen[-1] == seen[-2]:
                assert session.last.stats.num_cached_tokens >= lengths[-1] - 1
            lengths.append(length)
        assert seen == sorted(seen) and 1 < seen[-1] < 12 and len(set(seen)) < 5
        assert len(session.turns) == 12
        whole = text_of(session.send("x" * 900, GREEDY))  # alone longer than half of the context
        assert whole and session.num_left_out == 12
        last = session.last
        with pytest.raises(RequestError, match="shorten it"):
            session.send("x" * 1500, GREEDY)
        assert len(session.turns) == 13 and session.last is last is not None
        for undone, all_back in ((4, False), (8, True)):  # there is room for some of the others again, and for all
            for _ in range(undone):
                session.undo()
            text_of(session.send("and", GREEDY))
            assert (session.num_left_out == 0) == all_back and session.num_left_out < len(session.turns) - 1
            kept = [session.messages[0], *session.messages[1 + 2 * session.num_left_out : -1]]
            assert session.last is not None and session.last.prompt_token_ids == llm.encode_chat(kept)
            assert len(session.last.prompt_token_ids) <= 512
        for _ in range(3):
            assert session.undo() is not None
        assert session.undo() is None and session.num_left_out == 0
        text_of(session.send("hello", GREEDY))
        session.reset()
        assert session.messages == [{"role": "system", "content": "Be brief."}]
        assert session.num_prompt_tokens == 0 and session.stats == SpecDecodeStats()


def test_a_loaded_conversation_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is much longer than the context: few attempts find how much of it has room."""
    with ChatSession(llm, "Be brief.") as session:
        for number in range(2):
            text_of(session.send(f"question {number}", GREEDY))
        messages, answer = session.messages, session.turns[-1].answer
        session.load([])
        assert session.messages == [] and session.stats == SpecDecodeStats() and session.last is None
        session.load(messages)
        assert session.messages == messages and session.system == "Be brief."
        assert text_of(session.retry(GREEDY)) == answer
        long = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "x" * 100}] * 500
        session.load(long)
        assert session.messages == long and session.system is None
        lengths, encode = list[int](), session._encode

        def counted(turns: list[Turn], text: str, stop: Event) -> list[int]:
            lengths.append(len(turns))
            return encode(turns, text, stop)

        monkeypatch.setattr(session, "_encode", counted)
        text_of(session.send("and now?", GREEDY))
        assert len(lengths) <= 10 and lengths[0] == 500
        kept = 500 - session.num_left_out
        assert 0 < kept < 500
        next_turn = {"role": "user", "content": "and now?"}
        assert len(llm.encode_chat([*long[-2 * kept :], next_turn])) <= 512
        assert len(llm.encode_chat([*long[-2 * kept - 2 :], next_turn])) > 512


@pytest.mark.parametrize(
    ("roles", "named"),
    [
        (["user"], "no answer"),
        (["assistant", "user"], r"messages\[0\] is not a text of the user"),
        (["system", "user", "user"], r"messages\[2\] is not a text of the assistant"),
        (["user", "assistant", "system"], r"messages\[2\] is not a text of the user"),
        (["user", "assistant"] * 3000, "at most 4096"),
        (["user", "judge"], "role must be one of"),
    ],
)
def test_what_is_no_conversation_is_not_loaded(llm: LLM, roles: list[str], named: str) -> None:
    with ChatSession(llm, "Be brief.") as session:
        text_of(session.send("hello", GREEDY))
        before, last = session.messages, session.last
        with pytest.raises(RequestError, match=named):
            session.load([{"role": role, "content": "text"} for role in roles])
        named_message = [{"role": "user", "content": "a", "name": "b"}, {"role": "assistant", "content": "c"}]
        with pytest.raises(RequestError, match="not a text of the user"):
            session.load(named_message)
        assert session.messages == before and session.last is last is not None


def test_turns_are_left_out_where_memory_is_smaller_than_the_context(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation that had filled the memory got shorter and shorter answers, and then no answer any more."""
    opened, slots = LLM.scheduler, 400
    slot_bytes = llm.kv_cache_bytes // llm.target.spec.capacity
    monkeypatch.setattr(LLM, "scheduler", lambda llm, *_, **rest: opened(llm, 1, 0, slots * slot_bytes, **rest))
    with ChatSession(llm) as session:
        for number in range(8):
            text_of(session.send(f"{number} " + "x" * 60, GREEDY))
            assert session.last is not None and len(session.last.token_ids) == 16
        assert 1 < session.num_left_out < 8
        with pytest.raises(RequestError, match="shorten the prompt"):
            session.send("x" * 500, GREEDY)


def test_a_model_without_a_template_has_no_conversations(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, None) as llm, pytest.raises(RequestError, match="no chat template"):
        ChatSession(llm)


def test_counts_of_several_texts_add_up() -> None:
    both = SpecDecodeStats(
        num_tokens=5, accepted_per_round=[1, 2], num_cached_tokens=3, switches=[SpeculationSwitch(2, False, "a")]
    )
    both.add(
        SpecDecodeStats(
            num_tokens=7, accepted_per_round=[4], decode_seconds=2.0, switches=[SpeculationSwitch(1, True, "b")]
        )
    )
    assert both.num_tokens == 12 and both.accepted_per_round == [5, 2] and both.num_cached_tokens == 3
    assert both.tokens_per_second == 6 and [switch.token for switch in both.switches] == [2, 6]
