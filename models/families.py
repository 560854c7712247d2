"""Families of models: how the config.json of each architecture differs from a LLaMA's, as transformers reads it.

FAMILIES lists the architectures. A setting that is neither in COMMON, nor in IGNORED, nor in the list of its family
might change what the model computes. It is refused unless it is off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import NamedTuple

from .errors import CheckpointError
from .fields import MOST, Settings, brief, positive_int, positive_number, switch
from .rope_scaling import LONGROPE, ORIGINAL, PARTIAL, YARN, rope_settings

SLIDING, FULL = "sliding_attention", "full_attention"
NONE: Settings = MappingProxyType({})
BIASES = ("attention_bias", "mlp_bias")
WINDOW = "sliding_window"
ACTIVATIONS = {"hidden_act", "hidden_activation"}
WINDOWED = (WINDOW, "use_sliding_window", "max_window_layers")
COMMON = {
    *("architectures", "model_type", *MOST, "hidden_act", "rms_norm_eps", "tie_word_embeddings", "layer_types"),
    *("rope_theta", "rope_scaling", "rope_parameters", PARTIAL, "bos_token_id", "eos_token_id", "quantization_config"),
}
# Settings that do not change what a model computes: of training, of generation, and of the file itself.
IGNORED = {
    *("attention_dropout", "embd_pdrop", "gradient_checkpointing", "hidden_dropout", "initializer_range"),
    *("pretraining_tp", "resid_pdrop", "unsloth_fixed", "unsloth_version"),
    *("auto_map", "dtype", "generation_config", "id2label", "is_llama_config", "label2id", "license", "name_or_path"),
    *("problem_type", "task_specific_params", "tokenizer_class", "torch_dtype", "transformers.js_config"),
    "transformers_version",
    *("begin_suppress_tokens", "chunk_size_feed_forward", "decoder_start_token_id", "do_sample", "diversity_penalty"),
    *("early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id"),
    *("forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size"),
    *("num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states"),
    *("output_scores", "pad_token_id", "repetition_penalty", "return_dict", "return_dict_in_generate"),
    *("sep_token_id", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p", "unk_token_id", "use_cache"),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """What a family adds to LLaMA's layer (models/layers.py). The defaults add nothing."""

    qkv_bias: bool = False  # a bias on queries, keys and values only, as in Qwen2.5
    qk_norm: bool = False  # an RMSNorm of each head's queries and keys, as in Qwen3
    layers_without_rope: tuple[int, ...] = ()  # indices of layers, as in SmolLM3
    rotary_size: int | None = None  # numbers of a head that RoPE rotates, as in Phi-4-mini; None: all
    embedding_multiplier: float = 1.0  # all four multipliers as in Granite
    attention_multiplier: float | None = None  # of queries times keys; None: 1 / sqrt(head_dim)
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    window: int | None = None  # tokens that attention reaches back, itself included, as in Mistral
    full_layers: tuple[int, ...] = ()  # indices of layers that see everything beside the window, as in Gemma 3
    local_theta: float | None = None  # base of the rotary frequencies of layers with the window, as in Gemma 3
    output_norms: bool = False  # an RMSNorm of what attention and the MLP add to a row, as in Gemma 3
    gelu: bool = False  # GELU, of the kind with tanh, in place of SiLU, as in Gemma 3

    @property
    def differences(self) -> tuple[str, ...]:
        """Names of the fields that differ from a LLaMA's."""
        return tuple(field.name for field in fields(self) if getattr(self, field.name) != field.default)


class Family(NamedTuple):
    model_type: str
    variant: Callable[[Settings, int, int], Variant]  # of the settings, the number of layers and head_dim
    settings: tuple[str, ...] = ()  # names of settings besides COMMON
    defaults: Settings = NONE  # of settings that a file may leave out, where they differ from LLaMA's
    rope_kinds: Settings = NONE  # kinds of rope scaling, by the other names that this family has for them
    activation: str = "silu"
    slides: bool = False  # whether `layer_types` says which layers have the window
    adds_one: bool = False  # a norm multiplies by 1 + its tensor


def llama(settings: Settings, layers: int, head_dim: int) -> Variant:
    return Variant()


def mistral(settings: Settings, layers: int, head_dim: int) -> Variant:
    return Variant(window=window_of(settings))


def qwen2(settings: Settings, layers: int, head_dim: int) -> Variant:
    return qwen_window(Variant(qkv_bias=True), settings, layers)


def qwen3(settings: Settings, layers: int, head_dim: int) -> Variant:
    return qwen_window(Variant(qk_norm=True), settings, layers)


