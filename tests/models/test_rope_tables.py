"""Rotary tables of every kind of scaling, compared with those of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import read, reference, rope
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from draftwood.models.config import LlamaConfig
from draftwood.models.rope import rope_tables


@pytest.mark.parametrize(
    "scaling",
    [
        rope("linear", factor=3.0),
        rope("dynamic", factor=3.0),
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=3.0, original_max_position_embeddings=40),
        rope("yarn", factor=4.0),
        rope("yarn", factor=4.0, original_max_position_embeddings=24),
        rope("yarn", factor=None, original_max_position_embeddings=24),
        rope("yarn", factor=0.5),
        rope("yarn", factor=40.0, mscale=0.7, mscale_all_dim=1.3, original_max_position_embeddings=30),
        rope("yarn", factor=4.0, mscale=0.7, original_max_position_embeddings=30),
        rope("yarn", factor=4.0, attention_factor=1.7, beta_fast=5.0, beta_slow=0.5),
        rope("yarn", factor=4.0, truncate=False, beta_fast=7.0, original_max_position_embeddings=64),
        rope("yarn", factor=4.0, beta_fast=1.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=1),
        rope("yarn", factor=4.0) | {"original_max_position_embeddings": 48},
        {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 300.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rope_theta": 400.0},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_rotary_tables_are_transformers(scaling: dict[str, Any]) -> None:
    expected = LlamaRotaryEmbedding(reference("LlamaForCausalLM", **scaling))
    assert_same_tables(read("LlamaForCausalLM", **scaling), expected, 96)


LISTED: dict[str, Any] = {"short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [4.0, 5.0, 6.0, 8.0]}


@pytest.mark.parametrize(
    "scaling",
    [
        rope("default", partial_rotary_factor=0.4),
        {"partial_rotary_factor": 0.4, "rope_theta": 300.0},
        rope("longrope", partial_rotary_factor=0.8, **LISTED),
        rope("longrope", partial_rotary_factor=0.8, factor=3.0, **LISTED) | {"original_max_position_embeddings": 80},
        rope("su", partial_rotary_factor=0.8, attention_factor=1.3, original_max_position_embeddings=24, **LISTED),
        rope("yarn", partial_rotary_factor=0.8, original_max_position_embeddings=7, **LISTED)
        | {"original_max_position_embeddings": 60},
    ],
)
def test_rotary_tables_of_phi_3(scaling: dict[str, Any]) -> None:
    """Its `su` and `yarn` are longrope, and the original context beside the object goes first."""
    config = read("Phi3ForCausalLM", **scaling)
    expected = Phi3RotaryEmbedding(reference("Phi3ForCausalLM", **scaling))
    assert config.rotary_size < config.head_dim
    assert_same_tables(config, expected, config.longest)
    scaled = config.rope_scaling
    limit = None if scaled is None else scaling.get("original_max_position_embeddings", 4096)
    assert config.limits.get("context before longrope") == limit


def assert_same_tables(config: LlamaConfig, expected: Any, positions: int) -> None:
    cosine, sine = expected(torch.zeros(1), torch.arange(positions)[None])
    pairs = cosine.shape[-1] // 2
    for found, table in zip(rope_tables(config, positions), (cosine, sine), strict=True):
        np.testing.assert_allclose(found, table[0, :, :pairs].numpy(), atol=2e-5, rtol=0)


def test_yarn_s_context_is_the_one_behind_it() -> None:
    """Qwen2.5's files name the context before it, others the one after it; linear scaling's name the whole one."""
    for fields, longest in (
        (rope("yarn", factor=4.0), 384),
        (rope("yarn", factor=4.0, original_max_position_embeddings=24), 96),
        (rope("yarn", factor=2.0, original_max_position_embeddings=24), 96),
        (rope("linear", factor=4.0), 96),
        (rope("dynamic", factor=4.0), 96),
    ):
        assert read("Qwen2ForCausalLM", **fields).longest == longest
