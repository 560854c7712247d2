"""Configurations of strangers: refused by the right error, or what follows from them can be computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.models.config import LlamaConfig
from draftwood.models.errors import CheckpointError
from draftwood.models.families import MULTIPLIERS
from draftwood.models.fields import MOST
from draftwood.models.rope import rope_tables
from draftwood.runtime.bundle.checks import check_model

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 10**9, 2**31, 2**63, 10**300, -(10**300)),
    *(0.0, 0.5, -1.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", "8", "1e9", "\x1b[2J", "x" * 100_000, [], {}, [1], [[]], [None], {"a": 1}),
)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias")
LLAMA: dict[str, Any] = {
    **SIZES,
    **dict.fromkeys(SWITCHES, False),
    **dict.fromkeys(("sliding_window", "quantization_config")),
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": LLAMA3,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
QWEN2 = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1, "layer_types": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": {"sliding_window": 64, "layer_types": None},
    "Qwen2ForCausalLM": QWEN2 | {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {"layer_types": ["full_attention"] * 2, "attention_bias": True},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2, "mlp_bias": True},
    "GraniteForCausalLM": dict.fromkeys(MULTIPLIERS, 2.0),
    "Phi3ForCausalLM": {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 64, "full_attn_mod": 1},
    "Gemma3ForCausalLM": {"sliding_window": 64, "sliding_window_pattern": 2, "rope_local_base_freq": 500.0}
    | {"query_pre_attn_scalar": 8.0, "layer_types": None, "final_logit_softcapping": None},
}
SCALED = {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.2, "rope_theta": 1e4}
YARN = dict.fromkeys(("beta_slow", "mscale"), 1.0) | {"beta_fast": 32.0, "mscale_all_dim": 0.5, "truncate": True}
LISTED: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0]}
SCALINGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": LLAMA3,
    "Qwen2ForCausalLM": SCALED | YARN | {"rope_type": "yarn"},
    "Phi3ForCausalLM": SCALED | LISTED | {"partial_rotary_factor": 0.5},
}


def right(architecture: str, **changes: Any) -> dict[str, Any]:
    return {**SIZES, "architectures": [architecture], **FAMILIES[architecture], **changes}


def accepted(content: dict[str, Any]) -> bool:
    """Whether a configuration is taken: then what is computed from it can be. Else it is refused in one short line."""
    try:
        config = LlamaConfig.from_hf(content)
    except CheckpointError as error:
        assert str(error).startswith("config.json: ") and len(str(error)) < 400 and "\n" not in str(error)
        return False
    counts = (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads)
    for count in (*counts, config.num_kv_heads, config.head_dim, config.max_position):
        assert type(count) is int and 0 < count <= max(MOST.values())
    variant = config.variant
    multipliers = (variant.embedding_multiplier, variant.residual_multiplier, variant.logits_multiplier)
    assert all(1e-30 <= number <= 1e30 for number in (config.norm_eps, config.rope_theta, *multipliers))
    assert all(type(token) is int and token >= -1 for token in config.eos_token_ids)
    assert config.bos_token_id is None or type(config.bos_token_id) is int
    assert all(type(getattr(config, name)) is bool for name in ("tie_embeddings", "attention_bias", "mlp_bias"))
    assert config.longest >= 1 and set(variant.layers_without_rope) <= set(range(config.num_layers))
    assert 2 <= config.rotary_size <= config.head_dim and config.rotary_size % 2 == 0
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "llama3":
        assert scaling.original_max_position <= MOST["original_max_position_embeddings"]
        assert 0 < scaling.low_freq_factor < scaling.high_freq_factor <= 1e30 and 0 < scaling.factor <= 1e30
    if {**content, **SIZES} == content:
        assert all(np.isfinite(table).all() for table in rope_tables(config, 3))
        check_model("target", replace(config, norm_eps=1e-5))
    return True


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_hostile_setting_is_refused_or_harmless(architecture: str, value: Any) -> None:
    for field in FAMILIES[architecture]:
        accepted(right(architecture, **{field: value}))


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("architecture", SCALINGS)
def test_a_hostile_field_of_a_scaling_is_refused_or_harmless(architecture: str, value: Any) -> None:
    for field in SCALINGS[architecture]:
        changed = {**SCALINGS[architecture], field: value}
        for more in ({}, {"short_factor": [value] * 2}, {"attention_factor": None, "mscale": value}):
            accepted(right(architecture, rope_scaling={**changed, **more}))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_is_right_is_taken(architecture: str) -> None:
    scaling = {"rope_scaling": SCALINGS[architecture]} if architecture in SCALINGS else {}
    assert accepted(right(architecture)) and accepted(right(architecture, **scaling))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(architecture=st.sampled_from([*FAMILIES]), data=st.data())
def test_no_configuration_ends_in_a_traceback(architecture: str, data: st.DataObject) -> None:
    names = st.sampled_from([*right(architecture), "rope_parameters"]) | st.text(max_size=5)
    accepted(right(architecture, **data.draw(st.dictionaries(names, json_values, max_size=4))))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *(({name: most + 1}, f"{name} must be a positive integer of at most {most}") for name, most in MOST.items()),
        *(({name: 10**9}, f"{name} must be a positive integer") for name in MOST if "position" not in name),
        *(({name: "yes"}, f"{name} must be true or false, found 'yes'") for name in SWITCHES),
        ({"rope_scaling": "llama3"}, "rope_scaling must be an object or null, found 'llama3'"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object or null, found a list"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id, or a list of at most 1024 of them, found '2'"),
        *(({"eos_token_id": ids}, "eos_token_id must be a token id") for ids in ([2.0], [True], [2] * 1025)),
        ({"bos_token_id": [1, 2]}, "bos_token_id must be a token id"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a positive number from 1e-30 to 1e"),
        ({"rope_theta": 10**300}, "rope_theta must be a positive number .* found an integer of 997 bits"),
        ({"architectures": "LlamaForCausalLM"}, "architecture none is not supported"),
        ({"hidden_act": ["silu"]}, "hidden_act a list is not supported"),
    ],
)
def test_what_a_configuration_may_ask_for(change: dict[str, Any], named: str) -> None:
    if "original_max_position_embeddings" in change:
        change = {**change, "rope_scaling": {**LLAMA3, **change}}
    with pytest.raises(CheckpointError, match=named):
        LlamaConfig.from_hf({**LLAMA, **change})


def test_a_checkpoint_without_an_end_token_may_say_so() -> None:
    for value in (-1, [-1], None, []):
        config = LlamaConfig.from_hf({**LLAMA, "eos_token_id": value, "bos_token_id": -1})
        assert config.eos_token_ids in ((), (-1,)) and config.bos_token_id is None
