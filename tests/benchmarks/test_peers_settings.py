"""The settings of a comparison: prompts of a length, in a chat template, whose answers do not end early."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.settings import TOLERANCE, Setting, encode_chats, encode_whole, make_settings
from benchmarks.tools.pair import make_tokenizer
from draftwood.models.errors import RequestError
from draftwood.runtime.text.tokenizer import Tokenizer

TEMPLATE = "<s>{% for message in messages %}{{ message['content'] }}{% endfor %}</s>"
TEXTS = ["abcdefgh" * times for times in (1, 2, 5, 9)]


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    with Tokenizer(make_tokenizer(768), {}, {"default": TEMPLATE}) as own:
        yield own


def test_texts_near_the_length_come_whole_and_the_nearest_first(tokenizer: Tokenizer) -> None:
    sizes = {text: len(tokenizer.encode(text)) for text in TEXTS}
    wanted = sizes[TEXTS[2]] + 2  # the template's two tokens
    prompts = list(encode_chats(tokenizer, TEXTS, wanted))
    assert tokenizer.decode(prompts[0], skip_special_tokens=False) == f"<s>{TEXTS[2]}</s>"
    assert all(len(prompt) == wanted for prompt in prompts[1:]) and len(prompts) == 3


def test_whole_questions_stand_in_the_template(tokenizer: Tokenizer) -> None:
    prompts = list(encode_whole(tokenizer, TEXTS))
    assert [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts] == [
        f"<s>{text}</s>" for text in TEXTS
    ]


@pytest.mark.parametrize("length", [3, 7, 40, 200])
def test_every_prompt_has_about_the_length_and_joins_differ(tokenizer: Tokenizer, length: int) -> None:
    prompts = list(encode_chats(tokenizer, ["ab cd", "ef gh ij kl", "mn op qr st uv", "wx yz"], length))
    assert prompts and all(abs(len(prompt) - length) <= TOLERANCE * length for prompt in prompts)
    texts = {tuple(prompt) for prompt in prompts}
    assert len(texts) == len(prompts)
    before, after = tokenizer.encode("<s>"), tokenizer.encode("</s>")
    assert all([prompt[0]] == before and [prompt[-1]] == after for prompt in prompts)


def test_a_length_without_room_and_a_model_without_template_are_refused(tokenizer: Tokenizer) -> None:
    with Tokenizer(make_tokenizer(768)) as plain, pytest.raises(RequestError, match="no chat template"):
        next(encode_whole(plain, TEXTS))
    with pytest.raises(RequestError, match="the chat template alone has 2 tokens: give longer --prompt-tokens"):
        next(encode_chats(tokenizer, TEXTS, 2))
    with Tokenizer(make_tokenizer(768)) as plain, pytest.raises(RequestError, match="no chat template"):
        next(encode_chats(plain, TEXTS, 9))
    assert list(encode_chats(tokenizer, ["", ""], 40)) == []


@given(
    st.lists(st.integers(1, 99), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(1, 16), min_size=1, max_size=4, unique=True),
    st.integers(1, 9),
)
def test_settings_share_prompts_and_leave_out_answers_that_end_early(
    lengths: list[int], at_a_time: list[int], limit: int
) -> None:
    settings = make_settings(
        {f"prompts of {length}": ([each, number] for each in [length] for number in count()) for length in lengths},
        at_a_time,
        limit,
        lambda prompt: prompt[1] % 3 > 0,
    )
    alone, together = settings[: len(lengths)], settings[len(lengths) :]
    for length, setting in zip(lengths, alone, strict=True):
        kept = [number for number in range(99) if number % 3][:limit]
        assert setting == Setting(f"prompts of {length}", [[[length, number]] for number in kept])
    assert [setting.at_a_time for setting in together] == [number for number in at_a_time if number > 1]
    for setting in together:
        (batch,) = setting.batches
        assert batch[0] == [lengths[0], 1] and len({tuple(prompt) for prompt in batch}) == setting.at_a_time


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(RequestError, match=r"only 3 of 4 questions have .* fewer --max-tokens"):
        make_settings({"questions": iter([[1], [2], [3]])}, [1, 4], 2, lambda prompt: True)
