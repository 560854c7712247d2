"""Converts the metadata of a GGUF file into the content of a config.json, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ....models.errors import CheckpointError, shown
from ....models.rope_scaling import LINEAR, LONGROPE, ORIGINAL, YARN
from .header import AGAIN, Metadata, Tensor

EMBEDDING, HEAD = "token_embd", "output"
OUTSIDE = {EMBEDDING: "model.embed_tokens", "output_norm": "model.norm", HEAD: "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMED = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
LAYERS_OF_27B = 62  # of Gemma 3
NO_ROPE_INTERVAL = 4  # every fourth layer of SmolLM3 has no RoPE: a constant of llama.cpp, not in GGUF files
ROPE_FREQS = "rope_freqs.weight"  # a divisor for each pair's frequency: how llama.cpp stores llama3 scaling
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
BY_LENGTH = {LONG_FACTORS: "long_factor", SHORT_FACTORS: "short_factor"}
FACTORS = (ROPE_FREQS, LONG_FACTORS, SHORT_FACTORS)  # tensors that are settings in a config.json
NONE = "none"  # GGUF's name of no scaling
ORIGINAL_LENGTH = "scaling.original_context_length"
OF_YARN = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


class Family(NamedTuple):
    """How GGUF files store one architecture."""

    name: str  # Hugging Face's
    permuted: bool = False  # the rows of queries and keys, see `unpermuted`
    layer: Mapping[str, str] = LAYER  # Hugging Face's modules of a layer, by GGUF's names
    scales: Mapping[str, str] = {}  # Hugging Face's names of further settings that are numbers, by GGUF's


FAMILIES = {
    "llama": Family("LlamaForCausalLM", permuted=True),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM", layer=LAYER | NORMED),
    "phi3": Family("Phi3ForCausalLM", layer=LAYER | FUSED),
    "smollm3": Family("SmolLM3ForCausalLM", permuted=True),
    "granite": Family(
        "GraniteForCausalLM",
        permuted=True,
        scales={
            "embedding_scale": "embedding_multiplier",
            "attention.scale": "attention_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "gemma3": Family(  # whose norms' weights have 1 added in the file
        "Gemma3ForCausalLM",
        layer=LAYER | NORMED | SANDWICH,
        scales={
            "rope.freq_base_swa": "rope_local_base_freq",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
}
BIASES_FOLLOW = ("qwen2",)  # architectures that always have the same biases


def hugging_face_names(metadata: Metadata, family: Family, layers: int, names: Iterable[str]) -> dict[str, str]:
    """GGUF's tensor names by Hugging Face's. Raises CheckpointError for a module that the family has not."""
    found = {}
    for name in names:
        if name in FACTORS:
            continue
        stem, _, part = name.rpartition(".")
        module = OUTSIDE.get(stem)
        if stem.startswith("blk.") and stem.count(".") == 2:
            _, number, stem = stem.split(".")
            inner = family.layer.get(stem)
            if inner is not None and number in map(str, range(layers)):
                module = f"model.layers.{number}.{inner}"
        if module is None or part not in ("weight", "bias"):
            raise unused_tensor(metadata, family, name)
        found[f"{module}.{part}"] = name
    return found


def unused_tensor(metadata: Metadata, family: Family, name: str) -> CheckpointError:
    return CheckpointError(
        f"{metadata.file}: {family.name} has no tensor {shown(name)}, and computing without it would give another "
        "model: use the model's Hugging Face folder"
    )


def has_bias(family: Family, part: str, tensors: Iterable[str]) -> bool:
    modules = family.layer.items()
    ends = tuple(f".{stem}.bias" for stem, module in modules if module.startswith(part) and module.endswith("_proj"))
    return any(name.endswith(ends) for name in tensors)


def config_of(metadata: Metadata, tensors: Mapping[str, Tensor], factors: dict[str, Any]) -> dict[str, Any]:
    """The content that the model's config.json would have. factors: those arrays of FACTORS that the file has. Raises
    CheckpointError for a setting that is missing, or that is not known and could change what the model computes."""
    architecture = metadata.need("general.architecture", str)
    kind = metadata.get("general.type", str)
    if kind not in (None, "model"):
        raise CheckpointError(f"{metadata.file} holds no model, but {shown(kind)}: give the path of the model's file")
    family = FAMILIES.get(architecture)
    if family is None:
        return {"architectures": [architecture]}  # LlamaConfig.from_hf refuses it and lists those that are supported
    embedding = tensors.get(f"{EMBEDDING}.weight")
    if embedding is None:
        raise CheckpointError(f"{metadata.file}: it has no tensor {EMBEDDING}.weight; {AGAIN}")
    prefix = f"{architecture}."
    hidden, heads = (metadata.need(prefix + key, int) for key in ("embedding_length", "attention.head_count"))
    head_dim = metadata.get(f"{prefix}attention.key_length", int)
    if head_dim is None:
        head_dim = hidden // max(heads, 1)
    if metadata.get(f"{prefix}attention.value_length", int) not in (None, head_dim):
        raise CheckpointError(f"{metadata.file}: keys and values of different lengths are not supported")
    vocabulary = metadata.get(f"{prefix}vocab_size", int)
    key_value_heads = metadata.get(f"{prefix}attention.head_count_kv", int)
    config: dict[str, Any] = {
        "architectures": [family.name],
        "vocab_size": embedding.shape[0] if vocabulary is None else vocabulary,
        "hidden_size": hidden,
        "intermediate_size": metadata.need(f"{prefix}feed_forward_length", int),
        "num_hidden_layers": metadata.need(f"{prefix}block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if key_value_heads is None else key_value_heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.need(f"{prefix}context_length", int),
        "rms_norm_eps": metadata.need(f"{prefix}attention.layer_norm_rms_epsilon", float),
        "rope_parameters": rope_parameters(metadata, architecture, factors),
        "tie_word_embeddings": f"{HEAD}.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id", int),
    }
    if architecture not in BIASES_FOLLOW:
        config["attention_bias"] = has_bias(family, "self_attn.", tensors)
        config["mlp_bias"] = has_bias(family, "mlp.", tensors)
    config |= further_settings(metadata, architecture, family, config)
    for key in metadata.unread(prefix):
        if key != f"{prefix}tensor_data_layout":
            raise CheckpointError(
                f"{metadata.file}: the setting {shown(key)} is not known, and ignoring it could give another model: "
                "use the model's Hugging Face folder"
            )
    return config


def further_settings(
    metadata: Metadata, architecture: str, family: Family, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of config.json that only some models have. Raises CheckpointError."""
    prefix, more = f"{architecture}.", dict[str, Any]()
    rotated = metadata.get(f"{prefix}rope.dimension_count", int)
    if rotated not in (None, config["head_dim"]):
        assert rotated is not None
        more["partial_rotary_factor"] = rotated / config["head_dim"] if config["head_dim"] else 0.0
        if architecture != "phi3":
            raise CheckpointError(
                f"{metadata.file}: {prefix}rope.dimension_count is {rotated} of {config['head_dim']}: {family.name} "
                "rotates whole heads"
            )
    for key in ("expert_count", "expert_used_count"):
        if metadata.get(prefix + key, int):
            raise CheckpointError(f"{metadata.file}: mixtures of experts are not supported; choose a dense model")
    if architecture == "granite" and metadata.get(f"{prefix}rope.scaling.finetuned", bool) is False:
        raise CheckpointError(
            f"{metadata.file}: Granite without rotary positions is not supported; choose another model"
        )
    window = metadata.get(f"{prefix}attention.sliding_window", int) or None
    if window or architecture == "gemma3":  # whose folders have a default
        more["sliding_window"] = window
    if architecture == "phi3":
        more["original_max_position_embeddings"] = metadata.get(f"{prefix}rope.{ORIGINAL_LENGTH}", int)
    if architecture == "smollm3":
        layers = range(1, config["num_hidden_layers"] + 1 if config["num_hidden_layers"] <= 1024 else 1)
        more |= {
            "no_rope_layer_interval": NO_ROPE_INTERVAL,
            "no_rope_layers": [int(layer % NO_ROPE_INTERVAL != 0) for layer in layers],
        }
    if architecture == "gemma3":
        # A constant of llama.cpp: of the model of 27B alone, the number is not that of a head.
        large = config["num_hidden_layers"] == LAYERS_OF_27B
        more["query_pre_attn_scalar"] = (
            config["hidden_size"] / config["num_attention_heads"] if large else config["head_dim"]
        )
    for key, name in family.scales.items():
        value = metadata.get(prefix + key, float)
        if value is not None:
            more[name] = value
    return more


