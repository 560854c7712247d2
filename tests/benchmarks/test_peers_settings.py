"""The settings of a comparison: prompts of a length, in a chat template, whose answers do not end early."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

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


def test_prompts_stand_in_the_template_whole_or_at_a_length(tokenizer: Tokenizer) -> None:
    whole = [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in encode_whole(tokenizer, TEXTS)]
    assert whole == [f"<s>{text}</s>" for text in TEXTS]
    wanted = len(tokenizer.encode(TEXTS[2])) + 2  # the template's two tokens
    nearest, *joined = encode_chats(tokenizer, TEXTS, wanted)
    assert tokenizer.decode(nearest, skip_special_tokens=False) == f"<s>{TEXTS[2]}</s>"
    assert [len(prompt) for prompt in joined] == [wanted] * 2
    for length in (3, 40, 200):
        prompts = list(encode_chats(tokenizer, ["ab cd", "ef gh ij kl", "mn op qr st uv", "wx yz"], length))
        assert prompts and all(abs(len(prompt) - length) <= TOLERANCE * length for prompt in prompts)
        assert len(set(map(tuple, prompts))) == len(prompts)


def test_what_cannot_be_encoded_is_refused(tokenizer: Tokenizer) -> None:
    with Tokenizer(make_tokenizer(768)) as plain, pytest.raises(RequestError, match="no chat template"):
        next(encode_whole(plain, TEXTS))
    with pytest.raises(RequestError, match="the chat template alone has 2 tokens: give longer --prompt-tokens"):
        next(encode_chats(tokenizer, TEXTS, 2))
    with pytest.raises(RequestError, match=r"only 3 of 4 questions have .* fewer --max-tokens"):
        make_settings({"questions": iter([[1], [2], [3]])}, [1, 4], 2, lambda prompt: True)


def test_settings_share_prompts_and_leave_out_answers_that_end_early() -> None:
    def prompts(length: int) -> Iterator[list[int]]:
        return ([length, number] for number in count())

    candidates = {"short": prompts(5), "long": prompts(9)}
    settings = make_settings(candidates, [1, 3], 2, lambda prompt: prompt[1] % 3 > 0)
    assert settings == [
        Setting("short", [[[5, 1]], [[5, 2]]]),
        Setting("long", [[[9, 1]], [[9, 2]]]),
        Setting("3 at a time", [[[5, 1], [5, 2], [5, 4]]]),
    ]
