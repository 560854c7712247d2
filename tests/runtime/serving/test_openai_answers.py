"""Writing answers: what it costs does not grow faster than the answer, nor with the errors of long bodies."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from draftwood.models.errors import RequestError
from draftwood.runtime.decoding.chunk import TokenLogprob
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.serving.http.errors import invalid
from draftwood.runtime.serving.json_text import AT_A_TIME, pieces
from draftwood.runtime.serving.openai.answers import MAX_LOGPROBS, Answer, check_log_probabilities
from draftwood.runtime.serving.openai.api import OpenAIApi, PreparedRequest
from draftwood.runtime.serving.openai.bodies import MAX_PARTS, MAX_PROMPTS, ChatBody, CompletionBody
from draftwood.runtime.serving.openai.formats import AnswerFormat, ChatFormat, CompletionFormat
from draftwood.runtime.serving.openai.streams import Numbered
from draftwood.runtime.serving.openai.tokens import TokenizeBody
from draftwood.runtime.serving.waiting import TimeLimit
from draftwood.runtime.structured.grammars import Prepared
from draftwood.runtime.text.token_texts import TokenTexts
from draftwood.runtime.text.writer import StreamChunk


class CountedText(str):
    """A text that counts how often its length is asked for."""

    asked = 0

    def __len__(self) -> int:
        CountedText.asked += 1
        return super().__len__()


class FakeTexts:
    """TokenTexts of one letter each."""

    special: frozenset[int] = frozenset()

    def text(self, token: int) -> str:
        return CountedText(chr(97 + token % 26))

    def bytes(self, token: int) -> tuple[int, ...]:
        return (97 + token % 26,)


TEXTS = cast(TokenTexts, FakeTexts())
SHAPES: list[AnswerFormat] = [CompletionFormat(TEXTS, True), ChatFormat(TEXTS, True)]


def chunk(tokens: list[int], alternatives: int, reason: str | None = None) -> StreamChunk:
    logprobs = [TokenLogprob(token, -0.5, {token + k: -0.5 - k for k in range(alternatives)}) for token in tokens]
    return StreamChunk("x" * len(tokens), tokens, [], logprobs, reason, SpecDecodeStats())


def answer_of(shape: AnswerFormat, choices: int, rounds: int, alternatives: int = 1) -> tuple[Answer, list[Numbered]]:
    chunks = [
        Numbered(choice, chunk([number, number + 1], alternatives, "length" if number == rounds - 1 else None))
        for number in range(rounds)
        for choice in range(choices)
    ]
    return Answer(shape, TEXTS, "m", [[1]], [""] * choices, 0), chunks


def test_lengths_of_a_long_text_are_added_up_once() -> None:
    asked = []
    for rounds in (100, 400):
        answer, chunks = answer_of(SHAPES[0], 1, rounds)
        for item in chunks:
            answer.note(*item)
        CountedText.asked = 0
        written = json.loads(bytes(answer.whole().body))["choices"][0]
        asked.append(CountedText.asked)
        assert written["logprobs"]["text_offset"] == list(range(2 * rounds)) and written["text"] == "x" * 2 * rounds
    assert asked[1] <= 4 * asked[0] + 10


MANY = 5000
UNKNOWN = {f"a{number}": number for number in range(MANY)}
USER = {"role": "user", "content": "x"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "x"}] * 1000}
UNKNOWN_FIRST = "a0 is not supported by this server"


@pytest.mark.parametrize(
    ("model", "body", "named"),
    [
        (CompletionBody, {"prompt": "x", **UNKNOWN}, UNKNOWN_FIRST),
        (TokenizeBody, {"prompt": "x", **UNKNOWN}, UNKNOWN_FIRST),
        (ChatBody, {"messages": [USER], "response_format": {"type": "text", **UNKNOWN}}, UNKNOWN_FIRST),
        (ChatBody, {"messages": [PARTS] * 20}, f"at most {MAX_PARTS} items"),
        (ChatBody, {"messages": [{**USER, "tool_calls": [None] * MANY}] * 4}, f"at most {MAX_PARTS} items"),
        (CompletionBody, {"prompt": "x", "logit_bias": dict.fromkeys(UNKNOWN, "")}, "logit_bias: Dictionary should"),
        (CompletionBody, {"prompt": [[1]] * MANY}, f"prompt: List should have at most {MAX_PROMPTS}"),
        (CompletionBody, {"prompt": ["x"] * MANY}, f"prompt: List should have at most {MAX_PROMPTS}"),
    ],
)
def test_a_wrong_body_is_refused_for_few_reasons(model: type[BaseModel], body: dict[str, Any], named: str) -> None:
    """Each reason takes a hundredth of a millisecond of the event loop, and a body has room for 300,000."""
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in refused.value.errors()]
    assert len(errors) <= 4 and named in invalid(RequestValidationError(errors)).message


@pytest.mark.parametrize(
    ("asked", "choices", "lengths", "count"),
    [
        ({"logprobs": 20, "max_tokens": 8192}, 1, [100], 0),
        ({"logprobs": 20, "max_tokens": 8192}, 2, [100], 2 * 21 * 8092),
        ({"logprobs": 0, "max_tokens": 1}, 65, [1] * 5000, 65 * 5000),
        ({"prompt_logprobs": 1, "max_tokens": 1}, 1, [8000] * 17, 2 * 17 * 8000),
        ({"max_tokens": 8192}, 128, [1], 0),
    ],
)
def test_the_log_probabilities_of_an_answer_are_bounded(
    asked: dict[str, Any], choices: int, lengths: list[int], count: int
) -> None:
    """They are held until the client has read them."""
    params = SamplingParams(**asked)
    if not count:
        check_log_probabilities(params, choices, lengths, 8192)
        return
    with pytest.raises(RequestError, match=f"could have {count} .*may have {MAX_LOGPROBS}.*a smaller max_tokens"):
        check_log_probabilities(params, choices, lengths, 8192)


class Closed:
    """A stream of a request, and whether it was ended."""

    def __init__(self) -> None:
        self.ended = False

    async def aclose(self) -> None:
        self.ended = True


@pytest.mark.parametrize("places", [3, 9])
def test_choices_are_queued_in_turns_and_all_or_none(places: int) -> None:
    """Others have their turn between two choices. Where one finds no place, the ones before it end."""
    queued: list[Closed] = []

    class Queue:
        def generate(self, *_: Any, **__: Any) -> Closed:
            if len(queued) == places:
                raise RequestError("no place is left")
            queued.append(Closed())
            return queued[-1]

    async def submit() -> tuple[int, bool]:
        api = object.__new__(OpenAIApi)
        api.async_llm = cast(Any, Queue())
        body, params = CompletionBody.model_validate({"prompt": "x", "n": 5}), SamplingParams()
        asked = PreparedRequest(TimeLimit(None), [[1]], [None], None, params, Prepared(None, []), SHAPES[0])
        submitting, turns = asyncio.create_task(api._submit_all(body, "client", asked)), 0
        while not submitting.done():
            await asyncio.sleep(0)
            turns += 1
        return turns, submitting.exception() is not None

    turns, refused = asyncio.run(submit())
    assert turns > len(queued) and refused == (places < 5) and all(stream.ended == refused for stream in queued)


def test_usage_is_that_of_the_chunks_so_far() -> None:
    """`stats` belongs to the engine's thread: it may be ahead, and counts accepted tokens that a stop string cut."""
    stats = SpecDecodeStats(num_drafts=9, num_draft_tokens=54, num_accepted_tokens=40)
    answer = Answer(SHAPES[0], TEXTS, "m", [[1]], [None], 6)
    used = []
    for tokens, num_drafted in (([1, 2, 3], 2), ([4], 1)):
        part = chunk(tokens, 0)._replace(stats=stats, num_drafted=num_drafted, num_proposed=6)
        answer.add(0, part)
        used.append(answer.usage())
    assert [each["completion_tokens"] for each in used] == [3, 4]
    assert [list(each["completion_tokens_details"].values()) for each in used] == [[2, 4], [3, 9]]
    done = answer.account()["metrics"]["speculative_decoding"]
    assert (done["num_accepted_draft_tokens"], done["num_draft_tokens"]) == (40, 54)


@pytest.mark.parametrize("count", [0, 1, AT_A_TIME, AT_A_TIME + 1, 3 * AT_A_TIME])
def test_pieces_are_the_whole(count: int) -> None:
    items: list[Any] = [{"a": number, "b": [None, "é\n", {}]} for number in range(count)]
    lazy = {"list": [{"inner": iter(items), "empty": {}}, {}], "items": iter(items), "none": iter(()), "x": [[], "]"]}
    eager = {"list": [{"inner": items, "empty": {}}, {}], "items": items, "none": [], "x": [[], "]"]}
    written = list(pieces(lazy))
    assert json.loads("".join(written)) == eager
    assert max(map(len, written)) < 100 * AT_A_TIME
    with pytest.raises(ValueError, match="not JSON compliant"):
        list(pieces({"a": iter([float("nan")])}))