def unpermuted(array: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Bring the rows of queries or keys (or the numbers of their bias) into Hugging Face's order. RoPE rotates pairs of
    rows. The two rows of a pair are adjacent in GGUF's order for `llama`, and half a head apart in Hugging Face's."""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def rope_parameters(metadata: Metadata, architecture: str, factors: dict[str, Any]) -> dict[str, Any]:
    """The `rope_parameters` that config.json would have. factors: those arrays of ROPE_FREQS, LONG_FACTORS and
    SHORT_FACTORS that the file has. Raises CheckpointError."""
    prefix = f"{architecture}.rope."
    theta = metadata.get(f"{prefix}freq_base", float)
    theta = 10000.0 if theta is None else theta
    parameters: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    kind, factor = scaling_of(metadata, prefix)
    original = metadata.get(f"{prefix}{ORIGINAL_LENGTH}", int)
    scaled = {} if original is None else {ORIGINAL: original}
    metadata.get(f"{prefix}scaling.finetuned", bool)  # known, and without effect here
    if factors:
        check_alone(metadata, factors, kind, factor)
    if ROPE_FREQS in factors:
        # The divisors that llama3's rule gave. longrope divides each pair's frequency by a number of its own, too.
        divisors, context = factors[ROPE_FREQS].tolist(), metadata.need(f"{architecture}.context_length", int)
        both = {"short_factor": divisors, "long_factor": divisors, ORIGINAL: context}
        return parameters | both | {"rope_type": LONGROPE, "attention_factor": 1.0}
    if factors:
        for name, key in BY_LENGTH.items():
            parameters[key] = factors[name].tolist() if name in factors else None
        parameters["attention_factor"] = metadata.get(f"{prefix}scaling.attn_factor", float)
        return parameters | scaled | {"rope_type": LONGROPE}
    if kind == NONE:
        return parameters
    parameters |= {"rope_type": kind, "factor": factor}
    if kind == YARN:
        parameters |= scaled
        for name, key in OF_YARN.items():
            value = metadata.get(f"{prefix}scaling.{name}", float)
            if value is not None:
                parameters[key] = value
    return parameters


def scaling_of(metadata: Metadata, prefix: str) -> tuple[str, float]:
    """Kind and factor of the scaling that the metadata describes, by llama.cpp's rules: without a name the kind is
    linear, an absent factor and 0 mean 1, and linear scaling by 1 is none. Raises CheckpointError."""
    kind = metadata.get(f"{prefix}scaling.type", str) or LINEAR
    factor = metadata.get(f"{prefix}scaling.factor", float)
    older = metadata.get(f"{prefix}scale_linear", float)  # the key of older files
    factor = (older if factor is None else factor) or 1.0
    return (NONE, 1.0) if kind == NONE or (kind, factor) == (LINEAR, 1.0) else (kind, factor)


def check_alone(metadata: Metadata, factors: dict[str, Any], kind: str, factor: float) -> None:
    """Raises CheckpointError if a file has another scaling beside that of its tensors: llama.cpp computes both."""
    name, *more = factors
    if name == ROPE_FREQS and more:
        other = more[0]
    elif factor != 1 or kind not in (NONE, LONGROPE if name in BY_LENGTH else NONE):
        other = f"rope scaling {shown(kind)} by {factor:g}"
    else:
        return
    raise CheckpointError(f"{metadata.file}: it has both {name} and {other}; {AGAIN}")