def smollm3(settings: Settings, layers: int, head_dim: int) -> Variant:
    listed = settings.get("no_rope_layers")  # 1 for a layer that has RoPE
    if listed is None:
        interval = positive_int(settings, "no_rope_layer_interval", MOST["num_hidden_layers"] + 1)
        listed = [int((index + 1) % interval != 0) for index in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or any(each not in (0, 1) for each in listed):
        raise CheckpointError(
            f"config.json: no_rope_layers must list a 1 or a 0 for each of {layers} layers, found {brief(listed)}"
        )
    without = tuple(index for index in range(layers) if not listed[index])
    derived = [SLIDING if index in without else FULL for index in range(layers)]
    return switched_window(Variant(layers_without_rope=without), settings, derived)


def granite(settings: Settings, layers: int, head_dim: int) -> Variant:
    def multiplier(name: str) -> float:
        return positive_number(name, settings.get(name))

    return Variant(
        embedding_multiplier=multiplier("embedding_multiplier"),
        attention_multiplier=multiplier("attention_multiplier"),
        residual_multiplier=multiplier("residual_multiplier"),
        logits_multiplier=1 / multiplier("logits_scaling"),
    )


def phi3(settings: Settings, layers: int, head_dim: int) -> Variant:
    for name in ("full_attn_mod", "interpolate_factor"):
        if settings.get(name, 1) != 1:
            raise CheckpointError(f"config.json: {name} {brief(settings[name])} is not supported; 1 is")
    partial = positive_number(PARTIAL, rope_settings(settings).get(PARTIAL, settings.get(PARTIAL, 1.0)))
    size = int(head_dim * min(partial, 2.0))
    if not 2 <= size <= head_dim or size % 2:
        raise CheckpointError(
            f"config.json: {PARTIAL} {partial:g} of head_dim {head_dim} rotates {size} numbers: rotary positions need "
            f"pairs, at most {head_dim // 2} of them"
        )
    return Variant(rotary_size=None if size == head_dim else size, window=window_of(settings))


def window_of(settings: Settings) -> int | None:
    """Tokens of the sliding window; None without one. Raises CheckpointError."""
    return None if settings.get(WINDOW) is None else positive_int(settings, WINDOW, MOST["max_position_embeddings"])


def gemma3(settings: Settings, layers: int, head_dim: int) -> Variant:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if settings.get(name) is not None:
            raise CheckpointError(f"config.json: {name} {brief(settings[name])} is not supported; null is")
    # transformers rounds this factor to the weights' type; fp32 and llama.cpp keep it.
    plain = Variant(
        qk_norm=True,
        embedding_multiplier=math.sqrt(positive_int(settings, "hidden_size")),
        attention_multiplier=positive_number("query_pre_attn_scalar", settings.get("query_pre_attn_scalar")) ** -0.5,
        local_theta=positive_number(LOCAL_THETA, settings.get(LOCAL_THETA)),
        output_norms=True,
        gelu=True,
    )
    pattern = positive_int(settings, PATTERN, MOST["num_hidden_layers"] + 1)
    derived = [SLIDING if (index + 1) % pattern else FULL for index in range(layers)]
    return with_window(plain, settings, settings.get("layer_types") or derived)


def with_window(variant: Variant, settings: Settings, types: list[str]) -> Variant:
    """A variant with the window in layers that slide; without a window where none does."""
    if SLIDING not in types or (window := window_of(settings)) is None:
        return replace(variant, local_theta=None)
    full = tuple(index for index, kind in enumerate(types) if kind == FULL)
    return replace(variant, window=window, full_layers=full)


def switched_window(variant: Variant, settings: Settings, derived: list[str]) -> Variant:
    """The same of a family with `use_sliding_window`. derived: the layers' types when the file does not list them."""
    if not switch(settings, "use_sliding_window"):
        return variant
    return with_window(variant, settings, settings.get("layer_types") or derived)


def qwen_window(variant: Variant, settings: Settings, layers: int) -> Variant:
    """The same of Qwen, whose layers slide from `max_window_layers` on."""
    first = settings.get("max_window_layers")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise CheckpointError(f"config.json: max_window_layers must be a whole number, found {brief(first)}")
    derived = [SLIDING if index >= first else FULL for index in range(layers)]
    return switched_window(variant, settings, derived)


SCALARS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
LOCAL_THETA, PATTERN = "rope_local_base_freq", "sliding_window_pattern"
QWEN = {WINDOW: 4096, "max_window_layers": 28, "num_key_value_heads": 32}
FAMILIES = {
    "LlamaForCausalLM": Family("llama", llama, BIASES),
    "MistralForCausalLM": Family("mistral", mistral, (WINDOW,), {WINDOW: 4096, "num_key_value_heads": 8}),
    "Qwen2ForCausalLM": Family("qwen2", qwen2, WINDOWED, QWEN, slides=True),
    "Qwen3ForCausalLM": Family("qwen3", qwen3, ("attention_bias", *WINDOWED), QWEN | {"head_dim": 128}, slides=True),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        smollm3,
        (*BIASES, *WINDOWED, "no_rope_layers", "no_rope_layer_interval"),
        {"rope_theta": 2e6, "tie_word_embeddings": True, "num_key_value_heads": 4, "no_rope_layer_interval": 4},
        slides=True,
    ),
    "GraniteForCausalLM": Family("granite", granite, (*BIASES, *MULTIPLIERS), dict.fromkeys(MULTIPLIERS, 1.0)),
    "Phi3ForCausalLM": Family(
        "phi3",
        phi3,
        (WINDOW, "full_attn_mod", "interpolate_factor"),
        {ORIGINAL: 4096, "rms_norm_eps": 1e-5},
        {"su": LONGROPE, YARN: LONGROPE},
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        gemma3,
        (WINDOW, PATTERN, LOCAL_THETA, "attention_bias", "cache_implementation", "hidden_activation", *SCALARS),
        {"rope_theta": 1e6, LOCAL_THETA: 1e4, "tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256}
        | {WINDOW: 4096, PATTERN: 6, "query_pre_attn_scalar": 256, "bos_token_id": 2, "eos_token_id": 1},
        activation="gelu_pytorch_tanh",
        slides=True,
        adds_one=True,
    ),
}
LISTED = ", ".join(FAMILIES)  # for error messages


def family_of(config: Settings) -> tuple[Family, Settings]:
    """The family of a config.json, and its settings in one spelling, with defaults. Raises CheckpointError."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    name = next((name for name in names if isinstance(name, str) and name in FAMILIES), None)
    if name is None:
        found = ", ".join(map(brief, names[:3])) or "none"
        raise CheckpointError(f"config.json: architecture {found} is not supported; this project runs {LISTED}")
    family = FAMILIES[name]
    if config.get("model_type") not in (None, family.model_type):
        raise CheckpointError(
            f"config.json: model_type {brief(config['model_type'])} is not that of {name}, which is "
            f"{family.model_type!r}: set it to the model's own"
        )
    for setting in {"hidden_act", *family.settings} & ACTIVATIONS:
        activation = config.get(setting, family.activation)
        if activation != family.activation and (activation, family.activation) != ("swish", "silu"):
            raise CheckpointError(
                f"config.json: {setting} {brief(activation)} is not supported; {name} uses {family.activation!r}"
            )
    for setting, value in config.items():
        off = value is None or value is False or value in ("", [], {})
        if not off and not setting.startswith("_") and setting not in COMMON | IGNORED | {*family.settings}:
            raise CheckpointError(
                f"config.json: {brief(setting)} is not a setting of {name}: remove it if the model computes the same "
                "without it"
            )
    config = {**family.defaults, **(flat_ropes(config) if family.variant is gemma3 else config)}
    refuse_other_layers(config, name, family)
    return family, config


def flat_ropes(config: Settings) -> Settings:
    """transformers 5's `rope_parameters`, by type of layer, as release 4 spells them. Raises CheckpointError."""
    found = config.get("rope_parameters")
    if not isinstance(found, dict) or not found.keys() & {SLIDING, FULL}:
        return config
    whole, local = (found.get(kind) or {} for kind in (FULL, SLIDING))
    if found.keys() - {SLIDING, FULL} or not (isinstance(whole, dict) and isinstance(local, dict)):
        raise CheckpointError(f"config.json: rope_parameters must have an object for {FULL} and one for {SLIDING}")
    others = [name for name in local if name not in ("rope_type", "rope_theta")]
    if others or local.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise CheckpointError(f"config.json: rope scaling of {SLIDING}, or beside rope_parameters, is not supported")
    theta = {LOCAL_THETA: local["rope_theta"]} if "rope_theta" in local else {}
    return {**config, "rope_parameters": whole, **theta}


def refuse_other_layers(config: Settings, name: str, family: Family) -> None:
    """Raises CheckpointError for layers, or a partial rotation, that the architecture does not have."""
    types, kinds = config.get("layer_types"), (FULL, SLIDING) if family.slides else (FULL,)
    listed = isinstance(types, list) and all(isinstance(each, str) and each in kinds for each in types)
    if types is not None and not (listed and len(types) in (0, config.get("num_hidden_layers"))):
        raise CheckpointError(f"config.json: layer_types must list {' or '.join(kinds)} for each layer of {name}")
    switched = "use_sliding_window" in family.settings
    if types and SLIDING in types and switched and not config.get("use_sliding_window"):
        raise CheckpointError(f"config.json: layer_types has {SLIDING} where use_sliding_window is off: correct one")
    partial = rope_settings(config).get(PARTIAL, config.get(PARTIAL))
    if family.variant is not phi3 and partial not in (None, 1):
        raise CheckpointError(f"config.json: {PARTIAL} {brief(partial)} is not supported for {name}; 1 is")
