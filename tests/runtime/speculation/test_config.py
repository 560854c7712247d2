"""LlamaConfig: both spellings of transformers, every refusal by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftwood.models.config import LlamaConfig, RopeScaling
from draftwood.models.errors import CheckpointError
from draftwood.models.typed import typed

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def test_defaults_follow_llama1() -> None:
    config = LlamaConfig.from_hf(BASE)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 8, 10000.0)
    assert not config.tie_embeddings and config.rope_scaling is None


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "torch_dtype": "bfloat16"},
        {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}, "dtype": "bfloat16"},
    ],
)
def test_old_and_new_spelling_mean_the_same(spelling: dict[str, Any]) -> None:
    config = LlamaConfig.from_hf({**BASE, **spelling})
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert typed(LlamaConfig, json.loads(json.dumps(config.to_dict())), "model") == config


def test_linear_scaling_by_the_oldest_spelling() -> None:
    config = LlamaConfig.from_hf({**BASE, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert config.rope_scaling == RopeScaling("linear", 2.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": []}, "architecture none"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 33}, "head_dim"),
        ({"head_dim": 7}, "head_dim"),
        ({"vocab_size": "64"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ],
)
def test_what_is_unknown_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        LlamaConfig.from_hf({**BASE, **change})
