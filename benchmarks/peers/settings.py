"""What a comparison varies besides peers and methods: the length of prompts, and the number of texts at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, cycle, islice
from typing import NamedTuple

from draftwood.models.errors import RequestError
from draftwood.runtime.text.tokenizer import Tokenizer

TOLERANCE = 0.1  # of a prompt's length
PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands for the user's text in a rendered chat template


class Setting(NamedTuple):
    """name: a heading; "" if a run has one setting only. batches: prompts as token ids; those of a batch are given to a
    peer at the same time. All batches have the same number of prompts."""

    name: str
    batches: Sequence[Sequence[list[int]]]

    @property
    def at_a_time(self) -> int:
        return len(self.batches[0])


def encode_whole(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    """A prompt of each text, as the user's message in the model's chat template. Raises RequestError without one."""
    before, after = split_template(tokenizer)
    for text in texts:
        yield [*before, *tokenizer.encode(text, add_special_tokens=False), *after]


def encode_chats(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> Iterator[list[int]]:
    """Prompts of about `length` tokens: the model's chat template with one of the texts as the user's message.

    First the texts whose prompts differ from `length` by at most TOLERANCE, the nearest first. Then joins of the longer
    half of the texts, cut so that a prompt has exactly `length` tokens. Raises RequestError for a model without a
    template and for a length that the template alone exceeds.
    """
    before, after = split_template(tokenizer)
    room = length - len(before) - len(after)
    if room < 1:
        raise RequestError(f"the chat template alone has {length - room} tokens: give longer --prompt-tokens")
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    near = [ids for ids in encoded if abs(len(ids) - room) <= TOLERANCE * length]
    for ids in sorted(near, key=lambda ids: abs(len(ids) - room)):
        yield [*before, *ids, *after]
    longer = [ids for ids in sorted(encoded, key=len)[len(encoded) // 2 :] if ids]
    for first in range(len(longer)):
        joined = islice(chain.from_iterable(islice(cycle(longer), first, None)), room)
        yield [*before, *joined, *after]


def split_template(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens of the chat template before and after the message of a user. Raises RequestError without one."""
    written = tokenizer.apply_chat_template([{"role": "user", "content": PLACE}])
    before, _, after = written.partition(PLACE)
    return tokenizer.encode(before, add_special_tokens=False), tokenizer.encode(after, add_special_tokens=False)


def make_settings(
    candidates: Mapping[str, Iterator[list[int]]],
    at_a_time: Sequence[int],
    limit: int,
    answers_fully: Callable[[list[int]], bool],
) -> list[Setting]:
    """A setting for every kind of prompts with one text at a time and `limit` prompts, and one for every larger number
    of texts at a time, with prompts of the first kind.

    candidates: prompts by kind. answers_fully: whether the answer to a prompt does not end early; others are left out.
    Raises RequestError when too few candidates are left.
    """
    first = next(iter(candidates))
    needed = dict.fromkeys(candidates, limit) | {first: max(limit, *at_a_time)}
    chosen = {kind: list(islice(filter(answers_fully, prompts), needed[kind])) for kind, prompts in candidates.items()}
    for kind, found in chosen.items():
        if len(found) < needed[kind]:
            raise RequestError(
                f"only {len(found)} of {needed[kind]} {kind} have answers that do not end early: "
                "give more --prompts, or fewer --max-tokens"
            )
    alone = [Setting(kind, [[each] for each in found[:limit]]) for kind, found in chosen.items()]
    together = [Setting(f"{number} at a time", [chosen[first][:number]]) for number in at_a_time if number > 1]
    return alone + together
