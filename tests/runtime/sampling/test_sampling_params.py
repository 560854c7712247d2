"""What SamplingParams takes, what it refuses by name, and ends of text that a model does not have."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.models.errors import RequestError
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.sampler import Sampler


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 2.5}, r"max_tokens must be a whole number, not 2\.5"),
        ({"max_tokens": None}, "max_tokens must be a whole number, not None"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"top_k": -2}, "top_k must be 0"),
        ({"seed": 1.5}, "seed must be None or a whole number"),
        ({"logprobs": True}, "logprobs must be None or a whole number, not True"),
        ({"temperature": "1"}, "temperature must be a number, not '1'"),
        ({"temperature": True}, "temperature must be a number"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
        ({"stop": [1]}, "stop must be non-empty strings"),
        ({"stop": 5}, "stop must be non-empty strings"),
        ({"stop": ["x", ""]}, "stop must be non-empty strings"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids must be token ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids must be token ids"),
        ({"logits_processors": ["x"]}, "logits_processors must be functions"),
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": 1e-46}, "temperature must be 0 .greedy. or between 1e-06 and 100, not 1e-46"),
        ({"temperature": 9.9e-7}, "between 1e-06 and 100"),
        ({"temperature": 100.1}, "between 1e-06 and 100"),
        ({"temperature": 3.3e37}, "between 1e-06 and 100"),
        ({"temperature": float("nan")}, "between 1e-06 and 100"),
        ({"temperature": float("inf")}, "between 1e-06 and 100"),
        ({"temperature": 10**5000}, "not a number of thousands of digits"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": -1, "prompt_logprobs": 0}, "max_tokens must be at least 0"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be None or in"),
        ({"prompt_logprobs": True}, "prompt_logprobs must be None or a whole number"),
        ({"logit_bias": [3]}, "logit_bias must be None or a number by token id"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias must be a number by token id"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must be a number by token id"),
        ({"logit_bias": {3: "x"}}, "logit_bias of token 3 must be between -100 and 100, not 'x'"),
        ({"logit_bias": {3: True}}, "logit_bias of token 3 must be between"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias of token 3 must be between"),
        ({"logit_bias": {3: 10**400}}, "logit_bias of token 3 must be between"),
        ({"logit_bias": {3: 100.1}}, "logit_bias of token 3 must be between"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias must be of at most 1024 tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids must be None or between 1 and 16384 token ids"),
        ({"allowed_token_ids": range(16385)}, "allowed_token_ids must be None or between 1 and 16384 token ids"),
        ({"allowed_token_ids": ["x"]}, "allowed_token_ids must be None or token ids"),
        ({"bad_words": [1]}, "bad_words must be non-empty strings"),
        ({"bad_words": [""]}, "bad_words must be non-empty strings"),
        ({"bad_words": ["x"] * 129}, "bad_words must be at most 128 strings"),
        ({"bad_words": ["x" * 1001]}, "bad_words must be strings of at most 1000 characters"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output must be True or False"),
        ({"skip_special_tokens": None}, "skip_special_tokens must be True or False"),
        ({"max_tokens": 2**31}, "max_tokens must be at least 1 and not more than 2147483647"),
        ({"top_k": 2**31}, "top_k must be 0"),
        ({"min_tokens": 129}, "min_tokens must be between 0 and max_tokens"),
        ({"min_tokens": -1}, "min_tokens must be between 0 and max_tokens"),
        ({"seed": -1}, "seed must be None or an integer between 0"),
        ({"seed": 2**64}, "seed must be None or an integer between 0"),
        ({"top_p": 0}, "top_p must be in"),
        ({"top_p": 1.01}, "top_p must be in"),
        ({"top_p": float("nan")}, "top_p must be in"),
        ({"min_p": -0.01}, "min_p must be in"),
        ({"min_p": 1.01}, "min_p must be in"),
        ({"repetition_penalty": 0}, "repetition_penalty must be between"),
        ({"repetition_penalty": 1_000_000.5}, "repetition_penalty must be between"),
        ({"presence_penalty": 2.1}, "presence_penalty must be in"),
        ({"presence_penalty": -2.1}, "presence_penalty must be in"),
        ({"frequency_penalty": 2.1}, "frequency_penalty must be in"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be in"),
        ({"logprobs": 21}, "logprobs must be None or in"),
        ({"logprobs": -1}, "logprobs must be None or in"),
        ({"stop": ["x"] * 129}, "stop must be at most 128 strings"),
        ({"stop": ["x", "x" * 1001]}, "stop must be strings of at most 1000 characters"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids must be at most 1024"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be token ids"),
    ],
)
def test_values_of_another_type_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"logit_bias": {np.int64(3): np.float32(2)}}, {"logit_bias": {3: 2.0}}),
        ({"allowed_token_ids": np.array([3, 4]), "bad_words": "x"}, {"allowed_token_ids": (3, 4), "bad_words": ("x",)}),
        ({"max_tokens": 0, "prompt_logprobs": 0, "bad_words": None}, {"max_tokens": 0, "prompt_logprobs": 0}),
        ({"stop": None, "stop_token_ids": None, "logits_processors": None}, {}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "yz"], "stop_token_ids": [3, 4]}, {"stop": ("x", "yz"), "stop_token_ids": (3, 4)}),
        ({"stop_token_ids": np.array([3]), "seed": np.int64(2)}, {"stop_token_ids": (3,), "seed": 2}),
        (
            {"stop_token_ids": torch.tensor([3]), "allowed_token_ids": [torch.tensor(4)]},
            {"stop_token_ids": (3,), "allowed_token_ids": (4,)},
        ),
        ({"stop_token_ids": np.array(5)}, {"stop_token_ids": (5,)}),
        ({"temperature": np.float32(0.5), "max_tokens": np.int32(9)}, {"temperature": 0.5, "max_tokens": 9}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"repetition_penalty": Fraction(3, 2), "top_k": np.uint8(5)}, {"repetition_penalty": 1.5, "top_k": 5}),
        ({"top_k": -1, "temperature": 100, "seed": 2**64 - 1}, {"temperature": 100.0, "seed": 2**64 - 1}),
    ],
)
def test_what_vllm_takes_is_taken(settings: dict[str, Any], same: dict[str, Any]) -> None:
    given, expected = SamplingParams(**settings), SamplingParams(**same)
    assert given == expected
    for field in fields(given):  # unsigned numbers of numpy wrap around, and a fraction divides no array
        assert type(getattr(given, field.name)) is type(getattr(expected, field.name))


@pytest.mark.parametrize(
    "edge",
    [
        {"max_tokens": 1},
        {"max_tokens": 2**31 - 1, "top_k": 2**31 - 1, "min_tokens": 2**31 - 1},
        {"temperature": 1e-6, "min_p": 1, "top_p": 1, "presence_penalty": 2, "frequency_penalty": 2, "logprobs": 20},
        {"min_p": 0, "top_p": 1e-300, "presence_penalty": -2, "frequency_penalty": -2, "logprobs": 0, "seed": 0},
        {"repetition_penalty": 1e-6, "stop": ["x" * 1000] * 128, "stop_token_ids": [0] * 1024, "temperature": 0},
        {"repetition_penalty": 1e6, "min_tokens": 0, "top_k": 0},
    ],
)
def test_the_edges_are_taken(edge: dict[str, Any]) -> None:
    assert SamplingParams(**edge)


def test_a_stop_token_beyond_the_vocabulary_is_refused() -> None:
    assert Sampler(SamplingParams(stop_token_ids=4), (), (), 5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="stop_token_ids must be below the vocabulary size 5, not 5"):
        Sampler(SamplingParams(stop_token_ids=5), (), (), 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("unknown", [5, 5000, -1])
def test_an_end_of_text_that_the_model_does_not_have_forbids_nothing(unknown: int) -> None:
    sampler = Sampler(SamplingParams(temperature=0, min_tokens=1), (), (2, unknown), 5)
    assert sampler.distribution(np.array([0, 1, 9, 2, 3], np.float32), []).tolist() == [0, 0, 0, 0, 1]
