"""The settings of published config.json files of each family, read as they are published."""

from __future__ import annotations

from typing import Any

import pytest

from draftwood.models.config import LlamaConfig
from draftwood.models.families import Variant

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


def sizes(
    vocabulary: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, context: int
) -> dict[str, int]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
    }


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
        4096,
        Variant(window=4096),
    ),
    "Mistral 7B v0.3": (
        "MistralForCausalLM",
        sizes(32768, 4096, 14336, 32, 32, 8, 32768) | {"sliding_window": None, "rope_theta": 1000000.0},
        32768,
        Variant(),
    ),
    "Qwen2.5 7B": (
        "Qwen2ForCausalLM",
        sizes(152064, 3584, 18944, 28, 28, 4, 32768) | OF_QWEN | {"sliding_window": 131072, "use_mrope": False},
        32768,
        Variant(qkv_bias=True),
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
    "Phi-3 mini, 4k": (
        "Phi3ForCausalLM",
        sizes(32064, 3072, 8192, 32, 32, 32, 4096) | OF_PHI | {"sliding_window": 2047, "rope_scaling": None},
        2047,
        Variant(window=2047),
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
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name: str) -> None:
    architecture, fields, longest, variant = PUBLISHED[name]
    config = LlamaConfig.from_hf(OF_ANY_FILE | fields | {"architectures": [architecture]})
    assert (config.longest, config.variant) == (longest, variant)
