"""What SamplingParams takes, what it refuses by name, and ends of text that a model does not have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draftwood.models.errors import RequestError
from draftwood.runtime.sampling import Sampler, SamplingParams


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
    ],
)
def test_values_of_another_type_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"stop": None, "stop_token_ids": None, "logits_processors": None}, {}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "yz"], "stop_token_ids": [3, 4]}, {"stop": ("x", "yz"), "stop_token_ids": (3, 4)}),
        ({"stop_token_ids": np.array([3]), "seed": np.int64(2)}, {"stop_token_ids": (3,), "seed": 2}),
        ({"temperature": np.float32(0.5), "max_tokens": np.int32(9)}, {"temperature": 0.5, "max_tokens": 9}),
        ({"temperature": 1}, {}),
    ],
)
def test_what_vllm_takes_is_taken(settings: dict[str, Any], same: dict[str, Any]) -> None:
    assert SamplingParams(**settings) == SamplingParams(**same)


@pytest.mark.parametrize("unknown", [5, 5000, -1])
def test_an_end_of_text_that_the_model_does_not_have_forbids_nothing(unknown: int) -> None:
    sampler = Sampler(SamplingParams(temperature=0, min_tokens=1), (), (2, unknown), 5)
    assert sampler.distribution(np.array([0, 1, 9, 2, 3], np.float32), []).tolist() == [0, 0, 0, 0, 1]
