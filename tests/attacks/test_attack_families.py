"""Settings of every family, from strangers: refused by the right error, or what follows from them can be computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.models.config import LlamaConfig
from draftwood.models.families import MULTIPLIERS
from draftwood.models.rope import rope_tables
from draftwood.runtime.bundle.checks import check_model
from tests.attacks.test_attack_checkpoint import HOSTILE, RIGHT, accepted, json_values

SIZES = {
    name: RIGHT[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
}
SIZES |= {name: RIGHT[name] for name in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")}
QWEN2 = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1, "layer_types": None}
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": 64, "layer_types": None},
    "Qwen2ForCausalLM": QWEN2 | {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {"layer_types": ["full_attention"] * 2, "attention_bias": True},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2, "mlp_bias": True},
    "GraniteForCausalLM": dict.fromkeys(MULTIPLIERS, 2.0),
    "Phi3ForCausalLM": {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 64, "full_attn_mod": 1},
}
SCALED = {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.2, "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "truncate": True,
}
LISTED: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0]}
SCALINGS = {"Qwen2ForCausalLM": SCALED | YARN, "Phi3ForCausalLM": SCALED | LISTED | {"partial_rotary_factor": 0.5}}


def harmless(config: LlamaConfig) -> None:
    """Everything that is computed from a family's settings can be computed."""
    variant = config.variant
    assert config.longest >= 1 and set(variant.layers_without_rope) <= set(range(config.num_layers))
    assert 2 <= config.rotary_size <= config.head_dim and config.rotary_size % 2 == 0
    for number in (variant.embedding_multiplier, variant.residual_multiplier, variant.logits_multiplier):
        assert 1e-30 <= number <= 1e30
    assert all(np.isfinite(table).all() for table in rope_tables(config, 3))
    check_model("target", replace(config, norm_eps=1e-5))


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("architecture", FAMILY_SETTINGS)
def test_a_hostile_setting_of_a_family_is_refused_or_harmless(architecture: str, value: Any) -> None:
    right = {**SIZES, "architectures": [architecture], **FAMILY_SETTINGS[architecture]}
    whole = accepted(right)
    assert whole is not None
    harmless(whole)
    for field in FAMILY_SETTINGS[architecture]:
        if (config := accepted({**right, field: value})) is not None:
            harmless(config)


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("architecture", SCALINGS)
def test_a_hostile_field_of_a_scaling_is_refused_or_harmless(architecture: str, value: Any) -> None:
    right = {**SIZES, "architectures": [architecture], "rope_scaling": SCALINGS[architecture]}
    assert accepted(right) is not None
    for field in SCALINGS[architecture]:
        changed = {**SCALINGS[architecture], field: value}
        for more in ({}, {"short_factor": [value] * 2}, {"attention_factor": None, "mscale": value}):
            config = accepted({**right, "rope_scaling": {**changed, **more}})
            if config is not None:
                harmless(config)


@given(architecture=st.sampled_from([*FAMILY_SETTINGS]), data=st.data())
def test_no_family_s_configuration_does(architecture: str, data: st.DataObject) -> None:
    right = {**SIZES, "architectures": [architecture], **FAMILY_SETTINGS[architecture]}
    names = st.sampled_from([*right, "rope_parameters"]) | st.text(max_size=5)
    accepted({**right, **data.draw(st.dictionaries(names, json_values, max_size=4))})
