"""config.json of every family: defaults as in transformers, published files, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from families import read, reference, rope

from draftwood.models.config import LlamaConfig
from draftwood.models.errors import CheckpointError
from draftwood.models.families import FAMILIES, Variant
from draftwood.models.rope import rope_tables

OF_ANY_FILE: dict[str, Any] = {
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-05,
}
OF_QWEN = {"max_window_layers": 28, "use_sliding_window": False, "rope_theta": 1000000.0, "bos_token_id": 151643}
OF_PHI = {
    "_name_or_path": "Phi-3",
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "attention_bias": False,
}
OF_LONG_PHI = OF_PHI | {"rope_scaling": {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "type": "longrope"}}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_a_file_leaves_out_is_what_transformers_takes(architecture: str) -> None:
    found, expected = read(architecture), reference(architecture)
    assert FAMILIES[architecture].model_type == expected.model_type
    assert found.num_kv_heads == expected.num_key_value_heads
    assert found.head_dim == (getattr(expected, "head_dim", None) or 320 // 32)
    rope = expected.rope_parameters.get("full_attention", expected.rope_parameters)
    assert (found.norm_eps, found.rope_theta) == (expected.rms_norm_eps, rope["rope_theta"])
    assert found.tie_embeddings == expected.tie_word_embeddings
    assert found.attention_bias == getattr(expected, "attention_bias", False)
    variant = found.variant
    with_rope = getattr(expected, "no_rope_layers", [1] * 30)
    assert variant.layers_without_rope == tuple(index for index in range(30) if not with_rope[index])
    gemma = architecture == GEMMA
    assert (variant.qkv_bias, variant.qk_norm) == ("Qwen2" in architecture, gemma or "Qwen3" in architecture)
    assert variant.embedding_multiplier == (320**0.5 if gemma else getattr(expected, "embedding_multiplier", 1))
    assert variant.attention_multiplier == (1 / 16 if gemma else getattr(expected, "attention_multiplier", None))
    assert variant.local_theta == (1e4 if gemma else None)
    layers = getattr(expected, "layer_types", ["sliding_attention"] * 30)
    slides = getattr(expected, "sliding_window", None) is not None and "sliding_attention" in layers
    assert variant.window == (expected.sliding_window if slides else None)
    assert variant.full_layers == (full(layers) if slides else ())


def full(layers: list[str]) -> tuple[int, ...]:
    return tuple(index for index, kind in enumerate(layers) if kind == "full_attention")


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("MistralForCausalLM", {"sliding_window": 50}),
        ("MistralForCausalLM", {"sliding_window": None}),
        ("Phi3ForCausalLM", {"sliding_window": 50}),
        ("Qwen2ForCausalLM", {"sliding_window": 50, "use_sliding_window": False}),
        ("Qwen2ForCausalLM", {"sliding_window": 50, "use_sliding_window": True}),
        ("Qwen2ForCausalLM", {"sliding_window": 50, "use_sliding_window": True, "max_window_layers": 30}),
        ("Qwen3ForCausalLM", {"sliding_window": 50, "use_sliding_window": True, "max_window_layers": 0}),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "layer_types": ["full_attention"] * 30}),
        ("SmolLM3ForCausalLM", {"sliding_window": 50}),
        ("SmolLM3ForCausalLM", {"sliding_window": 50, "use_sliding_window": True}),
        ("SmolLM3ForCausalLM", {"sliding_window": 50, "use_sliding_window": True, "no_rope_layers": [1] * 30}),
        ("Gemma3ForCausalLM", {"sliding_window": 50, "sliding_window_pattern": 4}),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"] * 30}),
    ],
)
def test_a_window_counts_where_a_layer_slides(architecture: str, fields: dict[str, Any]) -> None:
    """And does not limit the context."""
    expected, found = reference(architecture, **fields), read(architecture, **fields)
    layers = getattr(expected, "layer_types", ["sliding_attention"])
    window = expected.sliding_window if "sliding_attention" in layers else None
    assert found.variant.window == window
    assert found.variant.full_layers == (() if window is None else full(layers))
    assert found.longest == 96


def test_settings_that_change_nothing_are_read_past() -> None:
    plain = read("LlamaForCausalLM")
    more: dict[str, Any] = {"_name_or_path": "x", "torch_dtype": "bfloat16", "pretraining_tp": 2, "model_type": "llama"}
    more |= {"temperature": 0.6, "rope_interleaved": False, "pruned_heads": {}, "some_factor": None}
    more |= {"partial_rotary_factor": 1.0, "layer_types": ["full_attention"] * 30, "attention_dropout": 0.1}
    assert read("LlamaForCausalLM", **more) == plain
    assert plain.variant == Variant() and plain.limits == {"context": 96}


GEMMA, NESTED = "Gemma3ForCausalLM", "rope_parameters"
FULL_ATTENTION = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}


def test_gemma_has_two_kinds_of_rotary_tables_in_either_spelling() -> None:
    older: dict[str, Any] = {"rope_theta": 5e5, "rope_local_base_freq": 500.0, "_sliding_window_pattern": 6}
    older |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    newer = {NESTED: {"full_attention": FULL_ATTENTION, "sliding_attention": {"rope_theta": 500.0}}}
    found = read(GEMMA, **newer)
    assert found == read(GEMMA, **older)
    assert found.rope_scaling is not None and found.variant.local_theta == 500.0
    (cosine, _), (local, _) = (rope_tables(found, 8, local) for local in (False, True))
    assert not np.allclose(cosine, local)
    plain = rope_tables(read("LlamaForCausalLM", head_dim=256, rope_theta=500.0), 8)[0]
    np.testing.assert_array_equal(local, plain)


SMOL, PHI, QWEN, GRANITE = "SmolLM3ForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "GraniteForCausalLM"
PARTIAL, LAYERS = "partial_rotary_factor", "no_rope_layers"


@pytest.mark.parametrize(
    ("architecture", "fields", "named"),
    [
        *(
            (name, {"hidden_act": "gelu"}, f"hidden_act 'gelu' is not supported; {name} uses '{family.activation}'")
            for name, family in FAMILIES.items()
        ),
        *((name, {"model_type": "bert"}, f"model_type 'bert' is not that of {name}") for name in FAMILIES),
        *((name, {"q_lora_rank": 8}, f"'q_lora_rank' is not a setting of {name}: remove it if") for name in FAMILIES),
        *((name, {"head_dim": 7}, "head_dim .7. is odd") for name in FAMILIES),
        *(
            (name, {PARTIAL: 0.5}, f"{PARTIAL} 0.5 is not supported for {name}; 1 is")
            for name in FAMILIES
            if name != PHI
        ),
        *(
            (name, {"layer_types": ["sliding_attention"] * 30}, "layer_types (must list full|has sliding_attention)")
            for name in FAMILIES
            if name != GEMMA
        ),
        ("MixtralForCausalLM", {}, f"'MixtralForCausalLM' is not supported; this project runs {', '.join(FAMILIES)}"),
        ("LlamaForCausalLM", {"sliding_window": 8}, "'sliding_window' is not a setting of Llama"),
        ("LlamaForCausalLM", {"logits_scaling": 8}, "'logits_scaling' is not a setting of Llama"),
        ("MistralForCausalLM", {"attention_bias": True}, "'attention_bias' is not a setting of Mistral"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window must be a positive integer"),
        ("MistralForCausalLM", {"layer_types": ["chunked_attention"] * 30}, "layer_types must list full_attention for"),
        (QWEN, {"layer_types": ["full_attention"]}, "layer_types must list full_attention or sliding_attention for"),
        (QWEN, {"max_window_layers": -1}, "max_window_layers must be a whole number, found -1"),
        (QWEN, {"use_sliding_window": 1}, "use_sliding_window must be true or false, found 1"),
        (QWEN, {"mrope_section": [1, 2]}, "'mrope_section' is not a setting of Qwen2"),
        (QWEN, rope("default", mrope_section=[1, 2]), "rope setting 'mrope_section' is not supported for 'default'"),
        (QWEN, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope setting 'full_attention' is not"),
        (QWEN, rope("proportional"), "scaling 'proportional' is not supported; 'default', 'linear', .*'longrope' are"),
        (QWEN, rope("dynamic", factor=2.0, alpha=1.0), "rope setting 'alpha' is not supported for 'dynamic'"),
        (QWEN, rope("yarn", factor=-1.0), "rope factor must be a positive number"),
        (QWEN, rope("yarn", factor=2.0, mscale=-40.0, mscale_all_dim=1.0), "rope mscale must be a positive number"),
        (QWEN, rope("yarn", factor=2.0, beta_fast="32"), "rope beta_fast must be a positive number"),
        (QWEN, rope("yarn", factor=2.0, truncate="no"), "truncate must be true or false"),
        (QWEN, rope("yarn", factor=2.0, rope_theta=1.0), "rope_theta must be larger than 1 for 'yarn'"),
        (QWEN, rope("longrope", short_factor=[1.0], long_factor=[1.0]), "rope short_factor must list 5 numbers"),
        (PHI, rope("longrope", short_factor=[1.0] * 5), "rope long_factor must list 5 numbers, one for each"),
        (PHI, rope("longrope", short_factor=[0.0] * 5, long_factor=[1.0] * 5), "rope short_factor must be a positive"),
        (PHI, rope("su", factor=2.0) | {"original_max_position_embeddings": 1}, "short_factor must list 5 numbers"),
        (
            PHI,
            rope("su", factor=2.0, short_factor=[1.0] * 5, long_factor=[1.0] * 5)
            | {"original_max_position_embeddings": 1},
            "original_max_position_embeddings must be at least 2 for 'longrope'",
        ),
        (PHI, {PARTIAL: 0.1}, f"{PARTIAL} 0.1 of head_dim 10 rotates 1 numbers"),
        (PHI, {PARTIAL: 0.5}, f"{PARTIAL} 0.5 of head_dim 10 rotates 5 numbers: rotary positions need pairs, at most"),
        (PHI, {PARTIAL: 1.5}, f"{PARTIAL} 1.5 of head_dim 10 rotates 15 numbers"),
        (PHI, {PARTIAL: "half"}, f"{PARTIAL} must be a positive number"),
        (PHI, {"full_attn_mod": 2}, "full_attn_mod 2 is not supported; 1 is"),
        (PHI, {"interpolate_factor": 2}, "interpolate_factor 2 is not supported; 1 is"),
        (PHI, {"lm_head_bias": True}, "'lm_head_bias' is not a setting of Phi3"),
        (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported; Gemma3ForCausalLM uses"),
        (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported; null is"),
        (GEMMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported; null is"),
        (GEMMA, {"use_bidirectional_attention": True}, "'use_bidirectional_attention' is not a setting of Gemma3"),
        (GEMMA, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number"),
        (GEMMA, {"rope_local_base_freq": -1}, "rope_local_base_freq must be a positive number"),
        (GEMMA, {"sliding_window_pattern": 0}, "sliding_window_pattern must be a positive integer"),
        (GEMMA, {NESTED: {"full_attention": FULL_ATTENTION, "linear": {}}}, "rope_parameters must have an object for"),
        (GEMMA, {NESTED: {"sliding_attention": FULL_ATTENTION}}, "rope scaling of sliding_attention, or beside"),
        (GEMMA, {NESTED: {"full_attention": {PARTIAL: 0.5}}}, f"{PARTIAL} 0.5 is not supported for {GEMMA}; 1 is"),
        (SMOL, {LAYERS: [1, 0]}, f"{LAYERS} must list a 1 or a 0 for each of 30 layers"),
        (SMOL, {LAYERS: [2] * 30}, f"{LAYERS} must list a 1 or a 0"),
        (SMOL, {LAYERS: "1" * 30}, f"{LAYERS} must list a 1 or a 0"),
        (SMOL, {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be a positive integer"),
        (GRANITE, {"logits_scaling": 0}, "logits_scaling must be a positive number"),
        (GRANITE, {"residual_multiplier": None}, "residual_multiplier must be a positive number"),
        (GRANITE, {"embedding_multiplier": "12"}, "embedding_multiplier must be a positive number"),
        (GRANITE, {"attention_multiplier": float("nan")}, "attention_multiplier must be a positive number"),
    ],
)
def test_what_would_change_the_computation_is_refused_by_name(
    architecture: str, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(architecture, **fields)


def sizes(*numbers: int) -> dict[str, int]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip((*names, "num_key_value_heads", "max_position_embeddings"), numbers, strict=True))


# Settings that published files of each family have, with their values.
PUBLISHED: dict[str, tuple[str, dict[str, Any], int, Variant]] = {
    "SmolLM2": (
        "LlamaForCausalLM",
        sizes(49152, 576, 1536, 30, 9, 3, 8192)
        | {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1, "transformers.js_config": {"a": 1}}
        | {"rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "attention_bias": False},
        8192,
        Variant(),
    ),
    "Mistral 7B v0.1": (
        "MistralForCausalLM",
        sizes(32000, 4096, 14336, 32, 32, 8, 32768) | {"sliding_window": 4096, "rope_theta": 10000.0},
        32768,
        Variant(window=4096),
    ),
    "Qwen2.5 7B with YaRN as its page says": (
        "Qwen2ForCausalLM",
        sizes(152064, 3584, 18944, 28, 28, 4, 32768)
        | OF_QWEN
        | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
        131072,
        Variant(qkv_bias=True),
    ),
    "Qwen3 0.6B": (
        "Qwen3ForCausalLM",
        sizes(151936, 1024, 3072, 28, 16, 8, 40960) | OF_QWEN | {"head_dim": 128, "sliding_window": None},
        40960,
        Variant(qk_norm=True),
    ),
    "SmolLM3": (
        "SmolLM3ForCausalLM",
        sizes(128256, 2048, 11008, 36, 16, 4, 65536)
        | {"layer_types": ["full_attention"] * 36, "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4}
        | {"max_window_layers": 28, "pretraining_tp": 2, "sliding_window": None, "use_sliding_window": False},
        65536,
        Variant(layers_without_rope=tuple(range(3, 36, 4))),
    ),
    "Granite 3.1 2B": (
        "GraniteForCausalLM",
        sizes(49155, 2048, 8192, 40, 32, 8, 131072)
        | {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
        | {"residual_multiplier": 0.22, "rope_theta": 5000000.0, "mlp_bias": False, "pad_token_id": 0},
        131072,
        Variant(
            embedding_multiplier=12.0, attention_multiplier=0.015625, residual_multiplier=0.22, logits_multiplier=0.125
        ),
    ),
    "Phi-3 mini, 128k": (
        "Phi3ForCausalLM",
        sizes(32064, 3072, 8192, 32, 32, 32, 131072) | OF_LONG_PHI | {"sliding_window": 262144},
        4096,
        Variant(window=262144),
    ),
    "Phi-4 mini": (
        "Phi3ForCausalLM",
        sizes(200064, 3072, 8192, 32, 24, 8, 131072)
        | OF_LONG_PHI
        | {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}
        | {"partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": True},
        4096,
        Variant(rotary_size=96, window=262144),
    ),
    "Gemma 3 1B": (
        "Gemma3ForCausalLM",
        sizes(262144, 1152, 6912, 26, 4, 1, 32768)
        | {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 256}
        | {"rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512}
        | {"sliding_window_pattern": 6, "hidden_act": "gelu_pytorch_tanh"},
        32768,
        Variant(
            qk_norm=True,
            embedding_multiplier=1152**0.5,
            attention_multiplier=1 / 16,
            window=512,
            full_layers=(5, 11, 17, 23),
            local_theta=10000.0,
            output_norms=True,
            gelu=True,
        ),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name: str) -> None:
    architecture, fields, longest, variant = PUBLISHED[name]
    config = LlamaConfig.from_hf(OF_ANY_FILE | fields | {"architectures": [architecture]})
    assert (config.longest, config.variant) == (longest, variant)
